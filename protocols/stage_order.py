"""Which stage sequences are legal: SkipPipe's skip and swap rules (arXiv 2502.19913).

The frontier is the highest stage run so far. A path starts with stage 0, runs exactly `path_stages` stages, each at
most once; the next stage is at most `skip_width_max` beyond the frontier; a stage may run after a later one only if
it is one behind the frontier, at most `swaps_max` times.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice, pairwise

ORDERS_MAX = 4096  # enough for every K <= 12; larger models draw from the first of them


@lru_cache(maxsize=256)
def legal_orders(
    num_stages: int,
    path_stages: int,
    *,
    swaps_max: int,
    skip_width_max: int,
    missing: frozenset[int] = frozenset(),
) -> tuple[tuple[int, ...], ...]:
    """All legal orders without the `missing` stages, in-order ones first, then lexicographic; at most ORDERS_MAX."""
    found = _extend((0,), 0, 0, num_stages, path_stages, swaps_max, skip_width_max, missing)
    return tuple(sorted(islice(found, ORDERS_MAX), key=lambda order: (num_swaps(order), order)))


def _extend(
    order: tuple[int, ...],
    frontier: int,
    swaps: int,
    num_stages: int,
    path_stages: int,
    swaps_max: int,
    skip_width_max: int,
    missing: frozenset[int],
) -> Iterator[tuple[int, ...]]:
    if len(order) == path_stages:
        yield order
        return
    behind = frontier - 1
    may_swap = behind > 0 and behind not in order and behind not in missing and swaps < swaps_max
    left = sum(stage not in missing for stage in range(frontier + 1, num_stages)) + may_swap
    if left < path_stages - len(order):
        return  # too many were skipped: without this the search would walk every skip of a long model
    ahead = range(frontier + 1, min(frontier + skip_width_max, num_stages - 1) + 1)
    steps = [(stage, stage, swaps) for stage in ahead]
    if may_swap:
        steps.append((behind, frontier, swaps + 1))
    for stage, next_frontier, next_swaps in steps:
        if stage not in missing:
            yield from _extend((*order, stage), next_frontier, next_swaps, num_stages, path_stages, swaps_max,
                               skip_width_max, missing)  # fmt: skip


def num_swaps(order: tuple[int, ...]) -> int:
    """Stages of the order that run after a later one."""
    return sum(1 for left, right in pairwise(order) if right < left)


def is_legal(
    order: tuple[int, ...], num_stages: int, path_stages: int, *, swaps_max: int, skip_width_max: int
) -> bool:
    """The rules as a checker, written apart from the enumeration so that each can test the other."""
    if not order or order[0] != 0 or len(order) != path_stages or len(set(order)) != len(order):
        return False
    frontier = 0
    swaps = 0
    for stage in order[1:]:
        if not 0 < stage < num_stages or stage > frontier + skip_width_max:
            return False
        if stage < frontier:
            swaps += 1
            if stage != frontier - 1:
                return False
        frontier = max(frontier, stage)
    return swaps <= swaps_max
