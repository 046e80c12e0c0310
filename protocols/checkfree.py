"""CheckFree's rebuild of a lost stage from its two neighbours (arXiv 2506.15461, section 4).

    W_i <- (w_{i-1} W_{i-1} + w_{i+1} W_{i+1}) / (w_{i-1} + w_{i+1})    w_j = norm of stage j's gradient + 1e-4

CheckFree+ runs every other microbatch with (1, 2) and (K-2, K-1) exchanged, so that each edge stage has a twin that
knows its place: a lost one becomes a copy of it. The restart of Adam is `InnerOptimizer.restart`.

Invariant: the mix lies between the neighbours, element by element; equal neighbours give themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from protocols.errors import LocalProtocolError

NORM_FLOOR = 1e-4  # published: keeps two zero norms from dividing by zero
RATE_BOOST = (
    1.1  # published: of the rebuilt stage's first learning rate, for good, and once however often it is lost
)
SWAPPED_STAGES_MIN = 5  # with fewer the two exchanged pairs would share a stage


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


def is_swapped(microbatch: int) -> bool:
    """CheckFree+: every other microbatch, the second first."""
    return microbatch % 2 == 1


def swapped_order(num_stages: int) -> tuple[int, ...]:
    """CheckFree+: the path of such a microbatch; two swaps in SkipPipe's sense."""
    if num_stages < SWAPPED_STAGES_MIN:
        raise LocalProtocolError(f"{num_stages} stages have no two pairs to exchange")
    return (0, 2, 1, *range(3, num_stages - 2), num_stages - 1, num_stages - 2)


def twin(stage: int, num_stages: int) -> int | None:
    """CheckFree+: the stage that `stage` changes places with; None for those further inside."""
    first, last = 1, num_stages - 1
    return {first: first + 1, first + 1: first, last: last - 1, last - 1: last}.get(stage)
