"""What a study found, in the form of the report; means with their interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.bars import Bar

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t for the 95 % interval of a mean of so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Of one study."""

    bars: tuple[Bar, ...]
    facts: tuple[tuple[str, str], ...] = ()


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean, its 95 % interval, and every value: one of each seed."""
    each = ", ".join(f"{value:.{digits}f}" for value in values)
    if len(values) not in T_95:
        return each
    margin = T_95[len(values)] * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):.{digits}f} +- {margin:.{digits}f} ({each})"


def ratio(part: float, whole: float) -> float:
    """NaN, which fails every bar, where there is no damage to compare with."""
    return part / whole if whole > 0 else math.nan
