"""A peer of a well served stage moves to where the plan gains most: rarely, alone, and never out of an only replica.

    WAITING -look-> WEIGHING -pays-> WAITING a little -look-> WEIGHING -pays again-> CLAIMED -first-> move
    any doubt on the way (another peer is due, a stage is empty, another target) -> WAITING

Of each stage one replica may move, the one with the highest id; moments are drawn, so that stages do not look at once;
and who means to move claims the target in the table: of several only the first goes, and the others look again.
"""

from __future__ import annotations

from protocols.actions import Action, Count, PutClaim, ReadClaims, WeighStages
from protocols.costs import Costs
from protocols.events import ClaimsRead, StagesWeighed
from protocols.group_plan import PlanProblem, group_problem, with_me_at
from protocols.hashing import share_of
from protocols.placement import first_claim
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, PeerState, SwarmView
from protocols.timers import Timers

LOOK_S = 120.0  # between two looks, times 1 to 2
CONFIRM_S = 15.0  # between the two looks that must agree, times 1 to 2
MARGIN = 0.15  # seconds a microbatch must fall by so much: catching up costs the swarm a replica for a while
CLAIM_SETTLE_S = 3.0


class Moves:
    """Invariant: at most one weighing or claim of ours at a time."""

    def __init__(self, me: PeerId, spec: RunSpec, costs: Costs) -> None:
        self._me = me
        self._spec = spec
        self._costs = costs
        self._timers: Timers[str] = Timers()
        self._num_drawn = 0
        self._target: int | None = None  # paid at the last look
        self._is_weighing = False
        self._is_claiming = False

    def next_deadline(self) -> float | None:
        return self._timers.next()

    def on_view(self, now: float) -> None:
        """Serving: look some time."""
        if (
            self._spec.paths.planned
            and not self._is_weighing
            and not self._is_claiming
            and "look" not in self._timers
        ):
            self._wait(LOOK_S, now)

    def joiners_problems(self, view: SwarmView) -> tuple[tuple[int, PlanProblem], ...] | None:
        """What a joiner weighs. None: stages are to be filled first, or others join now: then ids decide."""
        joiners = [info for info in view.peers if info.stage is None and info.peer != self._me]
        if joiners or not self._spec.paths.planned or view.empty_stages(self._spec.num_stages):
            return None
        return self._everywhere(view)

    def _everywhere(self, view: SwarmView) -> tuple[tuple[int, PlanProblem], ...] | None:
        """The swarm with this peer at each stage; None: too few peers serve."""
        problem = group_problem(view, self._spec, self._me, self._costs)
        if problem is None:
            return None
        return tuple((stage, with_me_at(problem, stage)) for stage in range(self._spec.num_stages))

    def on_deadline(self, view: SwarmView, stage: int | None, now: float) -> list[Action]:
        due = self._timers.pop_due(now)
        if "settle" in due and self._target is not None:
            return [ReadClaims(stage=self._target)]
        if "look" not in due or stage is None or not self._is_mine(view, stage):
            self._target = None if "look" in due else self._target
            return []
        problems = self._everywhere(view)
        if problems is None:
            return []
        self._is_weighing = True
        return [WeighStages(problems=problems)]

    def on_weighed(self, event: StagesWeighed, stage: int | None, now: float) -> list[Action]:
        if not self._is_weighing:
            return []
        self._is_weighing = False
        seconds = dict(event.seconds)
        best = min(seconds, key=lambda place: (seconds[place], place))
        before, self._target = self._target, None
        if stage is None or not seconds[best] < (1 - MARGIN) * seconds[stage]:  # both may be infinite
            self._wait(LOOK_S, now)
            return []
        self._target = best
        if best != before:
            self._wait(CONFIRM_S, now)
            return []
        self._is_claiming = True
        self._timers.set("settle", now + CLAIM_SETTLE_S)
        detail = f"stage {stage} -> {best}: {seconds[stage]:.3f} -> {seconds[best]:.3f} s a microbatch"
        return [Count(name="move-claimed", detail=detail, notable=True), PutClaim(stage=best)]

    def on_claims(self, event: ClaimsRead, view: SwarmView, stage: int | None) -> int | None:
        """Where to go now; None: another goes there, or things have changed."""
        if not self._is_claiming or event.stage != self._target:
            return None
        target, self._target, self._is_claiming = self._target, None, False
        if stage is None or not self._is_mine(view, stage):
            return None
        return target if first_claim(event.claims, CLAIM_SETTLE_S) == self._me else None

    def _is_mine(self, view: SwarmView, stage: int) -> bool:
        """Of this stage I am the one to move, and nothing more urgent is going on."""
        replicas = view.replicas(stage)
        is_quiet = not view.empty_stages(self._spec.num_stages) and all(
            info.state is not PeerState.CATCHING_UP for info in view.peers
        )
        return stage != 0 and is_quiet and len(replicas) >= 2 and replicas[-1].peer == self._me

    def _wait(self, seconds: float, now: float) -> None:
        self._num_drawn += 1
        self._timers.set("look", now + seconds * (1 + share_of(f"{self._me}/{self._num_drawn}")))
