"""SkipPipe, first form: for each microbatch the fastest legal path by measured costs, with load balance.

Deterministic: the same view, costs and earlier choices give the same path; ties go to the lower peer id after a
rotation that spreads originators over equal replicas. A path is legal by `stage_order`; a stage without a replica is
left out only within the skip budget (Crucible's rule).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from protocols.actions import Action
from protocols.costs import Costs
from protocols.group_plan import GroupPlan
from protocols.hashing import number_of, share_of
from protocols.messages import Hop, Path
from protocols.planning import PathRules
from protocols.run_spec import RunSpec
from protocols.stage_order import legal_orders
from protocols.swarm import PeerId, PeerInfo, PeerState, SwarmView

TRIP_MIN_S = 1e-3
MISSING_SHARE_MAX = (
    0.25  # of a path that may be skipped because nobody serves it; one stage is always allowed
)


_Reached: TypeAlias = "tuple[float, Path, PeerInfo]"  # cost so far, hops, the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFeasiblePath:
    """Why there is no path now: the stages that nobody serves and that may not be skipped."""

    empty_stages: tuple[int, ...]


@dataclass
class Planner:
    """Path chooser of one originator; remembers what it assigned, so that work spreads evenly."""

    run: RunSpec
    me: PeerId
    costs: Costs
    spec: RunSpec = field(init=False)  # with the rules for paths of this round
    group: GroupPlan = field(init=False)
    _boundary_bytes: int = field(init=False)
    _view: SwarmView = field(default_factory=SwarmView)  # that of the last plan
    _assigned: dict[PeerId, int] = field(default_factory=dict[PeerId, int])
    _visits: dict[int, int] = field(default_factory=dict[int, int])
    _round: int = 0
    _missing_since: dict[int, int] = field(default_factory=dict[int, int])  # stage -> first round without it

    def __post_init__(self) -> None:
        self.spec = self.run.at(0)
        self._boundary_bytes = self.spec.boundary_bytes
        self.group = GroupPlan(self.spec, self.me, self.costs)

    def start_round(self, round_: int) -> None:
        """Load balance is by round: what a peer was given in this one. Paths may be longer from now on."""
        self._assigned.clear()
        self._round = round_
        if self.run.paths.growth:
            self.spec = self.group.spec = self.run.at(round_)

    def plan(self, view: SwarmView, counter: int, *, index: int | None = None) -> Path | NoFeasiblePath:
        """The path of the next microbatch: the group's plan for the round's microbatch `index`, else the fastest.

        `view` is without suspects.
        """
        self._view = view
        missing = self._missing(view)
        if len(missing) > self._missing_max() or self._is_too_long(missing):
            return NoFeasiblePath(empty_stages=tuple(sorted(missing)))
        planned = self.group.path(index, view) if index is not None else None
        path = planned or self._choose(view, counter, missing)
        if index is not None and not isinstance(path, NoFeasiblePath):
            path = self._without_a_stage(path, counter)
        if not isinstance(path, NoFeasiblePath):
            self._remember(path)
        return path

    def want(self, view: SwarmView, now: float) -> list[Action]:
        """Ask for the group's plan, where there can be one."""
        if not self.group.may_want(view) or len(self._missing(view)) > self._missing_max():
            return []
        return self.group.want(view, now)

    def _is_too_long(self, missing: frozenset[int]) -> bool:
        """Crucible's K_max: without one of its stages a model trains on for a while, not for good."""
        self._missing_since = {stage: self._missing_since.get(stage, self._round) for stage in missing}
        longest = max((self._round - since for since in self._missing_since.values()), default=0)
        return longest >= self.spec.paths.missing_rounds_max

    def _missing(self, view: SwarmView) -> frozenset[int]:
        return frozenset(view.empty_stages(self.spec.num_stages))

    def measured_trip(self, path: Path, seconds: float) -> None:
        """A microbatch has been there and back."""
        known = [self._view.get(hop.peer) for hop in path]
        infos = [info for info in known if info is not None]
        if len(infos) == len(path):
            self.costs.measured_trip(tuple(hop.peer for hop in path[1:]), seconds / self._unloaded_s(infos))

    def _unloaded_s(self, infos: list[PeerInfo]) -> float:
        """There and back through an empty swarm, by what records claim."""
        compute_s = sum(info.forward_s + info.backward_s for info in infos)
        links = pairwise([*infos, infos[0]])
        link_s = sum(self.costs.link_s(source, target, self._boundary_bytes) for source, target in links)
        return max(compute_s + 2 * link_s, TRIP_MIN_S)

    def _without_a_stage(self, path: Path, counter: int) -> Path:
        """A share of the training microbatches, drawn by seed, leaves out one relay: the others learn to do without.

        Bypassing a stage then costs 0.88 of what it did with an eighth skipping, 0.52 with a half (the recovery
        benchmark's A13, a tiny model); whole paths lose less than a hundredth.
        """
        draw = f"{self.spec.seed}/{self.me}/{counter}/skip"
        if len(path) < 3 or share_of(draw) >= self.spec.paths.skip_train_share:
            return path
        left_out = 1 + number_of(f"{draw}/stage") % (len(path) - 1)
        return path[:left_out] + path[left_out + 1 :]

    def _choose(self, view: SwarmView, counter: int, missing: frozenset[int]) -> Path | NoFeasiblePath:
        orders = self._orders(missing)
        if not orders:
            return NoFeasiblePath(empty_stages=tuple(sorted(missing)))
        order = min(orders, key=self._visit_cost)
        return (Hop(0, self.me), *self._fastest(order, view, counter))

    def _missing_max(self) -> int:
        paths = self.spec.paths
        share = int(MISSING_SHARE_MAX * (self.spec.num_stages - 1))
        allowed = 0 if paths.missing_stages_max == 0 else max(1, min(paths.missing_stages_max, share))
        return min(allowed, self.spec.num_stages - 2)  # a path has one relay at least

    def _orders(self, missing: frozenset[int]) -> tuple[tuple[int, ...], ...]:
        """Legal orders of the wanted length; a missing stage shortens the path when nothing else is legal."""
        rules = PathRules.of_run(self.spec, missing)
        return legal_orders(
            rules.num_stages,
            rules.path_stages,
            swaps_max=rules.swaps_max,
            skip_width_max=rules.skip_width_max,
            missing=missing,
        )

    def _visit_cost(self, order: tuple[int, ...]) -> tuple[int, int]:
        """Equal visits: prefer the order whose stages have run least; the most visited one decides ties."""
        visits = [self._visits.get(stage, 0) for stage in order[1:]]
        return (sum(visits), max(visits, default=0))

    def _fastest(self, order: tuple[int, ...], view: SwarmView, counter: int) -> Path:
        """Dynamic programming over the replicas of each stage; the load multiplies a peer's compute seconds."""
        me = view.get(self.me) or PeerInfo(peer=self.me, stage=0, state=PeerState.SERVING)
        best: list[_Reached] = [(0.0, (), me)]
        for stage in order[1:]:
            reached: list[_Reached] = []
            for info in self._rotated(view.replicas(stage), counter):
                busy_s = self.costs.forward_s(info) * (1 + self._assigned.get(info.peer, 0))
                cost_s, path = self._nearest(best, info)
                reached.append((cost_s + busy_s, (*path, Hop(stage, info.peer)), info))
            best = reached
        return self._nearest(best, me)[1]

    def _nearest(self, reached: list[_Reached], to: PeerInfo) -> tuple[float, Path]:
        """The cheapest of the paths so far, and the link from its end."""
        ways = (
            (cost_s + self.costs.link_s(last, to, self._boundary_bytes), path)
            for cost_s, path, last in reached
        )
        return min(ways, key=lambda way: way[0])

    def _rotated(self, replicas: tuple[PeerInfo, ...], counter: int) -> tuple[PeerInfo, ...]:
        start = (number_of(self.me) + counter) % len(replicas)
        return replicas[start:] + replicas[:start]

    def _remember(self, path: Path) -> None:
        for hop in path[1:]:
            self._assigned[hop.peer] = self._assigned.get(hop.peer, 0) + 1
            self._visits[hop.stage] = self._visits.get(hop.stage, 0) + 1
