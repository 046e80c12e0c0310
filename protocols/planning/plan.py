"""A plan, and how to judge one: which way each microbatch goes, and what the round model says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from protocols.planning.bounds import lower_bounds
from protocols.planning.instance import Instance
from protocols.planning.round_model import Path, Round, RoundModel
from protocols.swarm import PeerId


@dataclass(frozen=True, kw_only=True)
class PlannedMicrobatch:
    """`path` without the return to the originator, which is its first peer."""

    originator: PeerId
    path: tuple[PeerId, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Paths in injection order, with the time at which each microbatch is done."""

    instance: Instance  # arranged
    paths: tuple[Path, ...]
    finish_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s, default=0.0)

    @property
    def stage_of(self) -> dict[PeerId, int]:
        assert self.instance.stage_of is not None
        return dict(zip(self.instance.peers, self.instance.stage_of.tolist(), strict=True))

    @cached_property
    def microbatches(self) -> tuple[PlannedMicrobatch, ...]:
        names = self.instance.peers
        return tuple(
            PlannedMicrobatch(originator=names[path[0]], path=tuple(names[hop] for hop in path))
            for path in self.paths
        )

    @cached_property
    def lower_bound_s(self) -> float:
        """No plan of this arrangement is shorter."""
        return lower_bounds(self.instance).largest_s

    @property
    def averaging_s(self) -> float:
        """What this arrangement's replicas take to average, by the instance's factor."""
        return self.instance.averaging_factor * worst_stage_link_s(self.instance)

    @property
    def shortfall(self) -> int:
        """Visits beyond what relays have room for: 0 unless the caps cannot be met, as after a loss."""
        return excess(self.instance, self.paths)

    def simulate(self) -> Round:
        """The round again, with its timeline."""
        return RoundModel(self.instance).simulate(self.paths, keep_jobs=True)


def relay_loads(paths: Sequence[Path]) -> Counter[int]:
    """Microbatches that each peer relays."""
    return Counter(hop for path in paths for hop in path[1:])


def excess(instance: Instance, paths: Sequence[Path]) -> int:
    """Visits beyond the room of relays."""
    room = instance.room.tolist()
    return sum(max(0, load - room[peer]) for peer, load in relay_loads(paths).items())


def worst_stage_link_s(instance: Instance) -> float:
    """The slowest link between two replicas of one stage: that is what averaging waits for."""
    stage_of = instance.stage_of
    assert stage_of is not None
    together_NN = stage_of[:, None] == stage_of
    return float((instance.link_s * together_NN).max())
