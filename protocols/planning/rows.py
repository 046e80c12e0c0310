"""Rows of paths: the form in which plans are searched.

A row is a path with the number of its microbatches. In coarse rows all microbatches of an originator share one path:
where there are relays enough, such rows do not meet, and each is as fast as it is alone. Fine rows have one microbatch
each. A relay that no row needs sits on the bench: a row of weight 0, from which it may be exchanged in.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (numpy's stubs leave the types of reductions, .T and .copy() open)

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from protocols.planning.instance import Instance, Ints
from protocols.planning.stage_sets import StageSets, stage_sets

ABSENT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A rows, K stages: who runs which stage of which row. Column 0 is the originator."""

    holders_AK: Ints  # indices of peers; ABSENT where the row skips the stage
    weights_A: Ints  # microbatches; 0: a peer on the bench

    def loads_N(self, num_peers: int) -> Ints:
        """Microbatches that each peer relays."""
        relays_AK = self.holders_AK[:, 1:]
        weights_AK = np.broadcast_to(self.weights_A[:, None], relays_AK.shape)
        present = relays_AK != ABSENT
        return np.bincount(relays_AK[present], weights_AK[present], minlength=num_peers).astype(np.int64)

    def sets_A(self, sets: StageSets) -> Ints:
        """Each row's stage set; the bench has ABSENT."""
        present = self.holders_AK[:, 1:] != ABSENT
        masks_A = (present << np.arange(1, self.holders_AK.shape[1])).sum(axis=1)
        return np.where(self.weights_A > 0, sets.find(masks_A), ABSENT)


def first_rows(instance: Instance, *, fine: bool = False) -> Rows:
    """Rows with even visits and loads, as far as whole rows allow; relays near their originator, while they last."""
    sets = stage_sets(instance.rules)
    size = 1 if fine else instance.microbatches
    owners = np.repeat(instance.replicas(0), instance.microbatches // size)
    chosen = sets.spread(len(owners), _stage_room(instance))
    seats_N = _seats(instance, sets.members_SK[chosen].sum(axis=0), size)
    bench = np.flatnonzero((seats_N == 0) & (_stages(instance) != 0) & (instance.room >= size))
    holders_AK = np.full((len(owners) + len(bench), instance.rules.num_stages), ABSENT, dtype=np.int64)
    holders_AK[: len(owners)] = _place(instance, sets.orders_SWL[chosen, 0], owners, seats_N)
    holders_AK[np.arange(len(owners), len(holders_AK)), _stages(instance)[bench]] = bench
    return Rows(holders_AK, np.repeat([size, 0], [len(owners), len(bench)]))


def rows_of_paths(instance: Instance, paths: Sequence[tuple[int, ...]]) -> Rows:
    """Rows from paths that are there, one for each distinct path, and a bench of the relays that they leave out."""
    weights = Counter(paths)
    hops_AL = np.array(list(weights), dtype=np.int64)
    idle = np.setdiff1d(np.flatnonzero(_stages(instance) != 0), hops_AL)
    holders_AK = np.full((len(weights) + len(idle), instance.rules.num_stages), ABSENT, dtype=np.int64)
    holders_AK[np.arange(len(weights))[:, None], _stages(instance)[hops_AL]] = hops_AL
    holders_AK[np.arange(len(weights), len(holders_AK)), _stages(instance)[idle]] = idle
    return Rows(holders_AK, np.array([*weights.values()] + [0] * len(idle), dtype=np.int64))


def _stages(instance: Instance) -> Ints:
    assert instance.stage_of is not None
    return instance.stage_of


def _stage_room(instance: Instance) -> Ints:
    """[K] Microbatches that a stage's replicas may relay together."""
    return np.bincount(_stages(instance), instance.room, minlength=instance.rules.num_stages).astype(np.int64)


def _seats(instance: Instance, visits_K: Ints, size: int) -> Ints:
    """[N] Rows that each relay serves, dealt to whoever would be done first; beyond their room once all are full."""
    seats_N = np.zeros(instance.num_peers, dtype=np.int64)
    relay_us, room = instance.relay_us.tolist(), instance.room.tolist()

    def turn(relay: int) -> tuple[bool, int, int]:
        load = (int(seats_N[relay]) + 1) * size
        return (load > room[relay], load * relay_us[relay], relay)

    for stage in instance.rules.relayed_stages:
        heap = [turn(relay) for relay in instance.replicas(stage).tolist()]
        heapify(heap)
        for _ in range(int(visits_K[stage])):
            relay = heap[0][2]
            seats_N[relay] += 1
            heapreplace(heap, turn(relay))
    return seats_N


def _place(instance: Instance, orders_AL: Ints, owners: Ints, seats_N: Ints) -> Ints:
    """Row by row, hop by hop: the nearest relay that still has a seat; near to the last hop and to the originator."""
    round_trip_us = instance.round_trip_us
    holders_AK = np.full((len(owners), instance.rules.num_stages), ABSENT, dtype=np.int64)
    left_N = seats_N.copy()
    replicas = [instance.replicas(stage) for stage in range(instance.rules.num_stages)]
    for row, owner in enumerate(owners.tolist()):
        last = holders_AK[row, 0] = owner
        for stage in orders_AL[row, 1:].tolist():
            open_ = replicas[stage][left_N[replicas[stage]] > 0]
            last = int(open_[np.argmin(round_trip_us[last, open_] + round_trip_us[open_, owner])])
            left_N[last] -= 1
            holders_AK[row, stage] = last
    return holders_AK
