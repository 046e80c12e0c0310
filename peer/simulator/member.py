"""One simulated peer: the core of the product, with hands that reach into the simulation instead of the world."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from protocols.actions import (
    Action,
    Announce,
    CallPeer,
    Count,
    DropStash,
    FetchBatch,
    Leave,
    MakePlan,
    MicrobatchFinished,
    OuterFinished,
    PutClaim,
    ReadClaims,
    RoundFinished,
    Send,
    WeighStages,
)
from protocols.core import PeerCore
from protocols.events import (
    BatchReady,
    ClaimsRead,
    DeadlineReached,
    Event,
    PingDone,
    SendFailed,
    Started,
    ViewChanged,
)
from protocols.group_plan import solve, weigh
from protocols.swarm import PeerId, PeerInfo, PeerState

if TYPE_CHECKING:
    from peer.simulator.swarm import Simulation

FETCH_S = 0.002
PLAN_S = 0.1
JITTER_SHARE = 0.2
RETRY_SHARE = 0.25  # of a heartbeat, after a store that failed


class Member:
    """A peer from its start to its death or leave. While stopped it does nothing and keeps what comes for later."""

    def __init__(self, simulation: Simulation, peer: PeerId, stage: int | None) -> None:
        self._simulation = simulation
        self._clock = simulation.clock
        self._rng = random.Random(f"member/{simulation.seed}/{peer}")
        self.peer = peer
        self.core = PeerCore(peer, simulation.spec, stage)
        self.compute = simulation.make_compute(
            self._clock, simulation.spec, f"{simulation.seed}/{peer}", self.post
        )
        self.is_alive = True
        self.is_stopped = False
        self.is_late = False  # was stopped, has not yet looked at its clock
        self._backlog: list[Event] = []
        self._wake_s: float | None = None
        self._misses: dict[PeerId, int] = {}
        self._info = PeerInfo(
            peer=peer, stage=stage, state=PeerState.JOINING, slots=simulation.spec.rounds.slots,
            started_unix_s=simulation.table.now_unix_s(),
        )  # fmt: skip
        self._do: dict[type, Callable[..., None]] = {
            Send: self._send,
            FetchBatch: self._fetch,
            DropStash: self._drop,
            Announce: self._announce,
            MicrobatchFinished: self._finished,
            Count: self._nothing,
            RoundFinished: self._nothing,
            OuterFinished: self._nothing,
            PutClaim: self._put_claim,
            ReadClaims: self._read_claims,
            CallPeer: self._call,
            MakePlan: self._plan,
            WeighStages: self._weigh,
            Leave: self._leave,
        }

    @property
    def num_held(self) -> int:
        """Microbatches that the own originator knows to be unfinished."""
        return self.core.originator.num_in_flight if self.core.originator is not None else 0

    def start(self) -> None:
        self.post(Started(view=self._simulation.table.view(self.peer)))
        liveness = self._simulation.spec.liveness
        self._clock.after(liveness.view_poll_s * self._rng.random(), self._poll)
        self._clock.after(liveness.heartbeat_s * self._rng.random(), self._heartbeat)
        self._clock.after(liveness.heartbeat_s * (1 + self._rng.random()), self._look_after)

    def die(self) -> None:
        self.is_alive = False
        self._backlog.clear()

    def resume(self) -> None:
        """Like an event loop, it sees first what came meanwhile, and then that its deadlines have passed."""
        self.is_stopped = False
        self.is_late = True
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            self.post(event)
        self._clock.after(0.0, self._wake)

    # ---- the way in ----

    def post(self, event: Event) -> None:
        if not self.is_alive:
            return
        if self.is_stopped:
            self._backlog.append(event)
            return
        now = self._clock.now
        actions = self.core.handle(event, now)
        self._simulation.saw(self, event, actions)
        submit = self.compute.submit
        for action in actions:
            do = self._do.get(type(action))
            if do is None:
                submit(action)  # type: ignore[arg-type]
            else:
                do(action)
        deadline_s = self.core.next_deadline()
        if deadline_s is not None and (self._wake_s is None or deadline_s < self._wake_s):
            self._wake_s = deadline_s
            self._clock.at(deadline_s, self._wake)

    def _wake(self) -> None:
        if not self.is_alive or self.is_stopped:
            return
        deadline_s = self.core.next_deadline()
        self._wake_s = None
        self.is_late = False
        if deadline_s is None:
            return
        if deadline_s <= self._clock.now:
            self.post(DeadlineReached())
        else:
            self._wake_s = deadline_s
            self._clock.at(deadline_s, self._wake)

    def _poll(self) -> None:
        if not self.is_alive:
            return
        if not self.is_stopped:
            view = self._simulation.table.look(self.peer)
            if view is not None:
                self.post(ViewChanged(view=view))
        self._clock.after(self._simulation.spec.liveness.view_poll_s * self._near_one(), self._poll)

    def _heartbeat(self) -> None:
        if not self.is_alive:
            return
        if not self.is_stopped:
            self._store()
        self._clock.after(self._simulation.spec.liveness.heartbeat_s * self._near_one(), self._heartbeat)

    def _store(self) -> None:
        """A store that failed is soon tried again."""
        if self.is_alive and not self.is_stopped and not self._simulation.table.store(self._info):
            self._clock.after(RETRY_SHARE * self._simulation.spec.liveness.heartbeat_s, self._store)

    def _look_after(self) -> None:
        """Calls those that own work depends on, as `peer.liveness` does."""
        if not self.is_alive:
            return
        if not self.is_stopped:
            peers = sorted(self.core.depends_on())
            self._misses = {known: misses for known, misses in self._misses.items() if known in peers}
            for known in peers:
                self._simulation.network.call(
                    self.peer, known, self._simulation.spec.liveness.ping_s, self._heard
                )
        self._clock.after(self._simulation.spec.liveness.heartbeat_s, self._look_after)

    def _heard(self, callee: PeerId, ok: bool, seconds: float) -> None:
        if ok:
            self._misses.pop(callee, None)
            return
        self._misses[callee] = self._misses.get(callee, 0) + 1
        if self._misses[callee] >= self._simulation.spec.liveness.ping_misses_max:
            del self._misses[callee]
            self.post(SendFailed(peer=callee))

    def _near_one(self) -> float:
        return 1 - JITTER_SHARE * self._rng.random()

    # ---- the way out ----

    def _send(self, action: Send) -> None:
        self._simulation.transmit(self.peer, action.to, action.message)

    def _fetch(self, action: FetchBatch) -> None:
        self._simulation.books.fetched(action.key)
        self.compute.put_batch(action)
        self._clock.after(FETCH_S, self.post, BatchReady(key=action.key))

    def _drop(self, action: DropStash) -> None:
        if action.key.originator == self.peer:
            self.compute.drop_microbatch(action.key)
        else:
            self.compute.drop(action.key)

    def _announce(self, action: Announce) -> None:
        """Stored at once when others plan by it, else with the next heartbeat, as `dht.heartbeat` does."""
        before = self._info
        said = {name: getattr(action, name) for name in Announce.__dataclass_fields__}
        measured = said.pop("measured").fields()
        self._info = replace(before, **said, **measured)
        now = self._info
        if (before.stage, before.state, before.outer_step, before.fresh) != (
            now.stage, now.state, now.outer_step, now.fresh
        ):  # fmt: skip
            self._store()

    def _finished(self, action: MicrobatchFinished) -> None:
        self._simulation.finished(action)

    def _nothing(self, action: Action) -> None:
        """For the chronicle only."""

    def _put_claim(self, action: PutClaim) -> None:
        self._simulation.table.claim(self.peer, action.stage)

    def _read_claims(self, action: ReadClaims) -> None:
        claims = self._simulation.table.claims(self.peer, action.stage)
        self._clock.after(FETCH_S, self.post, ClaimsRead(stage=action.stage, claims=claims))

    def _call(self, action: CallPeer) -> None:
        self._simulation.network.call(
            self.peer, action.peer, self._simulation.spec.liveness.ping_s, self._answered
        )

    def _plan(self, action: MakePlan) -> None:
        self._clock.after(PLAN_S, self.post, solve(action.problem, action.previous))

    def _weigh(self, action: WeighStages) -> None:
        self._clock.after(PLAN_S, self.post, weigh(action))

    def _answered(self, callee: PeerId, ok: bool, seconds: float) -> None:
        is_gone = not ok and self._simulation.network.is_refused(self.peer, callee)
        self.post(PingDone(peer=callee, ok=ok, seconds=seconds, is_gone=is_gone))

    def _leave(self, action: Leave) -> None:
        self._simulation.table.store(self._info, withdrawn=True)
        self._simulation.left(self)
