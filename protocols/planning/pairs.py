"""Small plans, two microbatches at a time: each pair takes the best two paths of all that leave the plan legal.

Where rows are few, one exchange at a time often has no way out: a better plan visits other stages on several paths at
once. The paths of a small swarm can be listed, and two rows tried against all of them; after some starts at random,
that leaves little to find. Judged by trips alone, since what few microbatches wait for each other comes later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from math import prod

from protocols.planning.draws import Draws
from protocols.planning.instance import Instance
from protocols.planning.objective import Objective
from protocols.planning.round_model import Path
from protocols.planning.stage_sets import orders_by_set

PATHS_MAX = 3_000  # of one originator; beyond, listing them takes too long
STARTS, STARTS_BRIEF = 12, 3
LEAST_GAIN = 1e-9  # less may be rounding, and would go round in circles


@dataclass(frozen=True, slots=True)
class _Way:
    cost: float
    path: Path
    stages: frozenset[int]


def pair_searches(
    instance: Instance, objective: Objective, *, seed: int, brief: bool
) -> list[tuple[Path, ...]]:
    """What several starts lead to, in injection order; nothing where there are too many paths to list."""
    assert instance.stage_of is not None
    stages = orders_by_set(instance.rules)
    sizes = [prod(len(instance.replicas(stage)) for stage in members if stage) for members in stages]
    if sum(sizes) > PATHS_MAX:
        return []
    search = _Pairs(instance, objective)
    draws = Draws(seed)
    found = [search.settled(draws) for _ in range(STARTS_BRIEF if brief else STARTS)]
    return list(dict.fromkeys(rows for rows in found if rows))


class _Pairs:
    """Rows are microbatches; originators take turns by id."""

    def __init__(self, instance: Instance, objective: Objective) -> None:
        self._room: list[int] = instance.room.tolist()
        self._stages = instance.rules.relayed_stages
        originators: list[int] = instance.replicas(0).tolist()
        self._owners = originators * instance.microbatches
        self._ways = {one: self._listed(instance, objective, one) for one in originators}

    def _listed(self, instance: Instance, objective: Objective, originator: int) -> list[_Way]:
        """All paths of one originator, the shortest trip first."""
        found: list[_Way] = []
        for members in orders_by_set(instance.rules):
            relays = (instance.replicas(stage).tolist() for stage in sorted(members - {0}))
            for chosen in product(*relays):
                path = objective.in_orders((originator, *chosen))[0]
                found.append(_Way(_weighed(objective.trip_s(path)), path, members - {0}))
        found.sort(key=lambda way: (way.cost, way.path))
        return found

    def settled(self, draws: Draws) -> tuple[Path, ...]:
        """From a legal start at random until no pair can do better; empty where the start found no room."""
        rows: list[_Way] = []
        visits, loads = Counter[int](), Counter[int]()
        for owner, draw in zip(self._owners, draws.uniform(len(self._owners)).tolist(), strict=True):
            fits = [way for way in self._ways[owner] if self._has_room(way, loads)]
            even = [way for way in fits if self._is_even(visits, way.stages)]
            if not even:
                return ()
            rows.append(even[int(draw * draw * len(even))])
            visits.update(rows[-1].stages)
            loads.update(rows[-1].path[1:])
        improved = True
        while improved:
            improved = False
            for one, other in combinations(range(len(rows)), 2):
                improved |= self._improve(rows, one, other)
        queues = {owner: [row for row in rows if row.path[0] == owner] for owner in sorted(self._ways)}
        for queue in queues.values():  # the longest trip goes first
            queue.sort(key=lambda row: (-row.cost, row.path))
        return tuple(row.path for turn in zip(*queues.values(), strict=True) for row in turn)

    def _improve(self, rows: list[_Way], one: int, other: int) -> bool:
        rest = [row for index, row in enumerate(rows) if index not in (one, other)]
        visits = Counter(stage for row in rest for stage in row.stages)
        loads = Counter(relay for row in rest for relay in row.path[1:])
        best = rows[one].cost + rows[other].cost
        better = list(self._pairs(one, other, visits, loads, best * (1 - LEAST_GAIN)))
        if better:
            rows[one], rows[other] = better[-1]
        return bool(better)

    def _pairs(
        self, one: int, other: int, visits: Counter[int], loads: Counter[int], below: float
    ) -> Iterator[tuple[_Way, _Way]]:
        """Legal ones, each cheaper than those before."""
        for first in self._ways[self._owners[one]]:
            if first.cost >= below:
                return
            if not self._has_room(first, loads):
                continue
            with_first = loads + Counter(first.path[1:])
            for second in self._ways[self._owners[other]]:
                if first.cost + second.cost >= below:
                    break
                if self._is_even(visits, first.stages, second.stages) and self._has_room(second, with_first):
                    below = first.cost + second.cost
                    yield first, second
                    break

    def _has_room(self, way: _Way, loads: Counter[int]) -> bool:
        return all(loads[relay] < self._room[relay] for relay in way.path[1:])

    def _is_even(self, visits: Counter[int], *more: frozenset[int]) -> bool:
        counts = [visits[stage] + sum(stage in each for each in more) for stage in self._stages]
        return max(counts) - min(counts) <= 1


def _weighed(trip_s: float) -> float:
    """Its eighth power: added up, the longest trip decides. By products alone, which are the same on every machine."""
    square = trip_s * trip_s
    fourth = square * square
    return fourth * fourth
