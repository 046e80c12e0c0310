"""Changes to single microbatches that make a plan whole again: lost hops, uneven visits, overloaded relays.

After a loss, and where whole rows do not divide evenly over stages and relays. Each step takes the cheapest change
among the nearest few, and brings visits or loads closer together, so that there is an end to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from protocols.planning.instance import US_PER_S, Instance
from protocols.planning.objective import Objective
from protocols.planning.round_model import Path
from protocols.planning.stage_sets import stage_sets

TRIED = 8  # microbatches, and relays, that a change looks at
GONE = -1  # a hop whose peer left


class Mend:
    """Paths under repair, with what they load and visit; remembers which it changed."""

    def __init__(self, instance: Instance, objective: Objective, paths: Sequence[Path]) -> None:
        assert instance.stage_of is not None
        self.paths = list(paths)
        self.changed: set[int] = set()
        self.loads: Counter[int] = Counter()
        self.visits: Counter[int] = Counter()
        self._instance = instance
        self._objective = objective
        self._stage_of: list[int] = instance.stage_of.tolist()
        self._replicas: list[list[int]] = [
            instance.replicas(stage).tolist() for stage in range(instance.rules.num_stages)
        ]
        self._stages = instance.rules.relayed_stages
        self._room: list[int] = instance.room.tolist()
        self._relay_s: list[float] = (instance.relay_us / US_PER_S).tolist()
        for path in self.paths:
            self._count(path, 1)

    @property
    def unevenness(self) -> int:
        """By how much the most visited stage leads the least visited one; 1 where visits do not divide evenly."""
        visits = [self.visits[stage] for stage in self._stages]
        return max(visits) - min(visits)

    def replace_lost(self, lost_stage: int, *, whole_paths: bool = False) -> None:
        """Every hop that is gone: by a replica of its stage, or, when that was the last one, by another stage.

        `whole_paths`: microbatches of one path stay together.
        """
        together: dict[Path, Path] = {}
        for index, path in enumerate(self.paths):
            if GONE in path:
                if not (whole_paths and path in together):
                    together[path] = self._replaced(path, lost_stage)
                self._change(index, together[path])

    def _replaced(self, path: Path, lost_stage: int) -> Path:
        others = tuple(hop for hop in path if hop != GONE)
        if len(others) == self._instance.rules.path_stages:  # paths are shorter now
            found = self._objective.in_orders(others)[:1]
        else:
            run = {self._stage_of[hop] for hop in others}
            stages = (
                [lost_stage]
                if self._replicas[lost_stage]
                else [one for one in self._stages if one not in run]
            )
            stages.sort(key=lambda stage: self.visits[stage])
            found = [with_stage for stage in stages if (with_stage := self._with_stage(others, stage))]
        return found[0] if found else self._new_path(path[0])

    def _new_path(self, originator: int) -> Path:
        """Through the stages that are visited least, by the relays that are done first."""
        sets = stage_sets(self._instance.rules)
        visits_K = np.array([self.visits[stage] for stage in range(len(self._replicas))])
        order: list[int] = sets.orders_SWL[int(np.argmin(sets.members_SK @ visits_K)), 0].tolist()
        return (originator, *(min(self._replicas[stage], key=self._turn) for stage in order[1:]))

    def touch_all(self) -> None:
        """As if all had changed: everything is to be polished."""
        self.changed.update(range(len(self.paths)))

    def level(self) -> None:
        """Hand visits over from the stages with most to those with least, until none has two more than another."""
        while hand_over := next(self._hand_overs(), None):
            self._change(*hand_over)

    def spill(self) -> None:
        """Take visits off relays beyond their room, as long as another one of the stage would be done earlier."""
        for stage in self._stages:
            while move := self._spill_over(stage):
                self._change(*move)

    def _spill_over(self, stage: int) -> tuple[int, Path] | None:
        relays = self._replicas[stage]
        fullest = max(relays, key=lambda relay: (self.loads[relay] - self._room[relay], -relay))
        taker = min(relays, key=self._turn)
        overload = self.loads[fullest] > self._room[fullest]
        if not overload or self._turn(taker) >= (True, self.loads[fullest] * self._relay_s[fullest], -1):
            return None
        options = [
            (self._objective.trip_s(path), index, path) for index, path in self._taken_over(fullest, taker)
        ]
        return min(options)[1:] if options else None

    def _turn(self, relay: int) -> tuple[bool, float, int]:
        """Whether one visit more is too much, and when the relay would be done with it."""
        load = self.loads[relay] + 1
        return (load > self._room[relay], load * self._relay_s[relay], relay)

    def _taken_over(self, fullest: int, taker: int) -> Iterator[tuple[int, Path]]:
        for index, path in enumerate(self.paths):
            if fullest in path[1:]:
                yield index, tuple(taker if hop == fullest else hop for hop in path)

    def _hand_overs(self) -> Iterator[tuple[int, Path]]:
        """The cheapest for each pair of stages, the pair that differs most first. Each makes visits more even."""
        visits = self.visits
        pairs = [
            (giver, taker)
            for giver in self._stages
            for taker in self._stages
            if visits[giver] > visits[taker] + 1
        ]
        pairs.sort(key=lambda pair: visits[pair[1]] - visits[pair[0]])
        for giver, taker in pairs:
            options: list[tuple[float, int, Path]] = []
            for index in self._nearest_with(giver, taker, min(self._replicas[taker], key=self._turn)):
                others = tuple(hop for hop in self.paths[index] if self._stage_of[hop] != giver)
                if path := self._with_stage(others, taker):
                    options.append((self._objective.trip_s(path), index, path))
            if options:
                yield min(options)[1:]

    def _nearest_with(self, giver: int, taker: int, relay: int) -> list[int]:
        """Microbatches that run `giver` but not `taker`, of originators near to `relay`."""
        near_s = self._round_trips_s(relay)
        having = [
            (near_s[path[0]], index)
            for index, path in enumerate(self.paths)
            if giver in (run := [self._stage_of[hop] for hop in path]) and taker not in run
        ]
        return [index for _, index in sorted(having)[:TRIED]]

    def _with_stage(self, others: Path, stage: int) -> Path | None:
        """`others` and a replica of `stage`: one with room, if any, then by trip and queue. None: no order is legal."""
        near_s = self._round_trips_s(others[0])

        def promise(relay: int) -> tuple[bool, float]:
            full, done_s, _ = self._turn(relay)
            return full, done_s + near_s[relay]

        options: list[tuple[bool, float, Path]] = []
        for relay in sorted(self._replicas[stage], key=promise)[:TRIED]:
            full, done_s, _ = self._turn(relay)
            if orders := self._objective.in_orders((*others, relay)):
                options.append((full, done_s + self._objective.trip_s(orders[0]), orders[0]))
        return min(options)[2] if options else None

    def _round_trips_s(self, peer: int) -> list[float]:
        link_s = self._instance.link_s
        return (link_s[peer] + link_s[:, peer]).tolist()

    def _change(self, index: int, path: Path) -> None:
        self._count(self.paths[index], -1)
        self._count(path, 1)
        self.paths[index] = path
        self.changed.add(index)

    def _count(self, path: Path, sign: int) -> None:
        for hop in path[1:]:
            if hop != GONE:
                self.loads[hop] += sign
                self.visits[self._stage_of[hop]] += sign

    def touched(self) -> list[int]:
        """Changed microbatches, and whatever shares peers with them, directly or through others."""
        users: dict[int, list[int]] = {}
        for index, path in enumerate(self.paths):
            for hop in path:
                users.setdefault(hop, []).append(index)
        touched, frontier = set(self.changed), sorted(self.changed)
        for index in frontier:
            for hop in self.paths[index]:
                new = [user for user in users.pop(hop, ()) if user not in touched]
                touched.update(new)
                frontier.extend(new)
        return sorted(touched)
