"""Compute that costs virtual seconds and computes nothing: one job at a time, in the worker's order.

Holds stashes as the real worker does, so that a leak of the protocol shows as a stash that nobody dropped.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import TypeAlias

from peer.simulator.clock import Clock
from protocols.actions import (
    FetchBatch,
    PrepareOuter,
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
    Event,
    ForwardDone,
    InnerStepDone,
    LossDone,
    OuterPrepared,
    OuterStepDone,
    RecoveryDone,
    SnapshotTaken,
)
from protocols.messages import TensorPacket, WorkKey
from protocols.run_spec import Codec, RunSpec

Job: TypeAlias = (
    RunForward
    | RunLoss
    | RunBackward
    | RunInnerStep
    | PrepareOuter
    | RunOuterStep
    | TakeSnapshot
    | RunRecovery
)

FORWARD_S = 0.02
_COST_S: dict[type, float] = {  # of a peer of speed 1
    RunForward: FORWARD_S,
    RunLoss: FORWARD_S,
    RunBackward: 2 * FORWARD_S,
    RunInnerStep: 0.005,
    PrepareOuter: 0.002,
    RunOuterStep: 0.002,
    TakeSnapshot: 0.01,
    RunRecovery: 0.05,
}
_PRIORITY: dict[type, int] = {RunBackward: 0, RunForward: 1, RunLoss: 1, RunInnerStep: 1}
_LAST = 2
SNAPSHOT_CHUNKS = 3
PARAMETERS = 64  # in a half of an averaging


def boundary_packet(spec: RunSpec) -> TensorPacket:
    shape = spec.boundary_shape
    return TensorPacket(
        dtype="float32", shape=shape, codec=Codec.BF16, data=bytes(2 * shape[0] * shape[1] * shape[2])
    )


HALF = TensorPacket(dtype="float32", shape=(PARAMETERS,), codec=Codec.RAW, data=bytes(4 * PARAMETERS))
CHUNK = TensorPacket(dtype="uint8", shape=(256,), codec=Codec.RAW, data=bytes(256))


class CostCompute:
    """One peer's serial worker. `emit` gets exactly one event a job, at the moment it is done."""

    def __init__(self, clock: Clock, spec: RunSpec, seed: str, emit: Callable[[Event], None]) -> None:
        self._clock = clock
        self._packet = boundary_packet(spec)
        self._rng = random.Random(f"compute/{seed}")
        self._emit = emit
        self._queue: list[tuple[int, int, Job]] = []
        self._num_queued = 0
        self._is_busy = False
        self._dropped: set[WorkKey] = set()  # while the forward was queued or running
        self._pending: set[WorkKey] = set()
        self._round = 0
        self._outer_step = 0
        self.slowness = 1.0
        self.stashes: set[WorkKey] = set()

    def submit(self, job: Job) -> None:
        self._num_queued += 1
        if isinstance(job, RunForward):
            self._pending.add(job.key)
        heapq.heappush(self._queue, (_PRIORITY.get(type(job), _LAST), self._num_queued, job))
        if not self._is_busy:
            self._start()

    def put_batch(self, action: FetchBatch) -> None:
        """The first stage's tokens and targets come; nothing to do where nothing is computed."""

    def drop(self, key: WorkKey) -> None:
        if key in self._pending:
            self._dropped.add(key)
        self.stashes.discard(key)

    def drop_microbatch(self, key: WorkKey) -> None:
        """On the first stage a microbatch is dropped with all its attempts."""
        for held in [each for each in self.stashes if each.microbatch == key.microbatch]:
            self.stashes.discard(held)
        self._dropped.update(each for each in self._pending if each.microbatch == key.microbatch)

    def _start(self) -> None:
        _, _, job = heapq.heappop(self._queue)
        self._is_busy = True
        seconds = _COST_S[type(job)] * self.slowness * (0.8 + 0.4 * self._rng.random())
        self._clock.after(seconds, self._finish, job, seconds)

    def _finish(self, job: Job, seconds: float) -> None:
        self._is_busy = False
        if self._queue:
            self._start()
        self._emit(self._completion(job, seconds))

    def _completion(self, job: Job, seconds: float) -> Event:
        match job:
            case RunForward(key=key):
                self._keep(key)
                return ForwardDone(key=key, packet=self._packet, seconds=seconds)
            case RunBackward(key=key):
                self.stashes.discard(key)
                return BackwardDone(key=key, packet=self._packet, seconds=seconds)
            case RunLoss(key=key, train=train):
                return LossDone(key=key, loss=1.0, packet=self._packet if train else None)
            case RunInnerStep(round=round_):
                self._round = round_ + 1
                return InnerStepDone(round=round_ + 1, grad_norm=1.0)
            case PrepareOuter():
                return OuterPrepared(
                    outer_step=job.outer_step, pair_round=job.pair_round, packet=HALF, schema="schema"
                )
            case RunOuterStep(outer_step=outer_step, packet=packet):
                self._outer_step = outer_step
                return OuterStepDone(outer_step=outer_step, with_partner=packet is not None)
            case TakeSnapshot():
                return self._snapshot(job)
            case RunRecovery():
                self.stashes.clear()
                self._round, self._outer_step = job.round, job.outer_step
                return RecoveryDone(stage=job.stage, ok=True)
            case _:
                raise AssertionError(f"no job: {job!r}")

    def _snapshot(self, job: TakeSnapshot) -> SnapshotTaken:
        return SnapshotTaken(
            kind=job.kind,
            snapshot=job.snapshot,
            sha256="0" * 64,
            outer_step=self._outer_step,
            packets=(CHUNK,) * SNAPSHOT_CHUNKS,
        )

    def _keep(self, key: WorkKey) -> None:
        self._pending.discard(key)
        if key in self._dropped:
            self._dropped.discard(key)
        else:
            self.stashes.add(key)
