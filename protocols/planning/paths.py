"""Paths for an arranged instance: search on estimates, judge the best in the round model, settle what shares relays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from protocols.planning.anneal import Effort, Judge, anneal
from protocols.planning.instance import Instance
from protocols.planning.mend import Mend
from protocols.planning.objective import Objective, Score
from protocols.planning.pairs import pair_searches
from protocols.planning.plan import Plan, excess, relay_loads
from protocols.planning.round_model import Path
from protocols.planning.rows import Rows, first_rows
from protocols.planning.settle import Thoroughness, settle

FINE_MICROBATCHES_MAX = 128  # of a plan whose microbatches may each get a path of their own from the start
SMALL_MICROBATCHES = (
    12  # so few are settled even where they share no relay: estimates are rough, simulations cheap
)
JUDGED_OPERATIONS_MAX = 30_000  # to simulate when choosing among what the searches found
SETTLED = 3  # of the candidates, the best so many

THOROUGH = Thoroughness(operations_max=10_000)
SMALL = Thoroughness(operations_max=10_000, shakes=20)
BRIEF = Thoroughness(operations_max=2_000)


def find_paths(
    instance: Instance,
    *,
    seed: int = 0,
    jitter: float = 0.0,
    start: Rows | None = None,
    brief: bool = False,
) -> Plan:
    """The best plan that was found; `start` is a candidate too. `brief` searches a few times less."""
    objective = Objective(instance, jitter=jitter, seed=seed)
    small = instance.total_microbatches <= SMALL_MICROBATCHES
    candidates = _candidates(instance, seed, start, brief=brief)
    if small:
        candidates += pair_searches(instance, objective, seed=seed, brief=brief)
    mends = [evened(instance, objective, paths) for paths in candidates]
    if min(mend.unevenness for mend in mends) > 1:  # whole rows left what single microbatches could not mend
        mends += [evened(instance, objective, in_turns(instance, first_rows(instance, fine=True)))]
    thoroughness = BRIEF if brief else SMALL if small else THOROUGH
    plans: list[Plan] = []
    for score, mend in best_first(instance, objective, mends, kept=1 if brief else SETTLED):
        if small or shares_relays(mend.paths):
            mend.touch_all()
        plans.append(settle(instance, mend, score.finish_s, thoroughness, jitter=jitter, seed=seed))
        if not mend.changed:
            break  # nothing to settle: the candidates keep their order
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: (plan.shortfall, objective.score(plan.paths)))


def evened(instance: Instance, objective: Objective, paths: Sequence[Path]) -> Mend:
    """Whole rows may not divide evenly: single microbatches then visit other stages, or other relays."""
    mend = Mend(instance, objective, paths)
    mend.level()
    mend.spill()
    return mend


def best_first(
    instance: Instance, objective: Objective, mends: Sequence[Mend], *, kept: int
) -> list[tuple[Score, Mend]]:
    """Those with the fewest faults (uneven visits, then visits beyond the room of relays), by score."""
    judged: list[tuple[tuple[int, int], Score, int]] = []
    for at, mend in enumerate(mends):
        faults = (max(1, mend.unevenness), excess(instance, mend.paths))
        rivals = sorted(judged)[kept - 1 : kept]  # behind all of the best few, none need be timed to its end
        cutoff_s = min((score.makespan_s for other, score, _ in rivals if other <= faults), default=math.inf)
        judged.append((faults, objective.score(mend.paths, cutoff_s=cutoff_s), at))
    fewest = min(judged)[0]
    return [(score, mends[at]) for faults, score, at in sorted(judged)[:kept] if faults == fewest]


def _candidates(instance: Instance, seed: int, start: Rows | None, *, brief: bool) -> list[tuple[Path, ...]]:
    """In injection order, without duplicates."""
    found = _search(instance, first_rows(instance), seed, brief=brief)
    if start is not None:
        found.append(start)
    if _may_be_fine(instance):
        found += _search(instance, first_rows(instance, fine=True), seed, brief=brief)
    return list(dict.fromkeys(in_turns(instance, rows) for rows in found))


def _may_be_fine(instance: Instance) -> bool:
    """Single microbatches pay where a fast relay has room to take more than its share."""
    relays = instance.stage_of != 0
    roomy = bool((instance.room[relays] > instance.microbatches).any())
    return roomy and instance.microbatches > 1 and instance.total_microbatches <= FINE_MICROBATCHES_MAX


def _search(instance: Instance, first: Rows, seed: int, *, brief: bool) -> list[Rows]:
    """What the searches found, best estimate first; of a large plan the best few."""
    effort = Effort.for_rows(len(first.weights_A), brief=brief)
    found = [first, *anneal(instance, first, effort, seed=seed)]
    found.sort(key=Judge.of(instance, first).estimate)
    operations = instance.total_microbatches * (2 * instance.rules.path_stages + 1)
    return found[: max(1, (BRIEF.operations_max if brief else JUDGED_OPERATIONS_MAX) // operations)]


def in_turns(instance: Instance, rows: Rows) -> tuple[Path, ...]:
    """Injection order: originators take turns by id; each sends its longest trips first."""
    judge = Judge.of(instance, rows)
    rows_us = judge.rows_us(rows.holders_AK, rows.sets_A(judge.sets))
    orders_AL = judge.best_orders(rows)
    queues: dict[int, list[Path]] = {}
    for row in sorted(np.flatnonzero(rows.weights_A).tolist(), key=lambda row: -rows_us[row]):
        path = tuple(rows.holders_AK[row, orders_AL[row]].tolist())
        queues.setdefault(path[0], []).extend([path] * int(rows.weights_A[row]))
    return tuple(path for turn in zip(*(queues[one] for one in sorted(queues)), strict=True) for path in turn)


def shares_relays(paths: Sequence[Path]) -> bool:
    """Does any relay serve microbatches of two different paths?"""
    distinct = tuple(set(paths))
    return sum(relay_loads(distinct).values()) > len(relay_loads(distinct))
