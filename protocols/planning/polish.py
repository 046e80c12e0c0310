"""The last touch: small changes to single microbatches, each tried in the round model.

Rows that share relays wait for each other, and only the round model sees how long. The changes start from the
microbatches that finish last: another relay, an exchange with another microbatch (a relay, or a stage with its relay,
or the turn at their originator), another order. A change stays when the round ends earlier, or as early with an earlier
mean finish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, product

from protocols.planning.draws import Draws
from protocols.planning.instance import Instance
from protocols.planning.objective import Objective, Score
from protocols.planning.plan import relay_loads
from protocols.planning.round_model import Path

Change = dict[int, Path]  # microbatch to its new path
LATEST = 4  # microbatches whose changes are tried before giving up


class Polish:
    """Improves one list of paths, until nothing helps or the operations of the budget are simulated."""

    def __init__(
        self,
        instance: Instance,
        objective: Objective,
        paths: Sequence[Path],
        *,
        operations_max: int,
        visits_elsewhere: Counter[int] | None = None,
    ) -> None:
        """`visits_elsewhere`: to each stage, by microbatches of the plan that are not among `paths`."""
        assert instance.stage_of is not None
        self._stage_of: list[int] = instance.stage_of.tolist()
        self._replicas = [instance.replicas(stage).tolist() for stage in range(instance.rules.num_stages)]
        self._relayed_stages = instance.rules.relayed_stages
        self._room: list[int] = instance.room.tolist()
        self._visits_elsewhere = visits_elsewhere or Counter[int]()
        self._objective = objective
        self.operations_left = operations_max
        self.paths = list(paths)
        self.score = objective.score(self.paths)

    def run(self) -> None:
        """Until no change helps."""
        while self.operations_left > 0 and self._improve():
            pass

    def shake(self, draws: Draws) -> None:
        """Three changes at random, improved again; undone where that leads to nothing better."""
        score, paths = self.score, list(self.paths)
        for _ in range(3):
            microbatch, which = draws.uniform(2).tolist()
            changes = list(self._changes(int(microbatch * len(paths))))
            if changes:
                self._apply(changes[int(which * len(changes))])
        self.score = self._objective.score(self.paths)
        self.run()
        if score <= self.score:
            self.score, self.paths = score, paths

    def _improve(self) -> bool:
        finish_s = self.score.finish_s
        latest = sorted(range(len(self.paths)), key=lambda microbatch: -finish_s[microbatch])[:LATEST]
        for change in chain.from_iterable(map(self._promising, latest)):
            if self.operations_left <= 0:
                return False
            if score := self._better(change):
                self.score = score
                self._apply(change)
                return True
        return False

    def _apply(self, change: Change) -> None:
        for microbatch, path in change.items():
            self.paths[microbatch] = path

    def _better(self, change: Change) -> Score | None:
        paths = [change.get(microbatch, path) for microbatch, path in enumerate(self.paths)]
        score = self._objective.score(paths, cutoff_s=self.score.makespan_s)
        self.operations_left -= score.operations + len(paths)  # to set up a simulation costs as well
        return score if score < self.score else None

    def _promising(self, microbatch: int) -> list[Change]:
        """All changes of a microbatch, those that save most of the way first."""
        return sorted(self._changes(microbatch), key=self._added_s)

    def _added_s(self, change: Change) -> float:
        trip_s = self._objective.trip_s
        return sum(trip_s(path) - trip_s(self.paths[microbatch]) for microbatch, path in change.items())

    def _changes(self, microbatch: int) -> Iterator[Change]:
        path = self.paths[microbatch]
        loads = relay_loads(self.paths)
        for position in range(1, len(path)):
            for relay in self._replicas[self._stage_of[path[position]]]:
                if relay != path[position] and loads[relay] < self._room[relay]:
                    yield {microbatch: _with(path, position, relay)}
        for order in self._objective.in_orders(path):
            if order != path:
                yield {microbatch: order}
        yield from self._other_stages(microbatch, loads)
        others = {other_path: other for other, other_path in enumerate(self.paths) if other_path != path}
        for other in others.values():  # of those on one path the last to start
            yield from self._exchanges(microbatch, other, loads)

    def _other_stages(self, microbatch: int, loads: Counter[int]) -> Iterator[Change]:
        """Another stage instead of one that has a visit more: visits stay as even as they were."""
        path = self.paths[microbatch]
        visits = self._visits_elsewhere + Counter(
            self._stage_of[hop] for path in self.paths for hop in path[1:]
        )
        run = {self._stage_of[hop] for hop in path}
        for stage in self._relayed_stages:
            for position in range(1, len(path)):
                if stage in run or visits[stage] != visits[self._stage_of[path[position]]] - 1:
                    continue
                for relay in self._replicas[stage]:
                    if loads[relay] < self._room[relay]:
                        yield from (
                            {microbatch: order}
                            for order in self._objective.in_orders(_with(path, position, relay))[:1]
                        )

    def _exchanges(self, microbatch: int, other: int, loads: Counter[int]) -> Iterator[Change]:
        mine, theirs = self.paths[microbatch], self.paths[other]
        if mine[0] == theirs[0]:
            yield {microbatch: theirs, other: mine}  # each other's turn
        else:
            yield from self._if_legal(microbatch, other, (mine[0], *theirs[1:]), (theirs[0], *mine[1:]))
        for here, there in product(range(1, len(mine)), repeat=2):
            given, taken = mine[here], theirs[there]
            for new_mine in self._in_place_of(taken, given, loads):
                for new_theirs in self._in_place_of(given, taken, loads):
                    my_path, their_path = _with(mine, here, new_mine), _with(theirs, there, new_theirs)
                    yield from self._if_legal(microbatch, other, my_path, their_path)

    def _in_place_of(self, relay: int, given: int, loads: Counter[int]) -> Iterator[int]:
        """A relay that is taken over, or one of its stage with room; of one's own stage only the former is new."""
        yield relay
        if self._stage_of[relay] != self._stage_of[given]:
            yield from (
                one
                for one in self._replicas[self._stage_of[relay]]
                if one != relay and loads[one] < self._room[one]
            )

    def _if_legal(self, microbatch: int, other: int, mine: Path, theirs: Path) -> Iterator[Change]:
        """Both in their fastest legal orders, where there are any."""
        for my_order in self._objective.in_orders(mine)[:1]:
            for their_order in self._objective.in_orders(theirs)[:1]:
                yield {microbatch: my_order, other: their_order}


def _with(path: Path, position: int, peer: int) -> Path:
    return (*path[:position], peer, *path[position + 1 :])
