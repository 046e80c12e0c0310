"""An originator's record of one open microbatch, and its states (the transitions are at the head of `originator`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from protocols.messages import Path, TensorPacket, WorkKey
from protocols.run_spec import RoundSpec
from protocols.swarm import PeerId

VALIDATION_BASE = 1 << 48  # counters from here on are validation: base + round x BATCHES + batch
VALIDATION_BATCHES = 1024


def validation_batch(counter: int) -> int:
    """Which of the fixed validation batches a validation counter names."""
    return (counter - VALIDATION_BASE) % VALIDATION_BATCHES


def validation_counters(
    rounds: RoundSpec, round_: int, originators: Sequence[PeerId], me: PeerId
) -> list[int]:
    """Own share of the validation batches of a round, empty in most; all originators together run each batch once."""
    is_last = round_ == rounds.total_rounds
    if rounds.eval_every == 0 or (round_ % rounds.eval_every and not is_last):
        return []
    first = originators.index(me) if me in originators else 0
    base = VALIDATION_BASE + round_ * VALIDATION_BATCHES
    return [base + batch for batch in range(first, rounds.eval_microbatches, max(1, len(originators)))]


class MicrobatchState(Enum):
    QUEUED = "queued"
    FETCHING = "fetching"
    EMBEDDING = "embedding"
    OUT = "out"
    LOSS = "loss"
    RETURNING = "returning"
    CLOSING = "closing"
    HELD = "held"


UNSENT = (MicrobatchState.QUEUED, MicrobatchState.FETCHING, MicrobatchState.EMBEDDING)
IN_FLIGHT = (MicrobatchState.OUT, MicrobatchState.LOSS, MicrobatchState.RETURNING)


@dataclass(slots=True)
class Microbatch:
    """One open microbatch of ours."""

    key: WorkKey
    round: int
    train: bool
    path: Path = ()  # empty: none is feasible now
    state: MicrobatchState = MicrobatchState.QUEUED
    packet: TensorPacket | None = None  # the boundary activation of the first forward
    sent_at_s: float = 0.0
    first_sent_s: float | None = None
    tries: int = 0  # times it was sent out
    loss: float = 0.0
