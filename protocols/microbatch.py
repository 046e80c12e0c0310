"""An originator's record of one open microbatch, and its states (the transitions are at the head of `originator`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protocols.messages import Path, TensorPacket, WorkKey

VALIDATION_BASE = 1 << 48  # counters from here on are validation: base + round x BATCHES + batch
VALIDATION_BATCHES = 1024


def validation_batch(counter: int) -> int:
    """Which of the fixed validation batches a validation counter names."""
    return (counter - VALIDATION_BASE) % VALIDATION_BATCHES


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
