"""The compute thread: a queue of actions in, exactly one completion event each out.

Between two inner steps the order is: gradients first (they free the neighbours' slots), then steps, then forwards
and losses in their order, then what forgets or copies state. Invariant: whatever was submitted before a step runs
in its generation, whatever after it in the next. So a step has seen the backward passes submitted before it, and
no forward submitted after it runs on the old weights.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, PriorityQueue
from typing import TypeAlias, TypeVar

from torch import Tensor

from peer.compute.stage_runtime import StageRuntime
from protocols.actions import (
    DropStash,
    PrepareOuter,
    RunBackward,
    RunForward,
    RunInnerStep,
    RunLoss,
    RunOuterStep,
    RunRecovery,
    TakeSnapshot,
)
from protocols.errors import LocalProtocolError
from protocols.events import (
    BackwardDone,
    ComputeFailed,
    Event,
    ForwardDone,
    InnerStepDone,
    LossDone,
    OuterPrepared,
    OuterStepDone,
    RecoveryDone,
    SnapshotTaken,
)
from protocols.messages import WorkKey

logger = logging.getLogger(__name__)

StateJob: TypeAlias = RunInnerStep | PrepareOuter | RunOuterStep | TakeSnapshot | RunRecovery
Job: TypeAlias = RunForward | RunLoss | RunBackward | DropStash | StateJob
Result = TypeVar("Result")
Call: TypeAlias = Callable[[], None]

IDLE_BEAT_S = 1.0  # an idle thread says so that often
_FIRST, _LAST = 0, 4
_PRIORITY: dict[type, int] = {
    RunBackward: 0,
    RunInnerStep: 1,
    PrepareOuter: 1,
    RunOuterStep: 1,
    RunForward: 2,
    RunLoss: 2,
    DropStash: 3,  # not before the forward that would fill the stash again
    TakeSnapshot: _LAST,
    RunRecovery: _LAST,
}


class ComputeWorker:
    """One daemon thread. `emit` is called from it; without a runtime every job fails."""

    def __init__(self, runtime: StageRuntime | None = None, *, emit: Callable[[Event], None]) -> None:
        self._runtime = runtime
        self._emit = emit
        self._queue: PriorityQueue[tuple[int, int, int, Job | Call]] = PriorityQueue()
        self._lock = threading.Lock()  # of the next two: submit is called from several threads
        self._generation = 0
        self._num_submitted = 0
        self._closing = threading.Event()
        self.heartbeat = time.monotonic()  # end of the last job, or the last time the queue was seen empty
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue an action; its completion event, or ComputeFailed, follows."""
        self._put(_PRIORITY[type(job)], job, ends_generation=isinstance(job, RunInnerStep))

    def put_batch(self, key: WorkKey, tokens_BL: Tensor, targets_BL: Tensor) -> None:
        """Hand the first stage a microbatch; a RunForward submitted afterwards finds it."""
        self._put(_FIRST, lambda: self._need_runtime().put_batch(key, tokens_BL, targets_BL))

    def replace_runtime(self, runtime: StageRuntime) -> None:
        """The peer serves another stage from now on: what is queued still meets the old runtime."""

        def replace() -> None:
            self._runtime = runtime

        self._put(_LAST, replace, ends_generation=True)

    def call(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Awaitable result of `function`, run in the compute thread after all that is queued now."""
        outcome: Future[Result] = Future()

        def run() -> None:
            if not outcome.set_running_or_notify_cancel():
                return
            try:
                outcome.set_result(function())
            except Exception as error:
                outcome.set_exception(error)

        self._put(_LAST, run, ends_generation=True)
        return asyncio.wrap_future(outcome)

    def close(self, timeout_s: float) -> bool:
        """Stop after the job under way and forget the others; False: it takes longer than that."""
        self._closing.set()
        self._put(_FIRST, lambda: None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, priority: int, job: Job | Call, *, ends_generation: bool = False) -> None:
        with self._lock:
            self._num_submitted += 1
            self._queue.put((self._generation, priority, self._num_submitted, job))
            self._generation += ends_generation

    # ---- in the thread ----

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                *_, job = self._queue.get(timeout=IDLE_BEAT_S)
            except Empty:
                pass
            else:
                self._do(job)
            self.heartbeat = time.monotonic()

    def _do(self, job: Job | Call) -> None:
        try:
            event = job() if callable(job) else run_job(self._need_runtime(), job)
        except Exception as error:  # the thread outlives any job: the peer owes others their stashes
            name, key = type(job).__name__, getattr(job, "key", None)
            logger.warning("%s%s failed: %s", f"{key} " if key else "", name, error, exc_info=True)
            event = ComputeFailed(key=key, job=name, reason=f"{type(error).__name__}: {error}")
        if event is not None:
            self._emit(event)

    def _need_runtime(self) -> StageRuntime:
        if self._runtime is None:
            raise LocalProtocolError("no stage yet")
        return self._runtime


def run_job(runtime: StageRuntime, job: Job) -> Event | None:
    """Do it now, in this thread; the completion event. Raises what the runtime raises."""
    started = time.perf_counter()
    match job:
        case RunForward(key=key, packet=packet, train=train):
            out = runtime.forward(key, packet, train=train)
            return ForwardDone(key=key, packet=out, seconds=time.perf_counter() - started)
        case RunLoss(key=key, packet=packet, train=train):
            loss, gradient = runtime.loss(key, packet, train=train)
            return LossDone(key=key, loss=loss, packet=gradient)
        case RunBackward(key=key, packet=packet):
            gradient = runtime.backward(key, packet)
            return BackwardDone(key=key, packet=gradient, seconds=time.perf_counter() - started)
        case DropStash(key=key):
            return runtime.drop(key)
        case _:
            return _run_state_job(runtime, job)


def _run_state_job(runtime: StageRuntime, job: StateJob) -> Event:
    match job:
        case RunInnerStep(round=round_):
            norm = runtime.inner_step(round_)
            return InnerStepDone(round=runtime.round, grad_norm=norm)
        case PrepareOuter(outer_step=outer_step, pair_round=pair_round, weight=weight):
            packet, schema = runtime.prepare_outer(outer_step, pair_round, weight=weight)
            return OuterPrepared(outer_step=outer_step, pair_round=pair_round, packet=packet, schema=schema)
        case RunOuterStep(outer_step=outer_step, pair_round=pair_round, packet=packet):
            outcome = runtime.apply_outer(outer_step, pair_round, packet)
            return OuterStepDone(
                outer_step=outer_step,
                with_partner=outcome.with_partner,
                apart=outcome.apart,
                cosine=outcome.cosine,
            )
        case TakeSnapshot(kind=kind, snapshot=name):
            packets, sha256 = runtime.snapshot(kind)
            return SnapshotTaken(
                kind=kind,
                snapshot=name,
                sha256=sha256,
                outer_step=runtime.outer_step,
                packets=packets,
            )
        case RunRecovery(stage=stage):
            return RecoveryDone(stage=stage, ok=runtime.recover(job))
