"""Compute that computes: tiny stages through the product's own StageRuntime, in virtual time. Imports torch.

The tokens are drawn from a Markov chain of our own, so that there is something to learn, and so that a microbatch is
the same whoever fetches it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from peer.compute.stage_runtime import StageRuntime
from peer.compute.worker import run_job
from peer.simulator.clock import Clock
from peer.simulator.compute import CostCompute, Job
from protocols.actions import (
    FetchBatch,
    RunBackward,
    RunForward,
    RunRecovery,
)
from protocols.events import (
    BackwardDone,
    ComputeFailed,
    Event,
    ForwardDone,
    LossDone,
)
from protocols.messages import WorkKey
from protocols.run_spec import RunSpec

SURPRISE_SHARE = 0.2  # of tokens that do not follow from the one before


class RealCompute(CostCompute):
    """Costs the same virtual seconds; what it answers is real."""

    def __init__(self, clock: Clock, spec: RunSpec, seed: str, emit: Callable[[Event], None]) -> None:
        super().__init__(clock, spec, seed, emit)
        self._spec = spec
        self.runtime: StageRuntime | None = None
        self.losses: list[float] = []

    def put_batch(self, action: FetchBatch) -> None:
        assert self.runtime is not None, "a batch before the first weights"
        self.runtime.put_batch(action.key, *sample(self._spec, action.key))

    def drop(self, key: WorkKey) -> None:
        super().drop(key)
        if key not in self._dropped and self.runtime is not None:
            self.runtime.drop(key)

    def drop_microbatch(self, key: WorkKey) -> None:
        super().drop_microbatch(key)
        is_coming = any(each.microbatch == key.microbatch for each in self._pending)
        if not is_coming and self.runtime is not None:
            self.runtime.drop(key)

    def _completion(self, job: Job, seconds: float) -> Event:
        if isinstance(job, RunRecovery) and (self.runtime is None or self.runtime.stage != job.stage):
            self.runtime = StageRuntime(self._spec, job.stage)
        assert self.runtime is not None, "work before the first weights"
        try:
            event = run_job(self.runtime, job)
        except Exception as error:  # as the worker does: a job that fails is an event
            event = ComputeFailed(key=getattr(job, "key", None), job=type(job).__name__, reason=str(error))
        self._keep_books(job)
        assert event is not None, "every job has a completion"
        if isinstance(event, LossDone):
            self.losses.append(event.loss)
        return replace(event, seconds=seconds) if isinstance(event, ForwardDone | BackwardDone) else event

    def _keep_books(self, job: Job) -> None:
        match job:
            case RunForward(key=key):
                is_dropped = key in self._dropped
                self._keep(key)
                if is_dropped and self.runtime is not None:
                    self.runtime.drop(key)
            case RunBackward(key=key):
                self.stashes.discard(key)
            case RunRecovery():
                self.stashes.clear()
            case _:
                pass


def sample(spec: RunSpec, key: WorkKey) -> tuple[Tensor, Tensor]:
    """Tokens and targets [B, L] of a microbatch: mostly the successor of the token before, modulo the vocabulary."""
    rng = random.Random(f"{spec.seed}/{key.originator}/{key.counter}")
    vocab_size, rounds = spec.model.vocab_size, spec.rounds
    rows: list[list[int]] = []
    for _ in range(rounds.rows):
        tokens = [rng.randrange(vocab_size)]
        for _ in range(rounds.seq_len):
            is_surprise = rng.random() < SURPRISE_SHARE
            tokens.append(rng.randrange(vocab_size) if is_surprise else (3 * tokens[-1] + 1) % vocab_size)
        rows.append(tokens)
    text = torch.tensor(rows)
    return text[:, :-1], text[:, 1:]
