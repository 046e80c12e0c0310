"""CheckFree's rebuild of a lost stage from its two neighbours (arXiv 2506.15461, section 4).

    W_i <- (w_{i-1} W_{i-1} + w_{i+1} W_{i+1}) / (w_{i-1} + w_{i+1})    w_j = norm of stage j's gradient + 1e-4

Invariant: the mix lies between the neighbours, element by element; equal neighbours give themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from protocols.errors import LocalProtocolError

NORM_FLOOR = 1e-4  # published: keeps two zero norms from dividing by zero


def mix(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor], left_norm: float, right_norm: float
) -> dict[str, Tensor]:
    """The lost stage from both neighbours, whose weights the caller has renamed to its names.

    The norms are those before clipping, smoothed, from the neighbours' records. One that is no finite positive
    number counts as zero: strangers write records.
    """
    if left.keys() != right.keys() or any(left[name].shape != right[name].shape for name in left):
        raise LocalProtocolError("neighbours differ in names or shapes")
    share = left_share(left_norm, right_norm)
    return {name: right[name].lerp(left[name], share) for name in left}


def left_share(left_norm: float, right_norm: float) -> float:
    """w_{i-1} / (w_{i-1} + w_{i+1}), without overflow."""
    return 1.0 / (1.0 + _weight(right_norm) / _weight(left_norm))


def _weight(norm: float) -> float:
    return (norm if math.isfinite(norm) and norm > 0 else 0.0) + NORM_FLOOR
