"""What we send to one peer on one lane: a queue, at most one stream, and the sends that are not yet acknowledged.

    IDLE -send-> DIALLING -welcome-> OPEN -lost, stalled, closed by the other end-> IDLE (all sends fail)

Invariant: frames leave in the order of `send`; each send ends once, by ack, refusal or loss of the stream.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import IntEnum
from time import monotonic  # finer than the loop's clock, which may stand still for a turn

from peer.framing import (
    SEQUENCE_MODULO,
    FrameKind,
    FrameStream,
    FramingError,
    Prefix,
    pack_frame,
)
from peer.quota import Average, Backoff
from protocols.errors import GossamerError
from protocols.messages import Message, OuterExchange, WeightsChunk
from protocols.run_spec import PROTOCOL_VERSION
from protocols.swarm import PeerId

DIAL_S = 6.0  # the daemon itself gives up after 5
STALL_S = 10.0  # without a byte taken or an ack, on top of what the rate explains
RATE_ASSUMED_BYTES_PER_S = 128 << 10  # before it is measured: a poor home uplink
PIPE_BYTES = 4 << 20  # what both daemons and the kernel may hold of a stream that has stopped
RATE_SAMPLE_BYTES_MIN = 64 << 10
TRANSFER_MIN_S = 1e-4
REASON_BYTES_MAX = 64
REASON = re.compile(rb"[a-z0-9-]{1,64}")
LEAVING = "leaving"
DIAL_FAILED = "dial-failed"
NO_TENSOR = memoryview(b"")
GREETING = struct.Struct(">H16s")  # protocol version, run tag


class Lane(IntEnum):
    """Streams to one peer that must not wait for each other."""

    DATA = 0  # microbatches and small messages, in order
    BULK = 1  # whole stages
    PING = 2


def lane_of(message: Message) -> Lane:
    return Lane.BULK if isinstance(message, OuterExchange | WeightsChunk) else Lane.DATA


class PeerUnreachable(GossamerError):
    """It did not take the message, as far as we know; the driver makes an event of it."""

    def __init__(self, peer: PeerId, reason: str) -> None:
        super().__init__(f"{peer} is unreachable: {reason}")
        self.peer, self.reason = peer, reason

    @property
    def is_gone(self) -> bool:
        """Nobody listens there any more; else it may only be slow or frozen."""
        return self.reason == DIAL_FAILED


class MessageRefused(GossamerError):
    """It is there, and says that the message is nonsense or that it will not listen to us."""

    def __init__(self, peer: PeerId, reason: str) -> None:
        super().__init__(f"{peer} refused: {reason}")
        self.peer, self.reason = peer, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundHost:
    """What a lane needs from its transport."""

    run_tag: bytes
    open_stream: Callable[[PeerId], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
    on_broken: Callable[[PeerId, str], None]
    count: Callable[[str, float], None]


@dataclass(slots=True)
class Link:
    """Measured between us and one peer, smoothed."""

    sent_bytes_per_s: Average = field(default_factory=Average)
    received_bytes_per_s: Average = field(default_factory=Average)
    round_trip_s: Average = field(default_factory=Average)

    def sent(self, num_bytes: int, until_ack_s: float) -> None:
        """A transfer ends with its ack, half a round trip after the last byte and half before the first is seen."""
        transfer_s = max(until_ack_s - (self.round_trip_s.value or 0.0), until_ack_s / 10, TRANSFER_MIN_S)
        self.sent_bytes_per_s.add(num_bytes / transfer_s)

    def received(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= RATE_SAMPLE_BYTES_MIN:
            self.received_bytes_per_s.add(num_bytes / max(seconds, TRANSFER_MIN_S))


@dataclass(slots=True)
class _Sent:
    done: asyncio.Future[None]
    num_bytes: int
    at_s: float
    alone: bool  # nothing else was under way: its time measures the link


class Outbound:
    """One lane to one peer."""

    def __init__(self, peer_id: PeerId, lane: Lane, host: OutboundHost, backoff: Backoff, link: Link) -> None:
        self._peer, self._lane, self._host = peer_id, lane, host
        self._backoff, self._link = backoff, link
        self._loop = asyncio.get_running_loop()
        self._queue: list[tuple[bytes, memoryview]] = []  # while dialling
        self._unacked: dict[int, _Sent] = {}
        self._sequence = 0
        self._stream: FrameStream | None = None
        self._welcome: asyncio.Future[None] | None = None
        self._dial: asyncio.Task[None] | None = None
        self._progress = (0, 0)  # bytes sent, acks seen
        self._num_acks = 0
        self._progress_s = 0.0

    @property
    def is_idle(self) -> bool:
        return self._stream is None and self._dial is None

    def send(
        self, kind: FrameKind, header: bytes = b"", tensor: memoryview = NO_TENSOR
    ) -> asyncio.Future[None]:
        """Ends when the other end has accepted the frame; fails with PeerUnreachable or MessageRefused."""
        now = self._loop.time()
        done: asyncio.Future[None] = self._loop.create_future()
        if self.is_idle and self._backoff.wait_s(now) > 0:
            done.set_exception(PeerUnreachable(self._peer, self._backoff.reason))
            return done
        self._sequence = (self._sequence + 1) % SEQUENCE_MODULO
        frame = pack_frame(
            kind, lane=self._lane, sequence=self._sequence, header=header, tensor_bytes=len(tensor)
        )
        if not self._unacked:
            self._progress_s = now
        alone = not self._unacked and self._stream is not None
        self._unacked[self._sequence] = _Sent(done, len(frame) + len(tensor), monotonic(), alone)
        if self._stream is not None:
            self._stream.write(frame, tensor)
        else:
            self._queue.append((frame, tensor))
            if self._dial is None:
                self._dial = self._loop.create_task(self._connect())
        return done

    def close(self, reason: str) -> None:
        """Hang up and fail what is under way; also the end of a broken lane."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close(pack_frame(FrameKind.CLOSE, header=reason.encode()))
        dial, self._dial = self._dial, None
        if dial is not None and dial is not asyncio.current_task():
            dial.cancel()
        self._fail(PeerUnreachable(self._peer, reason))

    def check(self, now: float) -> None:
        """Called every second: a stream that should move and does not is broken."""
        if self._stream is None or not self._unacked:
            return
        progress = (self._stream.sent_bytes, self._num_acks)
        if progress != self._progress:
            self._progress, self._progress_s = progress, now
            return
        under_way = min(PIPE_BYTES, sum(sent.num_bytes for sent in self._unacked.values()))
        rate = self._link.sent_bytes_per_s.value or RATE_ASSUMED_BYTES_PER_S
        if now - self._progress_s > STALL_S + 4 * under_way / rate:
            self.on_lost("stalled")

    # ---- opening ----

    async def _connect(self) -> None:
        """Dial, greet, wait for the welcome, send what has queued up."""
        stream = FrameStream(self)
        try:
            reader, writer = await asyncio.wait_for(self._host.open_stream(self._peer), DIAL_S)
            self._welcome = self._loop.create_future()
            stream.attach(reader, writer)
            hello = GREETING.pack(PROTOCOL_VERSION, self._host.run_tag)
            stream.write(pack_frame(FrameKind.HELLO, lane=self._lane, header=hello))
            await asyncio.wait_for(self._welcome, DIAL_S)
            if not stream.is_open:  # lost between the welcome and this turn
                raise PeerUnreachable(self._peer, "connection-lost")
        except (PeerUnreachable, MessageRefused) as error:
            self._give_up(stream, error)
        except asyncio.TimeoutError:
            self._give_up(stream, PeerUnreachable(self._peer, "dial-timeout"))
        except asyncio.CancelledError:
            stream.close()
            raise
        else:
            self._dial = None
            self._stream = stream
            self._backoff.clear()
            self._progress, self._progress_s = (0, 0), self._loop.time()
            queue, self._queue = self._queue, []
            for frame, tensor in queue:
                stream.write(frame, tensor)

    def _give_up(self, stream: FrameStream, error: PeerUnreachable | MessageRefused) -> None:
        stream.close()
        self._dial = None
        self._backoff.failed(self._loop.time(), error.reason)
        self._host.count("dial-failed", 1)
        self._fail(error)

    # ---- FrameOwner ----

    def on_head(self, prefix: Prefix, header: bytes) -> None:
        """Answers have no tensor."""
        if prefix.tensor_bytes or len(header) > REASON_BYTES_MAX:
            raise FramingError("bad-answer")
        if prefix.kind in (FrameKind.CLOSE, FrameKind.REFUSED):
            self._on_bad_news(prefix, header.decode() if REASON.fullmatch(header) else "unspecified")

    def on_frame(self, prefix: Prefix) -> None:
        match prefix.kind:
            case FrameKind.WELCOME if self._welcome is not None and not self._welcome.done():
                self._welcome.set_result(None)
            case FrameKind.ACK | FrameKind.PONG:
                self._settle(prefix.sequence, None)
            case FrameKind.REFUSED | FrameKind.CLOSE:
                pass
            case _:
                raise FramingError("bad-answer")

    def on_lost(self, reason: str) -> None:
        if self._stream is None:  # still dialling
            self._refuse_welcome(PeerUnreachable(self._peer, reason))
            return
        self._stream.close()
        self.close(reason)
        self._host.on_broken(self._peer, reason)

    # ---- ends of a send ----

    def _on_bad_news(self, prefix: Prefix, reason: str) -> None:
        if prefix.kind is FrameKind.REFUSED:
            self._settle(prefix.sequence, MessageRefused(self._peer, reason))
            return
        error = (
            PeerUnreachable(self._peer, reason) if reason == LEAVING else MessageRefused(self._peer, reason)
        )
        if self._stream is None:
            self._refuse_welcome(error)
            return
        stream, self._stream = self._stream, None
        stream.close()
        self._backoff.failed(self._loop.time(), error.reason)
        self._fail(error)

    def _refuse_welcome(self, error: PeerUnreachable | MessageRefused) -> None:
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(error)

    def _settle(self, sequence: int, error: MessageRefused | None) -> None:
        sent = self._unacked.pop(sequence, None)
        if sent is None:
            raise FramingError("ack-of-nothing")
        self._num_acks += 1
        if sent.alone and sent.num_bytes >= RATE_SAMPLE_BYTES_MIN:
            self._link.sent(sent.num_bytes, monotonic() - sent.at_s)
        if not sent.done.done():
            if error is None:
                sent.done.set_result(None)
            else:
                sent.done.set_exception(error)

    def _fail(self, error: PeerUnreachable | MessageRefused) -> None:
        self._queue.clear()
        unacked, self._unacked = self._unacked, {}
        for sent in unacked.values():
            if not sent.done.done():
                sent.done.set_exception(error)
