"""The plan of a round for all originators of a planning group, and our own part of it.

Everybody who sees the same view asks for the same plan and takes its own paths from it; nobody distributes it. A plan
takes longer to find than an event may take to handle, so it is asked for (`MakePlan`) and used once it is there; until
then, and where it has no path left for a microbatch, the planner of single paths decides. Views may differ for a
moment: then paths collide, and relays queue.

    none, or of other members -wanted-> ASKED -PlanMade-> ours until members change, or costs have drifted for a while
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf
from statistics import median

import numpy as np

from protocols.actions import Action, Count, MakePlan, WeighStages
from protocols.costs import BACKWARD_FACTOR, FORWARD_DEFAULT_S, Costs, claimed_latency_s, transfer_s
from protocols.errors import GossamerError
from protocols.events import PlanMade, StagesWeighed
from protocols.messages import Hop, Path
from protocols.planning import Instance, PathRules, Plan, Timing, make_instance, repair
from protocols.planning.groups import GROUP_PEERS_MAX, cut
from protocols.planning.instance import Floats
from protocols.planning.paths import find_paths
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, PeerInfo, PeerState, SwarmView

DRIFT_SHARE = 0.1  # of all costs together: a smaller change is none to a plan
DRIFT_AFTER_S = 30.0  # a plan lasts at least so long
REPAIRED_MAX = 2  # losses that are repaired around; after more, all is planned anew
CLAIM_MAX_S = 3600.0  # of a pass or a link: whoever claims more gets no work, and spoils nobody's plan
LOSS_FACTOR = 0.25  # of the originator's forward


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    """All that a plan follows from. `latency_s`: links of ours that we have measured and that coordinates get wrong."""

    spec: RunSpec
    peers: tuple[PeerInfo, ...]
    me: PeerId
    latency_s: Mapping[PeerId, float]

    @property
    def members(self) -> tuple[tuple[PeerId, int | None], ...]:
        return tuple((info.peer, info.stage) for info in self.peers)

    def instance(self) -> Instance:
        """In the terms of `planning`; ConfigError when no path is legal."""
        spec, stages = self.spec, {info.stage for info in self.peers}
        missing = frozenset(stage for stage in range(1, spec.num_stages) if stage not in stages)
        rules = PathRules.of_run(spec, missing)
        factors = [
            info.backward_s / info.forward_s for info in self.peers if info.forward_s and info.backward_s
        ]
        instance = make_instance(
            [info.peer for info in self.peers],
            self._forward_s(),
            self._link_s(),
            rules=rules,
            microbatches=spec.rounds.microbatches,
            slots=[max(1, info.slots) for info in self.peers],
            stage_of={info.peer: info.stage or 0 for info in self.peers},
            originator_slots=spec.rounds.window,
            timing=Timing(
                backward_factor=median(factors) if factors else BACKWARD_FACTOR,
                loss_factor=LOSS_FACTOR,
                backward_first=True,
            ),
        )
        return replace(instance, waves=max(instance.waves, self._waves(rules)))

    def there_and_back_s(self) -> Floats:
        """[from, to]: the link twice, and a forward and a backward pass at its end."""
        return 2 * np.array(self._link_s()) + (1 + BACKWARD_FACTOR) * np.array(self._forward_s())

    def _waves(self, rules: PathRules) -> int:
        """How often each relay's slots must be filled at least: a live relay queues what comes beyond them."""
        originators = sum(info.stage == 0 for info in self.peers)
        visits = (
            self.spec.rounds.microbatches * originators * (rules.path_stages - 1) / len(rules.relayed_stages)
        )
        rooms = [
            sum(max(1, info.slots) for info in self.peers if info.stage == stage)
            for stage in rules.relayed_stages
        ]
        return max(ceil(visits / room) for room in rooms)

    def _forward_s(self) -> list[float]:
        """Who has not measured yet is taken for an average peer."""
        known = [info.forward_s for info in self.peers if info.forward_s]
        default_s = median(known) if known else FORWARD_DEFAULT_S
        return [min(info.forward_s or default_s, CLAIM_MAX_S) for info in self.peers]

    def _link_s(self) -> list[list[float]]:
        return [[self._hop_s(source, target) for target in self.peers] for source in self.peers]

    def _hop_s(self, source: PeerInfo, target: PeerInfo) -> float:
        latency_s = claimed_latency_s(source, target)
        if self.me in (source.peer, target.peer):
            other = target if source.peer == self.me else source
            latency_s = self.latency_s.get(other.peer, latency_s)
        return min(latency_s + transfer_s(source, target, self.spec.boundary_bytes), CLAIM_MAX_S)


def solve(problem: PlanProblem, previous: Plan | None) -> PlanMade:
    """Takes up to a second: for a thread. `previous` is repaired where only few of its peers are gone."""
    try:
        plan = _repaired(problem, previous) or find_paths(problem.instance(), brief=True)
    except GossamerError as error:
        return PlanMade(problem=problem, plan=None, reason=str(error))
    except (
        Exception
    ) as error:  # a fault of the search costs this plan, not all that are still to be asked for
        return PlanMade(problem=problem, plan=None, reason=f"{type(error).__name__}: {error}")
    return PlanMade(problem=problem, plan=plan)


def with_me_at(problem: PlanProblem, stage: int) -> PlanProblem:
    """The same swarm if this peer served `stage`."""
    mine = next((info for info in problem.peers if info.peer == problem.me), None)
    me = PeerInfo(peer=problem.me, stage=stage, state=PeerState.SERVING, slots=problem.spec.rounds.slots)
    me = me if mine is None else replace(mine, stage=stage, state=PeerState.SERVING)
    others = (info for info in problem.peers if info.peer != problem.me)
    return replace(problem, peers=tuple(sorted((*others, me), key=lambda info: info.peer)))


def weigh(action: WeighStages) -> StagesWeighed:
    """Takes seconds for a large group: for a thread."""
    return StagesWeighed(seconds=tuple((stage, _seconds_a_microbatch(it)) for stage, it in action.problems))


def _seconds_a_microbatch(problem: PlanProblem) -> float:
    plan = solve(problem, None).plan
    return inf if plan is None else plan.makespan_s / len(plan.paths)


def _repaired(problem: PlanProblem, previous: Plan | None) -> Plan | None:
    if previous is None:
        return None
    now, before = dict(problem.members), previous.stage_of
    gone = sorted(before.keys() - now.keys())
    moved = any(before.get(peer) != stage for peer, stage in now.items())
    if moved or not 1 <= len(gone) <= REPAIRED_MAX:
        return None
    for peer in gone:
        previous = repair(previous, peer)
    return previous


@dataclass
class GroupPlan:
    """One originator's hold on the plan. Invariant: at most one plan is asked for at a time."""

    spec: RunSpec
    me: PeerId
    costs: Costs
    plan: Plan | None = None
    _own: tuple[Path, ...] = ()
    _of: PlanProblem | None = None  # what `plan` was made for
    _costs_NN: Floats | None = None  # its costs, once they are asked for
    _asked: PlanProblem | None = None
    _is_on: bool = field(init=False)
    _seen: SwarmView | None = None
    _look_again_s: float = 0.0  # whether costs have drifted

    def __post_init__(self) -> None:
        self._is_on = self.spec.paths.planned

    def may_want(self, view: SwarmView) -> bool:
        """Cheap, since it is asked after every event: this view has not been looked at."""
        return view is not self._seen and self._asked is None and self._is_on

    def want(self, view: SwarmView, now: float) -> list[Action]:
        """Ask for a plan if the one at hand is not of this view. `view` is without suspects."""
        if not self.may_want(view):
            return []
        self._seen = view
        problem = group_problem(view, self.spec, self.me, self.costs) if self.me in view else None
        if problem is None or not self._is_news(problem, now):
            return []
        self._asked, self._look_again_s = problem, now + DRIFT_AFTER_S
        return [MakePlan(problem=problem, previous=self.plan)]

    def on_made(self, event: PlanMade) -> list[Action]:
        if event.problem is not self._asked:
            return []
        self._asked, self._of, self.plan = None, event.problem, event.plan
        self._costs_NN = None
        if event.plan is None:
            self._own = ()
            return [Count(name="plan-failed", detail=event.reason, notable=True)]
        stage_of = event.plan.stage_of
        self._own = tuple(
            tuple(Hop(stage_of[peer], peer) for peer in microbatch.path)
            for microbatch in event.plan.microbatches
            if microbatch.originator == self.me
        )
        detail = f"{len(stage_of)} peers, {event.plan.makespan_s:.3f} s a round"
        made = Count(name="plan-made", detail=detail)
        if not event.plan.shortfall:
            return [made]
        short = f"{event.plan.shortfall} visits more than relays have room for: they queue"
        return [made, Count(name="plan-shortfall", detail=short)]

    @property
    def makespan_s(self) -> float:
        """What the plan says of a round; 0: there is none."""
        return self.plan.makespan_s if self.plan is not None else 0.0

    def path(self, index: int, view: SwarmView) -> Path | None:
        """The way of the round's microbatch `index`, if all of it is still there."""
        if index >= len(self._own) or self._of is None or self._of.spec.path_stages != self.spec.path_stages:
            return None
        path = self._own[index]
        return path if all(_serves(view.get(hop.peer), hop) for hop in path[1:]) else None

    def _is_news(self, problem: PlanProblem, now: float) -> bool:
        if self._of is None or problem.members != self._of.members:
            return True
        if problem.spec.path_stages != self._of.spec.path_stages:
            return True
        if now < self._look_again_s:
            return False
        if self._costs_NN is None:
            self._costs_NN = self._of.there_and_back_s()
        changed_s = np.abs(problem.there_and_back_s() - self._costs_NN).sum()
        return bool(changed_s > DRIFT_SHARE * self._costs_NN.sum())


def group_problem(view: SwarmView, spec: RunSpec, me: PeerId, costs: Costs) -> PlanProblem | None:
    """The serving peers of the group as they are seen from `me`; None: no originator, or nobody to relay."""
    serving = [info for stage in range(spec.num_stages) for info in view.replicas(stage)]
    if not view.replicas(0) or len(serving) == len(view.replicas(0)):
        return None
    group = group_of(me, tuple(sorted(serving, key=lambda info: info.peer)))
    return PlanProblem(
        spec=spec,
        peers=tuple(costs.believed(info) for info in group),
        me=me,
        latency_s=costs.contradicted(group),
    )


def group_of(me: PeerId, peers: tuple[PeerInfo, ...]) -> tuple[PeerInfo, ...]:
    """The planning group of `me` among all serving `peers` (by id); of one who serves nothing yet, the smallest.

    Everybody cuts alike, from the same records: by where peers lie, each group with its share of every stage.
    """
    if len(peers) <= GROUP_PEERS_MAX:
        return peers
    stages = sorted({info.stage for info in peers if info.stage is not None})
    stage_of = np.array([stages.index(info.stage or 0) for info in peers], dtype=np.int64)
    places = [(info.coordinate.x_s, info.coordinate.y_s) if info.coordinate else (0.0, 0.0) for info in peers]
    groups = [
        tuple(peers[int(index)] for index in group)  # pyright: ignore[reportUnknownArgumentType]
        for group in cut(stage_of, np.array(places, dtype=np.float64), num_stages=len(stages))
    ]
    mine = (group for group in groups if any(info.peer == me for info in group))
    return next(mine, min(groups, key=len))


def _serves(info: PeerInfo | None, hop: Hop) -> bool:
    return info is not None and info.stage == hop.stage
