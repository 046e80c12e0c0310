"""Which stages a path may run, and in which orders; how rows of paths visit all stages alike.

A stage set is a bit mask of the stages that a path runs besides stage 0. SkipPipe's equal visits: the stages after the
first run for the same number of microbatches, to within one, or some layers would train less than others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import comb

import numpy as np

from protocols.errors import ConfigError
from protocols.planning.draws import Draws
from protocols.planning.instance import Ints, PathRules
from protocols.stage_order import legal_orders

SETS_MAX = 1000  # all sets of up to 13 stages; longer models use evenly spread ones
ORDERS_MAX = 8  # of one set: those with the fewest swaps
LONG_RUN_ROWS = 500
LEVELLING_STEPS = 1000
STAGES_MAX = 62  # bits of a mask


@dataclass(frozen=True, slots=True, eq=False)
class StageSets:
    """The legal sets, by ascending mask. S sets, W orders each, L stages a path, K stages."""

    masks_S: Ints
    orders_SWL: Ints  # in order first; a set with fewer orders repeats its first
    members_SK: Ints  # 1 where the set has the stage; stage 0 is left out

    def find(self, masks: Ints) -> Ints:
        """Index of each mask, -1 where the set is not legal."""
        at = np.minimum(np.searchsorted(self.masks_S, masks), len(self.masks_S) - 1)
        return np.where(self.masks_S[at] == masks, at, -1)

    def spread(self, num_rows: int, room_K: Ints) -> Ints:
        """A set for each row, so that stages are visited as evenly as the rules allow.

        What does not divide evenly goes to the stages with the most room.
        """
        rank_K = np.argsort(np.argsort(-room_K, kind="stable"), kind="stable")
        chosen = self._dealt(num_rows, rank_K)
        if self._unevenness(chosen) > 1:
            chosen = self._in_proportion(num_rows, self._dealt(LONG_RUN_ROWS, rank_K))
            self._level(chosen)
        return chosen

    def _dealt(self, num_rows: int, rank_K: Ints) -> Ints:
        """Each row takes the set whose stages were visited least so far."""
        num_stages = len(rank_K)
        visits_K = np.zeros(num_stages, dtype=np.int64)
        chosen = np.zeros(num_rows, dtype=np.int64)
        for row in range(num_rows):
            chosen[row] = int(np.argmin(self.members_SK @ (visits_K * num_stages**2 + rank_K)))
            visits_K += self.members_SK[chosen[row]]
        return chosen

    def _in_proportion(self, num_rows: int, long_run: Ints) -> Ints:
        """As often as in the long run, where mistakes of the beginning have evened out. (Largest remainders.)"""
        rows_S, remainders_S = np.divmod(
            np.bincount(long_run, minlength=len(self.masks_S)) * num_rows, len(long_run)
        )
        rows_S[np.argsort(-remainders_S, kind="stable")[: num_rows - rows_S.sum()]] += 1
        return np.repeat(np.arange(len(rows_S)), rows_S)

    def _unevenness(self, chosen: Ints) -> int:
        return int(np.ptp(self.members_SK[chosen].sum(axis=0)[self.members_SK.any(axis=0)]))

    def _level(self, chosen: Ints) -> None:
        """Rows at random take sets that make visits no less even, until none is visited twice more than another."""
        draws = Draws(len(chosen))
        for _ in range(LEVELLING_STEPS):
            if self._unevenness(chosen) <= 1:
                return
            which_row, which_set = draws.uniform(2).tolist()
            row = int(which_row * len(chosen))
            change_SK = self.members_SK - self.members_SK[chosen[row]]
            visits_K = self.members_SK[chosen].sum(axis=0)
            gain_S = (change_SK * (2 * visits_K + change_SK)).sum(axis=1)  # of the sum of squares
            options = np.flatnonzero(gain_S <= 0)
            chosen[row] = options[int(which_set * len(options))]


@lru_cache(maxsize=16)
def stage_sets(rules: PathRules) -> StageSets:
    """All legal sets of a run, with their orders."""
    if rules.num_stages > STAGES_MAX:
        raise ConfigError(f"{rules.num_stages} stages: the planner takes {STAGES_MAX} at most")
    found = [
        (sum(1 << stage for stage in stages), orders)
        for stages in _candidates(rules)
        if (orders := _orders(rules, stages))
    ]
    if not found:
        raise ConfigError(
            f"no path of {rules.path_stages} of {rules.num_stages} stages is legal when the next stage is at most"
            f" {rules.skip_width_max} beyond the last: allow wider skips, or longer paths"
        )
    reached = {stage for _, orders in found for stage in orders[0]}
    if unreached := sorted(set(rules.relayed_stages) - reached):
        raise ConfigError(
            f"stage {unreached[0]} is on no path of {rules.path_stages} stages whose next stage is at most"
            f" {rules.skip_width_max} beyond the last: allow wider skips, or longer paths"
        )
    found.sort()
    masks_S = np.array([mask for mask, _ in found], dtype=np.int64)
    width = max(len(orders) for _, orders in found)
    orders_SWL = np.array(
        [orders + orders[:1] * (width - len(orders)) for _, orders in found], dtype=np.int64
    )
    members_SK = masks_S[:, None] >> np.arange(rules.num_stages) & 1
    return StageSets(masks_S, orders_SWL, members_SK)


@lru_cache(maxsize=16)
def orders_by_set(rules: PathRules) -> dict[frozenset[int], tuple[tuple[int, ...], ...]]:
    """From a path's stages, stage 0 included, to the orders in which it may run them."""
    sets = stage_sets(rules)
    return {
        frozenset(orders_WL[0]): tuple(dict.fromkeys(map(tuple, orders_WL)))
        for orders_WL in sets.orders_SWL.tolist()
    }


def _candidates(rules: PathRules) -> list[tuple[int, ...]]:
    """All sets of the right size; of too many, those that skip evenly, one for each start."""
    stages, run = rules.relayed_stages, rules.path_stages - 1
    if comb(len(stages), run) <= SETS_MAX:
        return list(combinations(stages, run))
    skips, later = len(stages) - run, len(stages)
    skipped = [{(start + i * later // skips) % later for i in range(skips)} for start in range(later)]
    return sorted({tuple(stage for at, stage in enumerate(stages) if at not in out) for out in skipped})


def _orders(rules: PathRules, stages: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return legal_orders(
        rules.num_stages,
        rules.path_stages,
        swaps_max=rules.swaps_max,
        skip_width_max=rules.skip_width_max,
        missing=frozenset(range(1, rules.num_stages)) - frozenset(stages),
    )[:ORDERS_MAX]
