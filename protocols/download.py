"""What has come of a donor's snapshot so far: the receiver asks for chunk after chunk."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocols.actions import DonorState, Send
from protocols.messages import TensorPacket, WeightsChunk, WeightsKind, WeightsRequest
from protocols.swarm import PeerId, PeerInfo

CHUNK_LIMIT_S = 20.0  # a donor's silence


@dataclass(slots=True)
class Download:
    """What has come from one donor."""

    donor: PeerInfo
    kind: WeightsKind
    stage: int
    first: WeightsChunk | None = None
    packets: list[TensorPacket] = field(default_factory=list[TensorPacket])

    @property
    def is_whole(self) -> bool:
        return self.first is not None and len(self.packets) == self.first.count

    def expects(self, chunk: WeightsChunk) -> bool:
        """It is the next one; False: a late answer to an older question."""
        return chunk.index == len(self.packets) and (
            self.first is None or chunk.snapshot == self.first.snapshot
        )

    def add(self, chunk: WeightsChunk) -> None:
        assert chunk.packet is not None, "a refusal is no part of a state"
        self.first = self.first or chunk
        self.packets.append(chunk.packet)

    def request(self) -> Send:
        snapshot = self.first.snapshot if self.first is not None else ""
        wanted = WeightsRequest(kind=self.kind, stage=self.stage, snapshot=snapshot, index=len(self.packets))
        return Send(to=self.donor.peer, message=wanted)

    def state(self) -> DonorState:
        assert self.first is not None, "a state without a chunk"
        return DonorState(
            donor=self.donor.peer,
            stage=self.stage,
            round=self.first.round,
            outer_step=self.first.outer_step,
            sha256=self.first.sha256,
            grad_norm=self.donor.grad_norm,
            packets=tuple(self.packets),
        )


def newest_donor(replicas: Sequence[PeerInfo], receiver: PeerId) -> PeerInfo:
    """One of those that are furthest, give or take a round: receivers spread over equal ones."""
    newest = max(info.round for info in replicas)
    equal = [info for info in replicas if info.round >= newest - 1]
    return equal[zlib.crc32(receiver.encode()) % len(equal)]
