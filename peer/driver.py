"""Drives the core: one way in (`post`), one way out (`_execute`), one timer. No decision is made here.

Everything runs in the event loop's thread; compute and disk have threads of their own and answer through `post`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dht.discovery import Discovery
from peer.compute.worker import ComputeWorker
from peer.data import TokenData
from peer.metrics import FlightRecorder
from peer.tracker import Tracker
from peer.transport import MessageRefused, PeerUnreachable, Transport
from protocols.actions import (
    Action,
    Announce,
    CallPeer,
    Count,
    FetchBatch,
    Leave,
    MakePlan,
    MicrobatchFinished,
    OuterFinished,
    PutClaim,
    ReadClaims,
    RoundFinished,
    RunRecovery,
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
)
from protocols.group_plan import solve, weigh
from protocols.messages import Message
from protocols.microbatch import validation_batch
from protocols.swarm import PeerId

logger = logging.getLogger(__name__)


@dataclass
class Driver:
    """The core with its hands. `loop.time()` is the core's clock."""

    core: PeerCore
    transport: Transport
    worker: ComputeWorker
    discovery: Discovery
    tracker: Tracker
    announce: Callable[[Announce], None]
    prepare_stage: Callable[[int], Awaitable[None]]  # build and install the runtime of a stage, load its data
    data: Callable[[], TokenData]
    on_round: Callable[[int], None]
    recorder: FlightRecorder | None = None
    left: asyncio.Event = field(default_factory=asyncio.Event)
    _queue: deque[Event] = field(default_factory=deque[Event])
    _is_handling: bool = False
    _timer: asyncio.TimerHandle | None = None
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    # ---- the way in ----

    def post(self, event: Event) -> None:
        """Handle an event, after those that are already waiting. Only from the loop's thread."""
        self._queue.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._queue:
                self._handle(self._queue.popleft())
        finally:
            self._is_handling = False
        self._arm_timer()

    def post_threadsafe(self, event: Event) -> None:
        """The same, from the compute thread. The loop may be closed already when the last job ends."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.post, event)

    def _handle(self, event: Event) -> None:
        now = self._loop.time()
        if self.recorder is not None:
            self.recorder.write(event, now)
        for action in self.core.handle(event, now):
            if self.recorder is not None:
                self.recorder.write(action, now)
            self._execute(action)

    def _arm_timer(self) -> None:
        deadline_s = self.core.next_deadline()
        if self._timer is not None:
            if deadline_s == self._timer.when():
                return
            self._timer.cancel()
        self._timer = None if deadline_s is None else self._loop.call_at(deadline_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.post(DeadlineReached())

    # ---- the way out ----

    def _execute(self, action: Action) -> None:
        match action:
            case Send():
                self._spawn(self._send(action.to, action.message))
            case FetchBatch():
                self._spawn(self._fetch(action))
            case Announce():
                self.announce(action)
            case MicrobatchFinished():
                self.tracker.finished(action)
            case RoundFinished():
                self.on_round(action.round)
            case OuterFinished():
                self.tracker.averaged(action)
            case Count():
                self._count(action)
            case RunRecovery():
                self._spawn(self._recover(action))
            case CallPeer():
                self._spawn(self._ping(action.peer))
            case MakePlan():
                self._spawn(self._plan(action))
            case WeighStages():
                self._spawn(self._weigh(action))
            case PutClaim():
                self._spawn(self.discovery.put_claim(action.stage))
            case ReadClaims():
                self._spawn(self._read_claims(action.stage))
            case Leave():
                self.left.set()
            case _:
                self.worker.submit(action)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Tasks start in the order of their actions, so messages to one peer keep their order."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the driver failed: %r", error, exc_info=error)

    async def _send(self, to: PeerId, message: Message) -> None:
        try:
            await self.transport.send(to, message)
        except PeerUnreachable:
            self.post(SendFailed(peer=to, message=message))
        except MessageRefused as refusal:
            self.tracker.counters[f"refused_by_others_{refusal.reason}"] += 1
            self.post(SendFailed(peer=to, message=message))

    async def _fetch(self, action: FetchBatch) -> None:
        spec, data = self.core.spec, self.data()
        rounds = spec.rounds
        if action.train:
            key = action.key
            batch = data.sample(
                spec.seed, action.round, key.originator, key.counter, rounds.rows, rounds.seq_len
            )
        else:
            batch = data.validation_batch(validation_batch(action.key.counter), rounds.rows, rounds.seq_len)
        self.worker.put_batch(action.key, *batch)
        self.post(BatchReady(key=action.key))

    async def _plan(self, action: MakePlan) -> None:
        self.post(await asyncio.to_thread(solve, action.problem, action.previous))

    async def _weigh(self, action: WeighStages) -> None:
        self.post(await asyncio.to_thread(weigh, action))

    async def _recover(self, action: RunRecovery) -> None:
        await self.prepare_stage(action.stage)
        self.worker.submit(action)

    async def _ping(self, peer: PeerId) -> None:
        limit_s = self.core.spec.liveness.ping_s
        try:
            seconds = await self.transport.ping(peer, limit_s)
        except PeerUnreachable as error:
            self.post(PingDone(peer=peer, ok=False, seconds=limit_s, is_gone=error.is_gone))
        else:
            self.post(PingDone(peer=peer, ok=True, seconds=seconds))

    async def _read_claims(self, stage: int) -> None:
        self.post(ClaimsRead(stage=stage, claims=await self.discovery.claims(stage)))

    def _count(self, action: Count) -> None:
        self.tracker.count(action)
        if action.notable:
            logger.info("%s %s", action.name, action.detail)

    def close(self) -> None:
        """Stop the timer and whatever is still under way."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()


def checkpoint_due(round_: int, every: int) -> bool:
    return every > 0 and round_ > 0 and round_ % every == 0


def stage_folder(checkpoint_dir: Path, run_id: str) -> Path:
    """Checkpoints of different runs never share a folder."""
    return checkpoint_dir / run_id
