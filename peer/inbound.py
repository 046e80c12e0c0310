"""What one peer sends us on one lane: check each message before and after its tensor, deliver it, answer.

Invariant: a message reaches `on_message` only whole and checked; its sender gets exactly one answer, ack or refusal.
Whatever comes, the cost is the sender's: its stream is read slower, or closed, or the peer ignored for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from peer.framing import FrameKind, FrameStream, FramingError, Prefix, pack_frame
from peer.outbound import Lane, Link, lane_of
from peer.quota import Bucket, Budget, Offences
from protocols.admission import WireLimits, check_data, check_message
from protocols.errors import RemoteProtocolError
from protocols.messages import Message
from protocols.swarm import PeerId
from protocols.wire import Partial, decode, require

TRICKLE_S = 10.0  # a sender in the middle of a frame must move
TRICKLE_BYTES_MIN = 64 << 10  # so much in that time, or finish
UNREAD_ANSWERS_MAX = 1024
BYTES_PER_TOKEN = 256 << 10  # one token of a sender's bucket: a message, or so much of a tensor
THREAD_BYTES = 4 << 20  # tensors beyond are checked in a thread: 40 ms of loop for 100 MB otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class InboundHost:
    """What an inbound lane needs from its transport."""

    me: PeerId
    limits: WireLimits
    budgets: dict[Lane, Budget]
    deliver: Callable[[PeerId, Message], None]
    on_broken: Callable[[PeerId, str], None]
    count: Callable[[str, float], None]


@dataclass(slots=True)
class _Arriving:
    """The message whose tensor is being read."""

    message: Partial | None = None  # None: refused
    reason: str = ""
    data: bytearray = field(default_factory=bytearray)
    reserved: int = 0
    since_s: float = 0.0  # its buffer is there


class Inbound:
    """One lane from one peer. `closed` is done when it is over."""

    def __init__(
        self, sender: PeerId, lane: Lane, host: InboundHost, *, bucket: Bucket, offences: Offences, link: Link
    ) -> None:
        self.sender, self.lane = sender, lane
        self._host, self._bucket, self._offences, self._link = host, bucket, offences, link
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._arriving = _Arriving()
        self._forget_wait: Callable[[], None] | None = None
        self._moved = (0, self._loop.time())  # bytes when last looked at with progress, and when
        self._stream = FrameStream(self)

    def begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the greeted stream over and welcome its dialler."""
        self._stream.attach(reader, writer)
        self._stream.write(pack_frame(FrameKind.WELCOME, lane=self.lane))

    def close(self, reason: str) -> None:
        self._stream.close(pack_frame(FrameKind.CLOSE, header=reason.encode()))
        self._over()

    def check(self, now: float) -> None:
        """Called every second: who starts a frame must bring it."""
        received, since = self._moved
        arrived = self._stream.received_bytes
        if not self._stream.mid_frame or arrived - received >= TRICKLE_BYTES_MIN:
            self._moved = (arrived, now)
        elif now - since > TRICKLE_S:
            self._host.count("refused.too-slow", 1)
            self.close("too-slow")

    # ---- FrameOwner ----

    def on_head(self, prefix: Prefix, header: bytes) -> bytearray | None:
        self._arriving = _Arriving()
        if prefix.kind is FrameKind.MESSAGE:
            return self._on_message_head(prefix, header)
        if prefix.tensor_bytes or prefix.kind not in (FrameKind.PING, FrameKind.CLOSE):
            raise FramingError("unexpected-frame")
        return None

    def on_frame(self, prefix: Prefix) -> None:
        if prefix.kind is FrameKind.CLOSE:
            self._stream.close()
            self._over()
            return
        if self._stream.num_unsent > UNREAD_ANSWERS_MAX:
            raise FramingError("answers-unread")
        if prefix.kind is FrameKind.PING:
            self._stream.write(pack_frame(FrameKind.PONG, sequence=prefix.sequence))
        elif self._arriving.message is not None and prefix.tensor_bytes > THREAD_BYTES:
            self._finish_in_thread(prefix, self._arriving.message)
            return
        else:
            self._finish(prefix, self._arriving)
        self._slow_down(prefix)

    def on_lost(self, reason: str) -> None:
        self._over()
        if reason.startswith("connection-"):
            self._host.on_broken(self.sender, reason)
        else:
            self._host.count(f"refused.{reason}", 1)
            self._offences.add(self._loop.time())

    # ---- a message ----

    def _on_message_head(self, prefix: Prefix, header: bytes) -> bytearray | None:
        """All that can be known before the tensor. A refused message's tensor is thrown away as it comes."""
        limits = self._host.limits
        if prefix.tensor_bytes > limits.tensor_bytes_max:
            raise FramingError("tensor-too-long")
        try:
            announced = decode(header, run_id=limits.run_id)
            require(announced.tensor_bytes == prefix.tensor_bytes, "wrong-size")
            require(lane_of(announced.message) is self.lane, "wrong-lane")
            check_message(
                announced.message, announced.tensor_bytes, sender=self.sender, me=self._host.me, limits=limits
            )
        except RemoteProtocolError as error:
            self._arriving.reason = error.reason
            return None
        self._arriving.message = announced
        if prefix.tensor_bytes == 0:
            return None
        return self._buffer(prefix.tensor_bytes)

    def _buffer(self, num_bytes: int) -> bytearray | None:
        budget = self._host.budgets[self.lane]
        if budget.take(num_bytes):
            return self._take_buffer(num_bytes)
        self._stream.hold()
        self._forget_wait = budget.wait(num_bytes, partial(self._on_granted, num_bytes))
        return None

    def _take_buffer(self, num_bytes: int) -> bytearray:
        self._arriving.reserved = num_bytes
        self._arriving.data = bytearray(num_bytes)
        self._arriving.since_s = monotonic()
        return self._arriving.data

    def _on_granted(self, num_bytes: int) -> None:
        """Called while another lane is being served: go on in a turn of our own."""
        self._forget_wait = None
        self._loop.call_soon(self._go_on, num_bytes)

    def _go_on(self, num_bytes: int) -> None:
        if self.closed.done():
            self._host.budgets[self.lane].give_back(num_bytes)
        else:
            self._stream.release(self._take_buffer(num_bytes))

    def _finish(self, prefix: Prefix, arriving: _Arriving) -> None:
        """Check the bytes, deliver, answer."""
        self._link.received(prefix.tensor_bytes, monotonic() - arriving.since_s)
        try:
            if arriving.message is None:
                raise RemoteProtocolError(arriving.reason)
            message = arriving.message.finish(arriving.data)
            check_data(message, self._host.limits)
        except RemoteProtocolError as error:
            self._refuse(prefix, error.reason)
        else:
            self._accept(prefix, message)

    def _finish_in_thread(self, prefix: Prefix, announced: Partial) -> None:
        """The same for a tensor whose check would stop the loop; the stream waits meanwhile."""
        self._stream.hold()
        message = announced.finish(self._arriving.data)
        checking = self._loop.run_in_executor(None, check_data, message, self._host.limits)
        checking.add_done_callback(lambda done: self._on_checked(prefix, message, done.exception()))

    def _on_checked(self, prefix: Prefix, message: Message, error: BaseException | None) -> None:
        if self.closed.done():
            return
        if isinstance(error, RemoteProtocolError):
            self._refuse(prefix, error.reason)
        elif error is not None:
            raise error  # a bug: the loop's exception handler reports it
        else:
            self._accept(prefix, message)
        if not self.closed.done() and not self._slow_down(prefix):
            self._stream.release()

    def _accept(self, prefix: Prefix, message: Message) -> None:
        self._free()
        self._host.count(
            f"received-bytes.{type(message).__name__}", prefix.header_bytes + prefix.tensor_bytes
        )
        self._stream.write(pack_frame(FrameKind.ACK, sequence=prefix.sequence))
        self._host.deliver(self.sender, message)

    def _refuse(self, prefix: Prefix, reason: str) -> None:
        self._free()
        self._host.count(f"refused.{reason}", 1)
        self._stream.write(pack_frame(FrameKind.REFUSED, sequence=prefix.sequence, header=reason.encode()))
        if self._offences.add(self._loop.time()):
            self._host.count("ignored-peers", 1)
            self.close("too-many-refusals")

    # ---- costs ----

    def _slow_down(self, prefix: Prefix) -> bool:
        """A sender in debt waits: what it sent is kept, what comes next stays in its own buffers. True: it does."""
        if self.closed.done():
            return False
        wait_s = self._bucket.charge(1 + prefix.tensor_bytes / BYTES_PER_TOKEN, self._loop.time())
        if wait_s > 0:
            self._host.count("slowed-seconds", wait_s)
            self._stream.hold()
            self._loop.call_later(wait_s, self._stream.release)
        return wait_s > 0

    def _free(self) -> None:
        if self._arriving.reserved:
            self._host.budgets[self.lane].give_back(self._arriving.reserved)
        self._arriving = _Arriving()

    def _over(self) -> None:
        if self._forget_wait is not None:
            self._forget_wait()
            self._forget_wait = None
        self._free()
        if not self.closed.done():
            self.closed.set_result(None)
