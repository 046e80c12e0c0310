"""One lane between two peers over a socket pair: both ends real, no daemon between them."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from dataclasses import dataclass, field

from peer.framing import PREFIX, FrameKind, pack_frame
from peer.inbound import Inbound, InboundHost
from peer.outbound import GREETING, Lane, Link, Outbound, OutboundHost
from peer.quota import Backoff, Bucket, Budget, Offences
from protocols.admission import WireLimits
from protocols.messages import Message, TensorPacket, WeightsChunk, WeightsKind
from protocols.run_spec import Codec, preset
from protocols.wire import encode, run_tag

SPEC = preset("pico")
LIMITS = WireLimits.of(SPEC)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def socket_pair() -> tuple[Streams, Streams]:
    near, far = socket.socketpair()
    return await asyncio.open_unix_connection(sock=near), await asyncio.open_unix_connection(sock=far)


@dataclass
class Told:
    """What the callbacks said."""

    heard: list[tuple[str, Message]] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def deliver(self, sender: str, message: Message) -> None:
        self.heard.append((sender, message))

    def on_broken(self, peer_id: str, reason: str) -> None:
        self.broken.append((peer_id, reason))

    def count(self, name: str, value: float) -> None:
        self.counts[name] += value


class Sender:
    """A real Outbound to `b1`; the test plays the receiver through `reader` and `writer`."""

    def __init__(self) -> None:
        self.told = Told()
        self.backoff = Backoff()
        host = OutboundHost(
            run_tag=run_tag(SPEC.run_id),
            open_stream=self._open,
            on_broken=self.told.on_broken,
            count=self.told.count,
        )
        self.lane = Outbound("b1", Lane.DATA, host, self.backoff, Link())
        self.num_dials = 0
        self.dialled = asyncio.Event()

    async def _open(self, to: str) -> Streams:
        self.num_dials += 1
        near, (self.reader, self.writer) = await socket_pair()
        self.dialled.set()
        return near

    async def hello(self) -> bytes:
        await self.dialled.wait()
        return await self.reader.readexactly(PREFIX.size + GREETING.size)

    def answer(self, kind: FrameKind, sequence: int = 0, header: bytes = b"") -> None:
        self.writer.write(pack_frame(kind, sequence=sequence, header=header))


class Receiver:
    """A real Inbound at `b1` from `sender`; the test plays the sender through `reader` and `writer`."""

    def __init__(self, told: Told, budget: Budget, sender: str = "a1", lane: Lane = Lane.BULK) -> None:
        host = InboundHost(
            me="b1",
            limits=LIMITS,
            budgets={Lane.DATA: budget, Lane.BULK: budget},
            deliver=told.deliver,
            on_broken=told.on_broken,
            count=told.count,
        )
        loop = asyncio.get_running_loop()
        bucket = Bucket(rate=1e6, burst=1e6, now=loop.time())
        self.lane = Inbound(sender, lane, host, bucket=bucket, offences=Offences(), link=Link())

    async def begin(self) -> None:
        near, (self.reader, self.writer) = await socket_pair()
        self.lane.begin(*near)
        assert (await self.answer())[0] is FrameKind.WELCOME

    def say(self, message: Message, sequence: int = 1, upto: int | None = None) -> None:
        """`upto`: so many bytes of the tensor, and no more."""
        header, data = encode(message, run_id=SPEC.run_id)
        self.writer.write(
            pack_frame(FrameKind.MESSAGE, sequence=sequence, header=header, tensor_bytes=len(data))
        )
        self.writer.write(bytes(data[:upto]))

    async def answer(self) -> tuple[FrameKind, int, bytes]:
        prefix = PREFIX.unpack(await asyncio.wait_for(self.reader.readexactly(PREFIX.size), 10))
        return FrameKind(prefix[1]), prefix[3], await self.reader.readexactly(prefix[4])


def chunk(num_bytes: int, fill: int = 7) -> WeightsChunk:
    packet = TensorPacket(dtype="uint8", shape=(num_bytes,), codec=Codec.RAW, data=bytes([fill]) * num_bytes)
    return WeightsChunk(
        kind=WeightsKind.FULL,
        stage=1,
        snapshot="s",
        index=0,
        count=1,
        sha256="",
        round=1,
        outer_step=0,
        packet=packet,
    )
