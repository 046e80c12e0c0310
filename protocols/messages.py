"""Every sentence that peers say to each other, as frozen dataclasses. `protocols.wire` turns them into bytes.

All work is named by a WorkKey (microbatch and attempt). A path is the hops of an attempt, the originator first;
`hop` in a message is the receiver's index in that path, and `hop == len(path)` is the return to the originator.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from protocols.run_spec import Codec
from protocols.swarm import PeerId


@dataclass(frozen=True, slots=True, order=True)
class WorkKey:
    """One attempt at one microbatch."""

    originator: PeerId
    counter: int
    attempt: int

    @property
    def microbatch(self) -> tuple[PeerId, int]:
        return (self.originator, self.counter)

    def __str__(self) -> str:
        return f"m:{self.originator[-6:]}/{self.counter}#{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPacket:
    """An encoded tensor. `data` holds the codec's bytes in C order; `dtype` and `shape` are the decoded tensor's."""

    dtype: str
    shape: tuple[int, ...]
    codec: Codec
    data: bytes | bytearray | memoryview

    @property
    def num_bytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Hop:
    stage: int
    peer: PeerId


Path: TypeAlias = "tuple[Hop, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """An originator tells a relay which attempts of its round to expect; empty: none, go on without me."""

    round: int
    keys: tuple[WorkKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryActivation:
    """[B, L, D] across a stage border, forward. `train` False: validation, no backward will follow."""

    key: WorkKey
    round: int
    path: Path
    hop: int
    train: bool
    packet: TensorPacket


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryGradient:
    """Its gradient, back along the same path: `hop` counts down to 0."""

    key: WorkKey
    hop: int
    packet: TensorPacket


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The originator gave these attempts up: free their slots."""

    keys: tuple[WorkKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Undeliverable:
    """A relay could not hand the attempt on to `unreachable` (or could not compute it: its own id)."""

    key: WorkKey
    unreachable: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOffer:
    """I stand at this outer step of this stage and would average with you; so much is behind what I would send."""

    stage: int
    outer_step: int
    pair_round: int
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterExchange:
    """My half of the averaging, one flat fp32 tensor: u = beta Delta + gamma phi (or the proposal y) of the fragment
    whose turn it is; in the second pair round phi."""

    stage: int
    outer_step: int
    pair_round: int
    schema: str  # hash of parameter names and shapes
    packet: TensorPacket


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterAccept:
    """I hold your half, checked, and will apply it once you say the same. `ok` False: not with me, not now."""

    stage: int
    outer_step: int
    pair_round: int
    ok: bool


class WeightsKind(str, Enum):
    """How much of a replica is asked for."""

    FULL = "full"  # weights, slow weights, outer momentum, optimizer state: a catch-up
    WEIGHTS = "weights"  # the weights alone: to rebuild a neighbour, or to keep as a shadow
    SHADOW = "shadow"  # the weights of another stage that the donor keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRequest:
    """Send chunk `index` of a snapshot; an empty `snapshot` asks for a new one."""

    kind: WeightsKind
    stage: int
    snapshot: str
    index: int

    def refusal(self) -> WeightsChunk:
        return WeightsChunk(
            kind=self.kind, stage=self.stage, snapshot=self.snapshot, index=self.index, count=0, sha256="",
            round=0, outer_step=0, packet=None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsChunk:
    """One slice of a snapshot's bytes. `count` 0: the donor cannot serve it."""

    kind: WeightsKind
    stage: int
    snapshot: str
    index: int
    count: int
    sha256: str  # of the whole snapshot
    round: int
    outer_step: int
    packet: TensorPacket | None


Message: TypeAlias = (
    RoundPlan
    | BoundaryActivation
    | BoundaryGradient
    | Release
    | Undeliverable
    | OuterOffer
    | OuterExchange
    | OuterAccept
    | WeightsRequest
    | WeightsChunk
)
