"""The compute thread: order, one event a job, and a life of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from peer.compute.stage_runtime import StageRuntime
from peer.compute.worker import ComputeWorker
from protocols.actions import (
    DropStash,
    PrepareOuter,
    RecoverySource,
    RunBackward,
    RunForward,
    RunInnerStep,
    RunLoss,
    RunOuterStep,
    RunRecovery,
    TakeSnapshot,
)
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
from protocols.messages import TensorPacket, WeightsKind, WorkKey
from protocols.run_spec import Codec, RunSpec, preset
from protocols.tensor_codec import encode

SPEC: RunSpec = preset("pico", rounds=dict(rows=2, seq_len=8))
WAIT_S = 60.0  # for a thread on a crowded machine; nothing is timed


class Inbox:
    """What the driver would get; `hold` lets no event through, so that jobs pile up behind it."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self._open = threading.Event()
        self._open.set()

    def emit(self, event: Event) -> None:
        self.events.put(event)
        assert self._open.wait(WAIT_S)

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def take(self, count: int) -> list[Event]:
        return [self.events.get(timeout=WAIT_S) for _ in range(count)]


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def start(inbox: Inbox) -> Iterator[Callable[[StageRuntime | None], ComputeWorker]]:
    workers: list[ComputeWorker] = []

    def starter(runtime: StageRuntime | None) -> ComputeWorker:
        workers.append(ComputeWorker(runtime, emit=inbox.emit))
        return workers[-1]

    yield starter
    inbox.release()
    for worker in workers:
        assert worker.close(WAIT_S)


def a_key(counter: int) -> WorkKey:
    return WorkKey("a1", counter, 1)


def a_packet() -> TensorPacket:
    return encode(torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)), Codec.RAW)


def forward(counter: int) -> RunForward:
    return RunForward(key=a_key(counter), packet=a_packet(), train=True)


def backward(counter: int) -> RunBackward:
    return RunBackward(key=a_key(counter), packet=a_packet())


def test_every_action_of_a_middle_stage_gets_its_event(inbox: Inbox, start) -> None:
    """The vocabulary of protocols.events, once through."""
    worker = start(StageRuntime(SPEC, 1))
    for job in (
        forward(1),
        backward(1),
        RunInnerStep(round=4),
        PrepareOuter(outer_step=1, pair_round=0, weight=1.0),
        RunOuterStep(outer_step=1, pair_round=0, packet=None),
        TakeSnapshot(kind=WeightsKind.WEIGHTS, snapshot="s1"),
        RunRecovery(stage=1, source=RecoverySource.INITIAL, donors=(), round=0, outer_step=0),
    ):
        worker.submit(job)
        (event,) = inbox.take(1)
        match event:
            case ForwardDone(key=key) | BackwardDone(key=key):
                assert key == a_key(1)
                assert event.packet is not None
                assert event.seconds > 0
            case InnerStepDone():
                assert event.round == 5, "the weights have now seen one round more"
                assert event.grad_norm > 0
            case OuterPrepared():
                assert (event.outer_step, event.packet.dtype) == (1, "float32")
            case OuterStepDone():
                assert not event.with_partner
            case SnapshotTaken():
                assert (event.snapshot, event.outer_step) == ("s1", 1)
            case RecoveryDone():
                assert event.ok
            case _:
                raise AssertionError(event)


def test_a_microbatch_of_the_first_stage(inbox: Inbox, start) -> None:
    """The batch is there before the forward that was submitted after it."""
    worker = start(StageRuntime(SPEC, 0))
    tokens = torch.arange(16).view(2, 8)
    worker.put_batch(a_key(1), tokens, tokens)
    worker.submit(RunForward(key=a_key(1), packet=None, train=True))
    (embedded,) = inbox.take(1)
    assert isinstance(embedded, ForwardDone)
    worker.submit(RunLoss(key=a_key(1), packet=embedded.packet, train=True))
    (loss,) = inbox.take(1)
    assert isinstance(loss, LossDone)
    assert loss.packet is not None
    worker.submit(RunBackward(key=a_key(1), packet=loss.packet))
    (done,) = inbox.take(1)
    assert isinstance(done, BackwardDone)
    assert done.packet is None


def test_order_between_two_steps(inbox: Inbox, start) -> None:
    """Backward first, then the step, then forwards in order; what comes after a step waits for it."""
    worker = start(StageRuntime(SPEC, 1))
    worker.submit(forward(1))
    worker.submit(forward(2))
    inbox.take(2)
    inbox.hold()
    worker.submit(forward(3))  # under way while the others pile up
    inbox.take(1)
    worker.submit(TakeSnapshot(kind=WeightsKind.WEIGHTS, snapshot="s"))
    worker.submit(forward(4))
    worker.submit(forward(5))
    worker.submit(backward(2))
    worker.submit(backward(1))
    worker.submit(RunInnerStep(round=0))
    worker.submit(backward(3))
    worker.submit(forward(6))
    inbox.release()
    order = [getattr(event, "key", None) or type(event) for event in inbox.take(8)]
    assert order == [
        a_key(2), a_key(1), InnerStepDone, a_key(4), a_key(5), SnapshotTaken, a_key(3), a_key(6)
    ]  # fmt: skip


def test_a_stash_dropped_while_its_forward_waits_does_not_come_back(inbox: Inbox, start) -> None:
    """A Release overtakes nothing: the forward fills the stash, then the drop empties it."""
    runtime = StageRuntime(SPEC, 1)
    worker = start(runtime)
    inbox.hold()
    worker.submit(forward(1))
    inbox.take(1)
    worker.submit(forward(2))
    worker.submit(DropStash(key=a_key(2)))
    worker.submit(DropStash(key=a_key(1)))
    worker.submit(TakeSnapshot(kind=WeightsKind.WEIGHTS, snapshot="after"))
    inbox.release()
    assert [type(event) for event in inbox.take(2)] == [ForwardDone, SnapshotTaken]
    assert runtime.num_stashes == 0


def test_a_failed_job_is_an_event_and_the_thread_lives_on(inbox: Inbox, start) -> None:
    """No stash, malformed bytes, no runtime yet: the core hears which job of which key it was."""
    worker = start(None)
    worker.submit(forward(1))
    (early,) = inbox.take(1)
    assert early == ComputeFailed(key=a_key(1), job="RunForward", reason="LocalProtocolError: no stage yet")
    worker.replace_runtime(StageRuntime(SPEC, 1))
    worker.submit(backward(7))
    malformed = TensorPacket(dtype="float32", shape=(2, 8, 64), codec=Codec.RAW, data=b"short")
    worker.submit(RunForward(key=a_key(8), packet=malformed, train=True))
    worker.submit(RunLoss(key=a_key(9), packet=a_packet(), train=True))
    worker.submit(forward(10))
    *failed, done = inbox.take(4)
    assert [(event.key, event.job) for event in failed if isinstance(event, ComputeFailed)] == [
        (a_key(7), "RunBackward"),
        (a_key(8), "RunForward"),
        (a_key(9), "RunLoss"),
    ]
    assert isinstance(done, ForwardDone)


def test_a_new_runtime_takes_over_between_what_was_and_what_will_be(inbox: Inbox, start) -> None:
    """A peer adopts another stage: jobs queued before still belong to the old one."""
    old, new = StageRuntime(SPEC, 1), StageRuntime(SPEC, 2)
    worker = start(old)
    inbox.hold()
    worker.submit(forward(1))
    inbox.take(1)
    worker.submit(forward(2))
    worker.replace_runtime(new)
    worker.submit(forward(3))
    worker.submit(RunRecovery(stage=2, source=RecoverySource.INITIAL, donors=(), round=0, outer_step=0))
    inbox.release()
    assert inbox.take(3)[-1] == RecoveryDone(stage=2, ok=True)
    assert (old.num_stashes, new.num_stashes) == (2, 1)


def test_call_gives_its_result_and_its_exception_to_the_loop(start) -> None:
    """How a checkpoint is taken: in the thread that owns the weights, after what is queued."""
    runtime = StageRuntime(SPEC, 1)
    worker = start(runtime)

    async def scenario() -> None:
        worker.submit(forward(1))
        assert await worker.call(lambda: runtime.num_stashes) == 1
        assert await worker.call(threading.current_thread) is not threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            await worker.call(lambda: 1 // 0)
        assert await worker.call(lambda: "still there") == "still there"

    asyncio.run(scenario())


def test_the_heartbeat_tells_a_busy_thread_from_a_living_one(inbox: Inbox, start) -> None:
    """The health service calls a peer sick whose compute thread has not come back for long."""
    worker = start(StageRuntime(SPEC, 1))
    inbox.hold()
    worker.submit(forward(1))
    inbox.take(1)
    stuck = worker.heartbeat
    assert stuck <= time.monotonic()
    worker.submit(forward(2))
    assert worker.heartbeat == stuck
    inbox.release()
    inbox.take(1)
    worker.submit(forward(3))
    inbox.take(1)
    assert worker.heartbeat > stuck


def test_close_ends_the_thread_and_forgets_what_waits(inbox: Inbox) -> None:
    """Leaving takes one job's time, not the queue's."""
    worker = ComputeWorker(StageRuntime(SPEC, 1), emit=inbox.emit)
    inbox.hold()
    for counter in range(20):
        worker.submit(forward(counter))
    inbox.take(1)
    assert not worker.close(0.01), "a job is under way"
    inbox.release()
    assert worker.close(WAIT_S)
    assert inbox.events.qsize() < 19
