"""SkipPipe, first form: for each microbatch the fastest legal path by measured costs, with load balance.

Deterministic: the same view, costs and earlier choices give the same path; ties go to the lower peer id after a
rotation that spreads originators over equal replicas. A path is legal by `stage_order`; a stage without a replica is
left out only within the skip budget (Crucible's rule).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from protocols.costs import Costs
from protocols.messages import Hop, Path
from protocols.run_spec import RunSpec
from protocols.stage_order import legal_orders
from protocols.swarm import PeerId, PeerInfo, SwarmView

MISSING_SHARE_MAX = (
    0.25  # of a path that may be skipped because nobody serves it; one stage is always allowed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFeasiblePath:
    """Why there is no path now: the stages that nobody serves and that may not be skipped."""

    empty_stages: tuple[int, ...]


@dataclass
class Planner:
    """Path chooser of one originator; remembers what it assigned, so that work spreads evenly."""

    spec: RunSpec
    me: PeerId
    costs: Costs = field(default_factory=Costs)
    _assigned: dict[PeerId, int] = field(default_factory=dict[PeerId, int])
    _visits: dict[int, int] = field(default_factory=dict[int, int])

    def start_round(self) -> None:
        """Load balance is by round: what a peer was given in this one."""
        self._assigned.clear()

    def plan(self, view: SwarmView, counter: int) -> Path | NoFeasiblePath:
        """The path of the next microbatch. `view` is without suspects."""
        missing = frozenset(view.empty_stages(self.spec.num_stages))
        if len(missing) > self._missing_max():
            return NoFeasiblePath(empty_stages=tuple(sorted(missing)))
        orders = self._orders(missing)
        if not orders:
            return NoFeasiblePath(empty_stages=tuple(sorted(missing)))
        order = min(orders, key=self._visit_cost)
        path = (Hop(0, self.me), *self._fastest(order, view, counter))
        self._remember(path)
        return path

    def _missing_max(self) -> int:
        paths = self.spec.paths
        share = int(MISSING_SHARE_MAX * (self.spec.num_stages - 1))
        return 0 if paths.missing_stages_max == 0 else max(1, min(paths.missing_stages_max, share))

    def _orders(self, missing: frozenset[int]) -> tuple[tuple[int, ...], ...]:
        """Legal orders of the wanted length; a missing stage shortens the path when nothing else is legal."""
        spec = self.spec
        longest = min(spec.path_stages, spec.num_stages - len(missing))
        return legal_orders(
            spec.num_stages,
            longest,
            swaps_max=spec.paths.swaps_max,
            skip_width_max=max(spec.paths.skip_width_max, len(missing) + 1),
            missing=missing,
        )

    def _visit_cost(self, order: tuple[int, ...]) -> tuple[int, int]:
        """Equal visits: prefer the order whose stages have run least; the most visited one decides ties."""
        visits = [self._visits.get(stage, 0) for stage in order[1:]]
        return (sum(visits), max(visits, default=0))

    def _fastest(self, order: tuple[int, ...], view: SwarmView, counter: int) -> Path:
        """Dynamic programming over the replicas of each stage; the load multiplies a peer's compute seconds."""
        best: dict[PeerId, tuple[float, Path]] = {self.me: (0.0, ())}
        for stage in order[1:]:
            reached: dict[PeerId, tuple[float, Path]] = {}
            for info in self._rotated(view.replicas(stage), counter):
                busy_s = self.costs.forward_s(info) * (1 + self._assigned.get(info.peer, 0))
                hop = Hop(stage, info.peer)
                cost_s, path = min(
                    (
                        (cost_s + self.costs.link_s(last, info.peer), path)
                        for last, (cost_s, path) in best.items()
                    ),
                    key=lambda entry: entry[0],
                )
                reached[info.peer] = (cost_s + busy_s, (*path, hop))
            best = reached
        closing = ((cost_s + self.costs.link_s(last, self.me), path) for last, (cost_s, path) in best.items())
        return min(closing, key=lambda entry: entry[0])[1]

    def _rotated(self, replicas: tuple[PeerInfo, ...], counter: int) -> tuple[PeerInfo, ...]:
        start = (_spread(self.me) + counter) % len(replicas)
        return replicas[start:] + replicas[:start]

    def _remember(self, path: Path) -> None:
        for hop in path[1:]:
            self._assigned[hop.peer] = self._assigned.get(hop.peer, 0) + 1
            self._visits[hop.stage] = self._visits.get(hop.stage, 0) + 1


def _spread(peer: PeerId) -> int:
    """A number that differs between peers, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(peer.encode(), digest_size=4).digest(), "big")
