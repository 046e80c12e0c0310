"""Owning side of microbatches: rounds, window, paths, attempts. Nothing is lost, nothing runs twice at once.

    FETCHING -> EMBEDDING -> OUT -return-> LOSS -> RETURNING -gradient-> CLOSING -> done
    validation ends after LOSS
    deadline, Undeliverable or a lost peer in OUT, LOSS, RETURNING -> attempt + 1, OUT or HELD (no feasible path)
    sent out attempts_max times, for at least round_s, in vain -> given up, loudly

Invariant: each open microbatch has exactly one live attempt, and everything in flight has a deadline. The boundary
packet of the first forward is kept, so that a new attempt does not embed again.
"""

from __future__ import annotations

from collections import deque

from protocols.actions import (
    Action,
    Count,
    DropStash,
    FetchBatch,
    MicrobatchFinished,
    RunBackward,
    RunForward,
    RunLoss,
    Send,
)
from protocols.costs import Costs
from protocols.events import BatchReady
from protocols.messages import (
    BoundaryActivation,
    BoundaryGradient,
    Release,
    RoundPlan,
    TensorPacket,
    Undeliverable,
    WorkKey,
)
from protocols.microbatch import (
    IN_FLIGHT,
    UNSENT,
    Microbatch,
    MicrobatchState,
    validation_counters,
)
from protocols.planner import NoFeasiblePath, Planner
from protocols.rounds import AWAY_ROUND, RoundLedger
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, SwarmView
from protocols.timers import Timers
from protocols.trips import Trips

HELD_RETRY_S = 1.0  # how often a microbatch without a feasible path looks again
VIEW_FILLS_S = 10.0  # a new peer's view of the table is complete by then


class Originator:
    """Invariant: at most `window` microbatches are past QUEUED."""

    def __init__(
        self, me: PeerId, spec: RunSpec, ledger: RoundLedger, costs: Costs, *, next_counter: int = 0
    ) -> None:
        self._me = me
        self._spec = spec
        self._ledger = ledger
        self.planner = Planner(run=spec, me=me, costs=costs)
        self._open: dict[int, Microbatch] = {}
        self._queue: deque[int] = deque()
        self._timers: Timers[int] = Timers()
        self._trips = Trips(spec.liveness)
        self.next_round = ledger.round
        self.next_counter = next_counter
        self.active = True  # False: paused or leaving
        self._has_begun = False
        self._born_s: float | None = None
        self._greeted: SwarmView | None = None  # the view whose relays have all heard of the current round
        self._told: set[PeerId] = set()
        self.waiting_for: tuple[int, ...] = ()  # stages without which no path is feasible

    # ---- what others ask ----

    @property
    def is_idle(self) -> bool:
        return not self._open

    @property
    def num_in_flight(self) -> int:
        return len(self._open) - len(self._queue)

    @property
    def is_finished(self) -> bool:
        """The run's last round and its validation are done."""
        return self.next_round > self._spec.rounds.total_rounds and self.is_idle

    def depends_on(self) -> set[PeerId]:
        """Relays of what is in flight."""
        in_flight = (each for each in self._open.values() if each.state in IN_FLIGHT)
        return {hop.peer for microbatch in in_flight for hop in microbatch.path}

    def next_deadline(self) -> float | None:
        return self._timers.next()

    # ---- rounds ----

    def advance(self, view: SwarmView, everybody: SwarmView, now: float) -> list[Action]:
        """Begin the next round when its time has come, then fill the window. `view` is `everybody` less suspects."""
        actions = [*self.planner.want(view, now), *self._greet(view)]
        if self._may_begin(view, now):
            actions += self._begin_round(view, everybody)
        while self._queue and self.num_in_flight < self._spec.rounds.window:
            actions += self._start(self._open[self._queue.popleft()], now)
        return actions

    def _may_begin(self, view: SwarmView, now: float) -> bool:
        rounds = self._spec.rounds
        self.next_round = max(self.next_round, self._ledger.round)  # the core may have moved on to the others
        if not self.active or self._queue or self.next_round > rounds.total_rounds:
            return False
        if self.next_round > self._ledger.round + rounds.staleness_max:
            return False
        return self._has_begun or self._is_everybody_there(view, now)

    def _is_everybody_there(self, view: SwarmView, now: float) -> bool:
        """Before our first round. A run's start waits for its quorum, a joiner only for its view to fill."""
        if self._born_s is None:
            self._born_s = now
        quorum = self._spec.rounds.start_replicas
        few = [stage for stage in range(self._spec.num_stages) if len(view.replicas(stage)) < quorum]
        is_running = any(info.round > 0 for info in view.peers)
        self._has_begun = not few or (is_running and now >= self._born_s + VIEW_FILLS_S)
        self.waiting_for = () if self._has_begun else tuple(few)
        return self._has_begun

    def _greet(self, view: SwarmView) -> list[Action]:
        """Relays that came into view since the round was announced wait for our word on it as well."""
        if self._greeted is None or view is self._greeted or not self.active:
            return []
        self._greeted = view
        untold = [peer for peer in self._relays(view) if peer not in self._told]
        self._told.update(untold)
        return self._announce(self.next_round - 1, untold)

    def on_plan_lost(self, peer: PeerId) -> None:
        """`peer` did not hear of the round: tell it again once we see it again."""
        if peer in self._told:
            self._told.discard(peer)
            self._greeted = SwarmView()

    def go_away(self, everybody: SwarmView) -> list[Action]:
        """Pause or leave: begin no round, and let nobody wait for one."""
        self.active = False
        away = RoundPlan(round=AWAY_ROUND, keys=())
        return [Send(to=peer, message=away) for peer in self._relays(everybody)]

    def _begin_round(self, view: SwarmView, everybody: SwarmView) -> list[Action]:
        """Plan all microbatches of the round and tell every replica what to expect, also those that are avoided."""
        planned = self._plan_round(view)
        if planned is None:
            return []
        round_ = self.next_round
        self.next_round += 1
        for microbatch in planned:
            self._open[microbatch.key.counter] = microbatch
            self._queue.append(microbatch.key.counter)
        live = tuple(microbatch.key for microbatch in self._open.values() if microbatch.train)
        self._ledger.announce(self._me, round_, live)
        relays = self._relays(everybody)
        self._greeted, self._told = view, set(relays)
        others = [info.peer for info in everybody.originators() if info.peer != self._me]
        return self._announce(round_, [*relays, *others])  # an originator that has fallen behind sees it

    def _plan_round(self, view: SwarmView) -> list[Microbatch] | None:
        rounds = self._spec.rounds
        evals = validation_counters(
            rounds, self.next_round, [info.peer for info in view.originators()], self._me
        )
        trains = range(self.next_counter, self.next_counter + rounds.microbatches)
        if self.next_round >= rounds.total_rounds:
            trains = range(0)  # all trained: only the last validation is left
        self.planner.start_round(self.next_round)
        planned: list[Microbatch] = []
        for counter, train in [*((c, False) for c in evals), *((c, True) for c in trains)]:
            path = self.planner.plan(view, counter, index=counter - trains.start if train else None)
            if isinstance(path, NoFeasiblePath):
                self.waiting_for = path.empty_stages
                return None
            planned.append(Microbatch(WorkKey(self._me, counter, 1), self.next_round, train, path))
        self.waiting_for = ()
        self.next_counter += len(trains)
        return planned

    def _announce(self, round_: int, audience: list[PeerId]) -> list[Action]:
        """To each: all live attempts that come to it."""
        keys_of: dict[PeerId, list[WorkKey]] = {peer: [] for peer in audience}
        for microbatch in self._open.values():
            for hop in microbatch.path[1:] if microbatch.train else ():
                if hop.peer in keys_of:
                    keys_of[hop.peer].append(microbatch.key)
        plans = ((peer, RoundPlan(round=round_, keys=tuple(keys))) for peer, keys in keys_of.items())
        return [Send(to=peer, message=plan) for peer, plan in plans]

    def _relays(self, everybody: SwarmView) -> list[PeerId]:
        return [info.peer for stage in range(1, self._spec.num_stages) for info in everybody.replicas(stage)]

    # ---- one microbatch, forward and back ----

    def _start(self, microbatch: Microbatch, now: float) -> list[Action]:
        microbatch.state = MicrobatchState.FETCHING
        self._timers.set(microbatch.key.counter, now + self._spec.liveness.lease_s)
        return [FetchBatch(key=microbatch.key, round=microbatch.round, train=microbatch.train)]

    def on_batch_ready(self, event: BatchReady) -> list[Action]:
        microbatch = self._open.get(event.key.counter)  # whatever its attempt is by now
        if microbatch is None or microbatch.state is not MicrobatchState.FETCHING:
            return []
        microbatch.state = MicrobatchState.EMBEDDING
        return [RunForward(key=microbatch.key, packet=None, train=microbatch.train)]

    def on_forward_done(self, key: WorkKey, packet: TensorPacket, now: float) -> list[Action]:
        microbatch = self._open.get(key.counter)
        if microbatch is None or microbatch.state is not MicrobatchState.EMBEDDING:
            return []
        microbatch.packet = packet
        return self._send_out(microbatch, now)

    def _send_out(self, microbatch: Microbatch, now: float) -> list[Action]:
        assert microbatch.packet is not None, "sent before the first forward"
        if not microbatch.path:
            microbatch.state = MicrobatchState.HELD
            self._timers.set(microbatch.key.counter, now + HELD_RETRY_S)
            return []
        microbatch.state = MicrobatchState.OUT
        microbatch.sent_at_s = now
        microbatch.tries += 1
        if microbatch.first_sent_s is None:
            microbatch.first_sent_s = now
        self._timers.set(microbatch.key.counter, now + self._trips.limit_s(microbatch.tries))
        first = BoundaryActivation(
            key=microbatch.key,
            round=microbatch.round,
            path=microbatch.path,
            hop=1,
            train=microbatch.train,
            packet=microbatch.packet,
        )
        return [Send(to=microbatch.path[1].peer, message=first)]

    def on_activation(self, message: BoundaryActivation) -> list[Action]:
        """Our own microbatch has run its path: ours, not one that its sender made up."""
        microbatch = self._current(message.key)
        if microbatch is None or microbatch.state is not MicrobatchState.OUT:
            return []
        if message.path != microbatch.path:
            return [Count(name="activation-off-its-path", detail=str(message.key))]
        microbatch.state = MicrobatchState.LOSS
        return [RunLoss(key=message.key, packet=message.packet, train=microbatch.train)]

    def on_loss_done(self, key: WorkKey, loss: float, packet: TensorPacket | None) -> list[Action]:
        microbatch = self._current(key)
        if microbatch is None or microbatch.state is not MicrobatchState.LOSS:
            return []
        microbatch.loss = loss
        if packet is None:
            return self._close(microbatch, loss)
        microbatch.state = MicrobatchState.RETURNING
        hop = len(microbatch.path) - 1
        return [Send(to=microbatch.path[hop].peer, message=BoundaryGradient(key=key, hop=hop, packet=packet))]

    def on_gradient(self, sender: PeerId, message: BoundaryGradient, now: float) -> list[Action]:
        microbatch = self._current(message.key)
        if microbatch is None or microbatch.state is not MicrobatchState.RETURNING:
            return []
        if sender != microbatch.path[1].peer:
            return [Count(name="gradient-off-its-path", detail=f"{message.key} from {sender[-6:]}")]
        microbatch.state = MicrobatchState.CLOSING
        self._trips.measured(now - microbatch.sent_at_s)
        self.planner.measured_trip(microbatch.path, now - microbatch.sent_at_s)
        self._timers.set(message.key.counter, now + self._spec.liveness.lease_s)
        return [RunBackward(key=message.key, packet=message.packet)]

    def on_backward_done(self, key: WorkKey) -> list[Action]:
        microbatch = self._current(key)
        if microbatch is None or microbatch.state is not MicrobatchState.CLOSING:
            return []
        return self._close(microbatch, microbatch.loss)

    def _close(self, microbatch: Microbatch, loss: float | None) -> list[Action]:
        key = microbatch.key
        del self._open[key.counter]
        self._timers.clear(key.counter)
        self._ledger.close(key)
        ran = {hop.stage for hop in microbatch.path}
        skipped = tuple(stage for stage in range(self._spec.num_stages) if stage not in ran)
        finished = MicrobatchFinished(
            key=key, round=microbatch.round, train=microbatch.train, loss=loss, skipped=skipped
        )
        return [DropStash(key=key), finished]

    # ---- failures ----

    def is_on_path(self, message: Undeliverable) -> bool:
        """It speaks of a live attempt, and of a peer on its path."""
        microbatch = self._current(message.key)
        return microbatch is not None and any(hop.peer == message.unreachable for hop in microbatch.path)

    def on_undeliverable(self, message: Undeliverable, view: SwarmView, now: float) -> list[Action]:
        microbatch = self._current(message.key)
        if microbatch is None or microbatch.state not in IN_FLIGHT:
            return []
        return self._next_attempt(microbatch, f"{message.unreachable[-6:]} unreachable", view, now)

    def on_peer_lost(self, peer: PeerId, view: SwarmView, now: float) -> list[Action]:
        """A microbatch that has `peer` on its path cannot come back. `view` is already without it."""
        actions: list[Action] = []
        for microbatch in list(self._open.values()):
            needed = microbatch.state is not MicrobatchState.CLOSING
            if microbatch.state is MicrobatchState.LOSS and not microbatch.train:
                needed = False  # validation has come back already
            if needed and any(hop.peer == peer for hop in microbatch.path[1:]):
                actions += self._next_attempt(microbatch, f"{peer[-6:]} lost", view, now)
        return actions

    def on_compute_failed(self, key: WorkKey, view: SwarmView, now: float) -> list[Action]:
        microbatch = self._current(key)
        if microbatch is None:
            return []
        hopeless = microbatch.packet is None or microbatch.tries >= self._spec.rounds.attempts_max
        if hopeless or microbatch.state is MicrobatchState.CLOSING:
            given_up = Count(name="microbatch-given-up", detail=str(key), notable=True)
            return [given_up, *self._close(microbatch, None)]
        return self._next_attempt(microbatch, "own compute failed", view, now)

    def on_deadline(self, view: SwarmView, now: float) -> list[Action]:
        actions: list[Action] = []
        for counter in self._timers.pop_due(now):
            microbatch = self._open[counter]
            if microbatch.state is MicrobatchState.HELD:
                actions += self._find_path(microbatch, view, now)
            elif microbatch.state in IN_FLIGHT:
                actions += self._next_attempt(microbatch, "no answer in time", view, now)
            else:  # our own compute or data source has not answered for a whole lease
                actions += self.on_compute_failed(microbatch.key, view, now)
        return actions

    def _next_attempt(self, microbatch: Microbatch, why: str, view: SwarmView, now: float) -> list[Action]:
        """Release the old attempt everywhere, then take another path."""
        old = microbatch.key
        release = Release(keys=(old,))
        actions: list[Action] = [Send(to=hop.peer, message=release) for hop in microbatch.path[1:]]
        actions.append(Count(name="retry", detail=f"{old} {why}", notable=True))
        if self._is_hopeless(microbatch, now):
            given_up = Count(name="microbatch-given-up", detail=f"{old} {why}", notable=True)
            return [*actions, given_up, *self._close(microbatch, None)]
        microbatch.key = WorkKey(old.originator, old.counter, old.attempt + 1)
        self._ledger.close(old)
        if microbatch.train:
            self._ledger.expect(microbatch.key, microbatch.round)
        return [*actions, *self._find_path(microbatch, view, now)]

    def _find_path(self, microbatch: Microbatch, view: SwarmView, now: float) -> list[Action]:
        """A path for the current attempt; without one it is held until the view has something better."""
        path = self.planner.plan(view, microbatch.key.counter)
        feasible = not isinstance(path, NoFeasiblePath)
        self.waiting_for = () if feasible else path.empty_stages
        microbatch.path = path if feasible else ()
        plan = RoundPlan(round=microbatch.round, keys=(microbatch.key,))
        told = microbatch.path[1:] if microbatch.train else ()
        actions: list[Action] = [Send(to=hop.peer, message=plan) for hop in told]
        return actions if microbatch.state in UNSENT else [*actions, *self._send_out(microbatch, now)]

    # ---- small things ----

    def _current(self, key: WorkKey) -> Microbatch | None:
        microbatch = self._open.get(key.counter)
        return microbatch if microbatch is not None and microbatch.key == key else None

    def _is_hopeless(self, microbatch: Microbatch, now: float) -> bool:
        """Sent out often enough, and for longer than anybody waits for a round: a burst of refusals is no reason."""
        if microbatch.tries < self._spec.rounds.attempts_max or microbatch.first_sent_s is None:
            return False
        return now - microbatch.first_sent_s >= self._spec.liveness.round_s

    def check_invariants(self, now: float) -> None:
        assert self.num_in_flight <= self._spec.rounds.window, "more in flight than the window"
        deadline_s = self._timers.next()
        assert deadline_s is None or deadline_s >= now, "a deadline has passed unseen"
        for microbatch in self._open.values():
            queued = microbatch.state is MicrobatchState.QUEUED
            assert queued == (microbatch.key.counter in self._queue), "the queue and the states disagree"
            assert queued or microbatch.key.counter in self._timers, "in flight without a deadline"
