"""Who serves which stage, where that is free: peers near each other share a path.

A skeleton of rows (each peer in one seat at most) is searched with all seats exchangeable; which stage a seat belongs
to is a label that comes with it. Where averaging counts, peers then exchange stages as long as the estimated makespan
and the averaging time together fall. The best arrangements are planned in full.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (numpy's stubs leave the types of reductions, .T and .copy() open)

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from protocols.planning.anneal import Effort, Judge, anneal
from protocols.planning.instance import US_PER_S, Floats, Instance, Ints
from protocols.planning.paths import find_paths
from protocols.planning.plan import Plan, worst_stage_link_s
from protocols.planning.rows import ABSENT, Rows, first_rows
from protocols.planning.stage_sets import StageSets, stage_sets

PLANNED = 2  # of the arrangements found, so many are planned in full
SETTLED_PEERS_MAX = 128  # beyond, averaging only chooses among what was found


def arrange(instance: Instance, *, seed: int = 0, jitter: float = 0.0) -> Plan:
    """The best plan over the arrangements that were tried."""
    skeleton = _skeleton(instance)
    found = anneal(instance, skeleton, Effort.for_rows(len(skeleton.weights_A)), seed=seed, free=True)
    judge = Judge.of(instance, skeleton)
    settles = instance.averaging_factor > 0 and instance.num_peers <= SETTLED_PEERS_MAX
    if settles:
        found = [_settled(instance, rows) for rows in found]
    found.sort(key=lambda rows: (_total_s(instance, judge, rows), judge.estimate(rows)))
    found = found[: PLANNED if instance.num_peers <= SETTLED_PEERS_MAX else 1]
    if settles:
        found.append(_settled(instance, first_rows(instance.arranged(_neighbours_together(instance)))))
    plans = [_planned(instance, rows, seed, jitter) for rows in found]
    return min(plans, key=lambda plan: (plan.shortfall, plan.makespan_s + plan.averaging_s))


def _planned(instance: Instance, rows: Rows, seed: int, jitter: float) -> Plan:
    arranged = instance.arranged(_stage_of(instance, rows))
    complete = int(rows.weights_A.sum()) == instance.total_microbatches
    return find_paths(arranged, seed=seed, jitter=jitter, start=rows if complete else None)


def _stage_of(instance: Instance, rows: Rows) -> Ints:
    stage_of_N = np.zeros(instance.num_peers, dtype=np.int64)
    line, stage = np.nonzero(rows.holders_AK != ABSENT)
    stage_of_N[rows.holders_AK[line, stage]] = stage
    return stage_of_N


def _skeleton(instance: Instance) -> Rows:
    """As many coarse rows as the stages' sizes allow, of peers in the order of a walk; the rest is on the bench."""
    sets = stage_sets(instance.rules)
    sizes_K = np.array(instance.stage_sizes, dtype=np.int64)
    chosen, seats_K = next(_that_fit(sets, sizes_K))
    num_rows = len(chosen)
    bench = np.repeat(np.arange(len(sizes_K)), sizes_K - seats_K)
    holders_AK = np.full((num_rows + len(bench), len(sizes_K)), ABSENT, dtype=np.int64)
    walk = _walk(instance)
    for row in range(num_rows):
        stages = sets.orders_SWL[chosen[row], 0]
        holders_AK[row, stages] = walk[row * len(stages) : (row + 1) * len(stages)]
    holders_AK[np.arange(num_rows, len(holders_AK)), bench] = walk[num_rows * instance.rules.path_stages :]
    weights = [instance.microbatches] * num_rows + [0] * len(bench)
    return Rows(holders_AK, np.array(weights, dtype=np.int64))


def _that_fit(sets: StageSets, sizes_K: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Stage sets of as many rows as there are seats for, and the seats that they take; one row always fits."""
    for num_rows in range(int(sizes_K[0]), 0, -1):
        chosen = sets.spread(num_rows, sizes_K)
        seats_K = sets.members_SK[chosen].sum(axis=0)
        seats_K[0] = num_rows
        if (seats_K <= sizes_K).all():
            yield chosen, seats_K


def _neighbours_together(instance: Instance) -> Ints:
    """[N] The opposite of paths among neighbours: stages among neighbours, which average fastest."""
    stage_of_N = np.zeros(instance.num_peers, dtype=np.int64)
    stage_of_N[_walk(instance)] = np.repeat(np.arange(len(instance.stage_sizes)), instance.stage_sizes)
    return stage_of_N


def _walk(instance: Instance) -> Ints:
    """All peers, each next one the nearest that is left."""
    left_N = np.zeros(instance.num_peers, dtype=np.int64)
    walk = [0]
    left_N[0] = np.iinfo(np.int64).max // 2
    while len(walk) < instance.num_peers:
        nearest = int(np.argmin(instance.round_trip_us[walk[-1]] + left_N))
        left_N[nearest] = left_N[0]
        walk.append(nearest)
    return np.array(walk, dtype=np.int64)


def _total_s(instance: Instance, judge: Judge, rows: Rows) -> float:
    """Estimated makespan and averaging together."""
    averaging_s = instance.averaging_factor * worst_stage_link_s(instance.arranged(_stage_of(instance, rows)))
    return judge.estimate(rows)[0] / US_PER_S + averaging_s


def _settled(instance: Instance, rows: Rows) -> Rows:
    """Let two peers exchange their places, the pair that gains most, until no pair that matters gains."""
    judge = Judge.of(instance, rows)
    sets_A = rows.sets_A(judge.sets)
    total_s = _total_s(instance, judge, rows)
    while True:
        pairs_C2 = _pairs(instance, judge, rows)
        places_CN = np.tile(np.arange(-1, instance.num_peers), (len(pairs_C2), 1))[:, 1:]
        np.put_along_axis(places_CN, pairs_C2, pairs_C2[:, ::-1], axis=1)
        with_absent = np.concatenate((places_CN, np.full((len(pairs_C2), 1), ABSENT)), axis=1)
        holders_CAK = with_absent[:, rows.holders_AK]
        slowest_C = _slowest_us(judge, holders_CAK, sets_A) / US_PER_S
        stage_of_CN = _stage_of(instance, rows)[places_CN]
        together_CNN = stage_of_CN[:, :, None] == stage_of_CN[:, None, :]
        totals_C = slowest_C + instance.averaging_factor * (instance.link_s * together_CNN).max(axis=(1, 2))
        best = int(np.argmin(totals_C))
        if totals_C[best] >= total_s - 1e-9:
            return rows
        total_s = float(totals_C[best])
        rows = Rows(holders_CAK[best], rows.weights_A)


def _slowest_us(judge: Judge, holders_CAK: Ints, sets_A: Ints) -> Floats:
    runs = np.flatnonzero(sets_A != ABSENT)
    candidates, stages = len(holders_CAK), holders_CAK.shape[2]
    rows_us = judge.rows_us(holders_CAK[:, runs].reshape(-1, stages), np.tile(sets_A[runs], candidates))
    return rows_us.reshape(candidates, -1).max(axis=1)


def _pairs(instance: Instance, judge: Judge, rows: Rows) -> Ints:
    """[C, 2] Pairs of different stages; one of the two is in the slowest row, or at a stage's slowest link."""
    stage_of_N = _stage_of(instance, rows)
    runs = rows.weights_A > 0
    slowest = int(np.argmax(np.where(runs, judge.rows_us(rows.holders_AK, rows.sets_A(judge.sets)), 0)))
    row = rows.holders_AK[slowest]
    together_NN = stage_of_N[:, None] == stage_of_N
    ends = np.unravel_index(int(np.argmax(instance.link_s * together_NN)), together_NN.shape)
    critical = sorted({*row[row != ABSENT].tolist(), *(int(end) for end in ends)})
    pairs = [
        (one, other)
        for one in critical
        for other in range(len(stage_of_N))
        if stage_of_N[one] != stage_of_N[other]
    ]
    return np.array(pairs, dtype=np.int64)
