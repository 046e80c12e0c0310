"""PeerCore: one `match` from event to machine. What a peer decides, and nothing else.

`handle(event, now)` returns the actions to execute; the same events at the same times give the same actions. After
each event the round is moved on as far as it goes (`_settle`), so no machine needs to call another.
"""

from __future__ import annotations

from protocols.actions import (
    Action,
    Announce,
    CallPeer,
    Count,
    Leave,
    RoundFinished,
    RunInnerStep,
)
from protocols.adoption import Adoption
from protocols.completions import on_compute, on_compute_failed, on_insight
from protocols.costs import Costs
from protocols.donor import Donor
from protocols.events import (
    AccessMeasured,
    BackwardDone,
    BatchReady,
    ClaimsRead,
    ComputeFailed,
    DeadlineReached,
    Event,
    ForwardDone,
    InnerStepDone,
    LeaveRequested,
    LossDone,
    MessageReceived,
    OuterPrepared,
    OuterStepDone,
    PauseRequested,
    PingDone,
    PlanMade,
    RecoveryDone,
    ResumeRequested,
    SendFailed,
    SnapshotTaken,
    StagesWeighed,
    Started,
    ViewChanged,
)
from protocols.inbox import on_message, on_send_failed
from protocols.moves import Moves
from protocols.originator import Originator
from protocols.outer_sync import OuterSync
from protocols.outlook import Outlook
from protocols.recovery import Recovery, RecoveryState
from protocols.relay import Relay
from protocols.rounds import RoundLedger
from protocols.run_spec import RunSpec
from protocols.shadows import Shadows
from protocols.stage_changes import (
    DRAIN_LIMIT_S,
    is_left_behind,
    keep_step,
    leave_stage,
    look_for_stage,
    on_claims,
    on_recovery_done,
    on_started,
    start_over,
)
from protocols.swarm import PeerId, PeerState, SwarmView
from protocols.timers import Timers

MEASURE_DECAY = 0.1  # of the smoothed gradient norm


class PeerCore:
    """All decisions of one peer. Invariant: `originator` exists exactly while the own stage is 0 and it serves."""

    def __init__(self, me: PeerId, spec: RunSpec, stage: int | None = None) -> None:
        self.me = me
        self.spec = spec
        self.stage = stage  # None: chosen from the first view
        self.outlook = Outlook(spec.liveness.suspect_s)
        self.ledger = RoundLedger()
        self.relay = Relay(me, spec, self.ledger)
        self.originator: Originator | None = None
        self.outer: OuterSync | None = None
        self.donor = Donor(me)
        self.recovery = Recovery(me, spec)
        self.shadows = Shadows(me, spec)
        self.adoption = Adoption(me, spec)
        self.stepping = False
        self.looks_left = 0  # at the table, before a joiner chooses its stage
        self.paused = False
        self.leaving = False
        self.costs = Costs(me)
        self.moves = Moves(me, spec, self.costs)
        self.grad_norm = 0.0
        self.num_backwards = 0  # since the last inner step
        self.next_counter = 0
        self.fresh_until = 0
        self.timers: Timers[str] = Timers()
        self._announced: tuple[object, ...] = ()  # what the last record said that others plan by

    @property
    def view(self) -> SwarmView:
        return self.outlook.view

    @property
    def visible(self) -> SwarmView:
        return self.outlook.visible

    # ---- the one way in ----

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = self._dispatch(event, now)
        actions += self._settle(now)
        return actions

    def next_deadline(self) -> float | None:
        machines = (
            self.outlook, self.relay, self.donor, self.recovery, self.shadows, self.adoption, self.moves,
            self.originator, self.outer,
        )  # fmt: skip
        deadlines_s = [self.timers.next(), *(each.next_deadline() for each in machines if each is not None)]
        return min((deadline_s for deadline_s in deadlines_s if deadline_s is not None), default=None)

    def _dispatch(self, event: Event, now: float) -> list[Action]:
        match event:
            case MessageReceived():
                return on_message(self, event.sender, event.message, now)
            case ForwardDone() | LossDone() | BackwardDone() | BatchReady():
                return on_compute(self, event, now)
            case InnerStepDone():
                return self.on_inner_step_done(event, now)
            case SendFailed():
                return on_send_failed(self, event.peer, event.message, now)
            case DeadlineReached():
                return self._on_deadline(now)
            case ViewChanged():
                return self._on_view(event.view, now)
            case PingDone():
                return self._on_ping(event, now)
            case AccessMeasured() | PlanMade() | StagesWeighed():
                return on_insight(self, event, now)
            case ComputeFailed():
                return on_compute_failed(self, event, now)
            case _:
                return self._dispatch_rare(event, now)

    def _dispatch_rare(self, event: Event, now: float) -> list[Action]:
        match event:
            case OuterPrepared():
                return self.outer.on_prepared(event, self.visible, now) if self.outer is not None else []
            case OuterStepDone():
                return self.outer.on_done(event, self.visible, now) if self.outer is not None else []
            case SnapshotTaken():
                return self.donor.on_taken(event, now)
            case RecoveryDone():
                return on_recovery_done(self, event, now)
            case ClaimsRead():
                return on_claims(self, event, now)
            case Started():
                return on_started(self, event, now)
            case PauseRequested():
                self.paused = True
                return self.originator.go_away(self.view) if self.originator is not None else []
            case ResumeRequested():
                return self._on_resume(now)
            case LeaveRequested():
                return self._on_leave(now)
            case _:
                raise AssertionError(f"unknown event {event!r}")

    # ---- rounds ----

    def _settle(self, now: float) -> list[Action]:
        """Whatever the event has made possible: a step, a new round, a departure, a fresh record."""
        actions: list[Action] = []
        if self.originator is not None:
            actions += self._keep_up(now)
            actions += self.originator.advance(self.visible, self.view, now)
        if self.recovery.state is RecoveryState.SERVING:
            actions += self._move_round(now)
        if self.recovery.state is RecoveryState.LEAVING and self._holds_nothing():
            actions += leave_stage(self, now)
        if self.leaving and self._holds_nothing():
            self.timers.clear("leave")
            actions.append(Leave())
            self.leaving = False
        return actions + self._announce()

    def _round_keepers(self) -> tuple[PeerId, ...]:
        """Whose microbatches decide when the own round is over."""
        return (self.me,) if self.stage == 0 else self.outlook.originators

    def _move_round(self, now: float) -> list[Action]:
        if self.stepping or self.ledger.round >= self.spec.rounds.total_rounds:
            return []
        keepers = self._round_keepers()
        if not self.ledger.is_finished(keepers):
            if "round" not in self.timers and self.ledger.has_begun():
                self.timers.set("round", now + self.spec.liveness.round_s)
            return []
        self.timers.clear("round")
        if self.num_backwards == 0 and self.stage != 0:
            return self._jump(keepers, now)
        self.stepping = True
        return [RunInnerStep(round=self.ledger.round)]

    def _jump(self, keepers: tuple[PeerId, ...], now: float) -> list[Action]:
        """Nothing was done here in this round: on to the next, or straight to where the originators are."""
        target = max(self.ledger.lowest_announced(keepers), self.ledger.round + 1)
        return self._move_to(target, now)

    def _keep_up(self, now: float) -> list[Action]:
        """An originator between two rounds that hears of a later one joins the others there, its own step taken."""
        if self.originator is None or not self.originator.is_idle or not self.originator.active:
            return []
        if self.recovery.state is not RecoveryState.SERVING or self.stepping or self.num_backwards:
            return []
        newest = self.ledger.newest_announced()
        return self._move_to(newest, now) if newest > self.ledger.round else []

    def _move_to(self, target: int, now: float) -> list[Action]:
        target = min(target, self.spec.rounds.total_rounds)
        if is_left_behind(self, target):
            return start_over(self, now)
        inner_steps = self.spec.outer.inner_steps
        due = target // inner_steps * inner_steps
        is_due = self.outer is not None and due > self.ledger.round
        self.ledger.round = target
        self.donor.round = target
        outer = (
            self.outer.on_inner_step(due, 0, self.visible, now) if is_due and self.outer is not None else []
        )
        shadow = self.shadows.on_round(target, self.visible, now)
        return [*outer, *shadow, *self.relay.admit(), *self._move_round(now)]

    def on_inner_step_done(self, event: InnerStepDone, now: float) -> list[Action]:
        if not self.stepping:
            return []  # of the stage that was left meanwhile
        self.stepping = False
        microbatches, self.num_backwards = self.num_backwards, 0
        self.ledger.advance()
        self.donor.round = self.ledger.round
        if event.grad_norm > 0:
            share = MEASURE_DECAY if self.grad_norm else 1.0
            self.grad_norm += share * (event.grad_norm - self.grad_norm)
        actions: list[Action] = [RoundFinished(round=self.ledger.round, grad_norm=event.grad_norm)]
        if self.outer is not None:
            actions += self.outer.on_inner_step(self.ledger.round, microbatches, self.visible, now)
        return [*actions, *self.shadows.on_round(self.ledger.round, self.visible, now), *self.relay.admit()]

    # ---- view, liveness ----

    def _on_view(self, view: SwarmView, now: float) -> list[Action]:
        gone = sorted(peer for peer, _ in self.view.lives - view.lives if peer != self.me)
        self.outlook.see(view)
        self.costs.forget(view)
        actions: list[Action] = []
        for peer in gone:
            actions += self._forget(peer, now)
        if self.looks_left > 0 and not self.leaving:
            return actions + look_for_stage(self, now)
        if self.recovery.state is not RecoveryState.SERVING or self.leaving:
            return actions
        if self.ledger.round > 0:  # before, stages may well be empty
            actions += self.adoption.on_view(view, now)
        self.moves.on_view(now)
        if self.stage != 0:
            return actions
        return actions + ([] if self.paused else keep_step(self, now))

    def suspect(self, peer: PeerId, now: float) -> list[Action]:
        """We could not reach it: plan without it until it answers, or for a while."""
        if peer == self.me:
            return []
        if not self.outlook.suspect(peer, now):
            return self._forget(peer, now)  # what was sent to it all the same
        counted = Count(name="suspect", detail=peer[-6:], notable=True)
        return [counted, *self._forget(peer, now), CallPeer(peer=peer)]

    def _forget(self, peer: PeerId, now: float) -> list[Action]:
        """Nothing that runs through `peer` will come."""
        self.ledger.forget_originator(peer)
        self.shadows.on_peer_lost(peer)
        actions = self.relay.on_peer_lost(peer)
        if self.originator is not None:
            actions += self.originator.on_peer_lost(peer, self.visible, now)
        if self.outer is not None:
            actions += self.outer.on_peer_lost(peer, self.visible, now)
        return actions + self.recovery.on_peer_lost(peer, self.outlook, now)

    def _on_ping(self, event: PingDone, now: float) -> list[Action]:
        self.adoption.on_ping(event)
        if event.ok:
            self.costs.measured_round_trip(event.peer, self.view, event.seconds)
            self.outlook.trust(event.peer)
            return []
        return self.suspect(event.peer, now)

    # ---- pause, leave, time ----

    def _on_resume(self, now: float) -> list[Action]:
        self.paused = False
        if self.stage != 0 or self.recovery.state is not RecoveryState.SERVING or self.leaving:
            return []
        if self.originator is None:
            self.originator = Originator(
                self.me, self.spec, self.ledger, self.costs, next_counter=self.next_counter
            )
        self.originator.active = True
        return keep_step(self, now)

    def _on_leave(self, now: float) -> list[Action]:
        self.leaving = True
        self.relay.draining = True
        self.timers.set("leave", now + DRAIN_LIMIT_S)
        return self.originator.go_away(self.view) if self.originator is not None else []

    def _holds_nothing(self) -> bool:
        return (
            self.relay.is_idle and (self.originator is None or self.originator.is_idle) and not self.stepping
        )

    def _on_deadline(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for name in self.timers.pop_due(now):
            actions += self._on_timer(name, now)
        self.outlook.on_deadline(now)
        self.donor.on_deadline(now)
        self.shadows.on_deadline(now)
        actions += self.relay.on_deadline(now)
        if self.originator is not None:
            actions += self.originator.on_deadline(self.visible, now)
        if self.outer is not None:
            actions += self.outer.on_deadline(self.visible, now)
        actions += self.moves.on_deadline(self.visible, self.stage, now)
        return actions + self.recovery.on_deadline(self.outlook, now) + self.adoption.on_deadline(now)

    def _on_timer(self, name: str, now: float) -> list[Action]:
        match name:
            case "round":
                late = self.ledger.give_up(self._round_keepers())
                detail = f"round {self.ledger.round}: {len(late)} late"
                return [Count(name="round-deadline", detail=detail, notable=True)]
            case "drain":
                return leave_stage(self, now) if self.recovery.state is RecoveryState.LEAVING else []
            case _:
                self.leaving = False
                return [*self.relay.drop_all(), Leave()]

    # ---- the own record ----

    def record(self) -> Announce:
        """What this peer says about itself now."""
        states = {
            RecoveryState.JOINING: PeerState.JOINING,
            RecoveryState.SERVING: PeerState.SERVING,
            RecoveryState.LEAVING: PeerState.LEAVING,
        }
        state = states.get(self.recovery.state, PeerState.CATCHING_UP)
        return Announce(
            stage=self.stage,
            state=PeerState.LEAVING if self.relay.draining else state,
            round=self.ledger.round,
            outer_step=self.outer.outer_step if self.outer is not None else 0,
            measured=self.costs.published(),
            grad_norm=self.grad_norm,
            fresh=self.ledger.round < self.fresh_until,
        )

    def depends_on(self) -> set[PeerId]:
        """Peers without whom work under way here would hang: the driver pings them."""
        peers = self.relay.depends_on()
        if self.originator is not None:
            peers |= self.originator.depends_on()
        else:
            peers.update(self.ledger.silent(self._round_keepers()))
        return peers - {self.me}

    def _announce(self) -> list[Action]:
        """Say it again when anything that others plan by has changed."""
        news = (self.stage, self.recovery.state, self.relay.draining, self.ledger.round)
        if news == self._announced:
            return []  # measured numbers alone are no news; they ride along
        self._announced = news
        return [self.record()]

    def check_invariants(self, now: float) -> None:
        for machine in (self.relay, self.donor, self.recovery, self.shadows, self.outer):
            if machine is not None:
                machine.check_invariants()
        if self.originator is not None:
            assert self.stage == 0, "only the first stage originates"
            self.originator.check_invariants(now)
        deadline_s = self.next_deadline()
        assert deadline_s is None or deadline_s >= now, "a deadline has passed unseen"
