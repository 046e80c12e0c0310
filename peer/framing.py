"""Frames on a byte stream: cut them out of what arrives, and write them without copying tensors.

A frame is a fixed prefix, a header and tensor bytes. `FrameStream` takes over a connection's transport and reads
straight into the tensor's buffer: the loop is woken, but nothing is copied and no task is switched. Invariant: no
byte of a tensor is accepted before the owner has seen the header and given a buffer for exactly the announced size.

The prefix carries a CRC of itself and the header, which tells a torn stream from a foreign one. Tensor bytes have no
checksum of their own: the channel is authenticated encryption, and 0.13 ms for 256 KiB at each end is 10 % of a hop.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, cast

from protocols.errors import RemoteProtocolError
from protocols.wire import HEADER_BYTES_MAX

MAGIC = 0x6753
PREFIX = struct.Struct(">HBBIIQI")  # magic, kind, lane, sequence, header bytes, tensor bytes, CRC-32
_BEFORE_CRC = PREFIX.size - 4
SEQUENCE_MODULO = 1 << 32
SCRATCH_BYTES = 16 << 10
JOIN_BYTES = (
    64 << 10
)  # a first write carries prefix, header and so much of the tensor: one wake-up less per hop
PIECE_BYTES = 512 << 10
LINGER_S = 2.0  # for a farewell to leave


class FrameKind(IntEnum):
    """What a frame is for."""

    HELLO = 1  # dialer's first: lane, header = greeting
    WELCOME = 2  # the answer; any other means no
    MESSAGE = 3
    ACK = 4  # in the inbox
    REFUSED = 5  # header = reason
    CLOSE = 6  # I hang up on purpose; header = reason
    PING = 7
    PONG = 8


class FramingError(RemoteProtocolError):
    """The stream is no longer cut into frames, or its sender breaks the rules of it: hang up."""


@dataclass(frozen=True, slots=True)
class Prefix:
    kind: FrameKind
    lane: int
    sequence: int
    header_bytes: int
    tensor_bytes: int


def pack_frame(
    kind: FrameKind, *, sequence: int = 0, header: bytes = b"", tensor_bytes: int = 0, lane: int = 0
) -> bytes:
    """Prefix and header; the tensor's bytes follow on the stream."""
    head = PREFIX.pack(MAGIC, kind, lane, sequence, len(header), tensor_bytes, 0)[:_BEFORE_CRC]
    return b"".join((head, zlib.crc32(header, zlib.crc32(head)).to_bytes(4, "big"), header))


def unpack_prefix(data: bytes | bytearray | memoryview) -> Prefix:
    """Reads the lengths; caps the header's. The CRC needs the header: `check_crc`."""
    magic, kind, lane, sequence, header_bytes, tensor_bytes, _ = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise FramingError("bad-magic")
    if header_bytes > HEADER_BYTES_MAX:
        raise FramingError("header-too-long")
    try:
        return Prefix(FrameKind(kind), lane, sequence, header_bytes, tensor_bytes)
    except ValueError:
        raise FramingError("unknown-frame") from None


def check_crc(frame: bytes | bytearray | memoryview) -> None:
    """`frame` is prefix and header."""
    view = memoryview(frame)
    stated = int.from_bytes(view[_BEFORE_CRC : PREFIX.size], "big")
    if zlib.crc32(view[PREFIX.size :], zlib.crc32(view[:_BEFORE_CRC])) != stated:
        raise FramingError("bad-crc")


class FrameOwner(Protocol):
    """Whom a FrameStream serves. All are called from the loop, none may block; FramingError from any hangs up."""

    def on_head(self, prefix: Prefix, header: bytes) -> bytearray | None:
        """A buffer of `prefix.tensor_bytes`; None throws them away, unless `hold` is called and `release` brings it."""
        ...

    def on_frame(self, prefix: Prefix) -> None:
        """The tensor is complete (or there was none)."""
        ...

    def on_lost(self, reason: str) -> None:
        """The connection is gone; called once, never after `close`."""
        ...


class FrameStream(asyncio.BufferedProtocol):
    """One connection, both directions."""

    def __init__(self, owner: FrameOwner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._openers: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._have = 0  # bytes in scratch, not yet cut
        self._prefix: Prefix | None = None  # of the frame whose tensor is being read
        self._target: memoryview | None = None  # what the tensor is read into; None: thrown away
        self._left = 0  # tensor bytes to come
        self._held = False
        self._paused = False  # the other direction: the transport takes no more
        self._pieces: deque[bytes | memoryview] = deque()
        self.received_bytes = 0
        self.sent_bytes = 0  # given to the transport: it moves, hence the other end reads

    # ---- life ----

    def attach(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the connection over from those that opened it; nothing may be under way to us yet."""
        self._openers = (reader, writer)  # kept: the writer closes the connection when it is collected
        self._transport = transport = cast(asyncio.Transport, writer.transport)
        transport.pause_reading()
        transport.set_protocol(self)
        transport.resume_reading()

    def close(self, farewell: bytes = b"") -> None:
        """Hang up; the owner hears no more. A farewell is sent if no frame is half written."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        if farewell and not self._pieces and not transport.is_closing():
            transport.write(farewell)
            transport.close()
            asyncio.get_running_loop().call_later(
                LINGER_S, transport.abort
            )  # a stuck peer would keep it for ever
        else:
            transport.abort()
        self._pieces.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("connection-lost")

    def eof_received(self) -> None:
        self._lose("connection-closed")

    def _lose(self, reason: str) -> None:
        if self._transport is not None:
            self.close()
            self._owner.on_lost(reason)

    # ---- in ----

    def hold(self) -> None:
        """Stop reading: the sender waits. Frames already cut are not taken back."""
        self._held = True
        if self._transport is not None:
            self._transport.pause_reading()

    def release(self, target: bytearray | None = None) -> None:
        """Go on after `hold`; `target` if `on_head` could not give it yet. Not from within an owner's method."""
        if self._held and self._transport is not None:
            self._held = False
            if target is not None:
                self._target = memoryview(target)
            self._transport.resume_reading()
            self._guarded_cut()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._left and self._target is not None:
            return self._target[len(self._target) - self._left :]
        return self._scratch[self._have :]

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        if self._left and self._target is not None:
            self._left -= nbytes
        else:
            self._have += nbytes
        self._guarded_cut()

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    @property
    def mid_frame(self) -> bool:
        """The sender owes us bytes."""
        return not self._held and (self._left > 0 or self._have > 0)

    def _guarded_cut(self) -> None:
        try:
            self._cut()
        except FramingError as error:
            if self._transport is not None:
                self.close(pack_frame(FrameKind.CLOSE, header=error.reason.encode()))
                self._owner.on_lost(error.reason)

    def _cut(self) -> None:
        """Hand over whatever is complete, until more bytes are needed or the owner holds."""
        while self._transport is not None and not self._held:
            if self._prefix is None and not self._cut_head():
                return
            if self._held:
                return
            if self._left and not self._move_tensor():
                return
            prefix, self._prefix, self._target = self._prefix, None, None
            assert prefix is not None
            self._owner.on_frame(prefix)

    def _cut_head(self) -> bool:
        if self._have < PREFIX.size:
            return False
        prefix = unpack_prefix(self._scratch)
        size = PREFIX.size + prefix.header_bytes
        if size > len(self._scratch):
            self._resize_scratch(size)
        if self._have < size:
            return False
        frame = bytes(self._scratch[:size])
        check_crc(frame)
        self._drop_scratch(size)
        self._prefix, self._left = prefix, prefix.tensor_bytes
        target = self._owner.on_head(prefix, frame[PREFIX.size :])
        self._target = memoryview(target) if target is not None else None
        return self._transport is not None

    def _move_tensor(self) -> bool:
        """What came into scratch behind the header; True when the tensor is complete."""
        count = min(self._have, self._left)
        if count:
            if self._target is not None:
                start = len(self._target) - self._left
                self._target[start : start + count] = self._scratch[:count]
            self._left -= count
            self._drop_scratch(count)
        return self._left == 0

    def _drop_scratch(self, count: int) -> None:
        rest = self._have - count
        if len(self._scratch) > SCRATCH_BYTES and rest <= SCRATCH_BYTES:
            kept = bytes(self._scratch[count : self._have])
            self._resize_scratch(SCRATCH_BYTES)
            self._scratch[:rest] = kept
        elif rest:
            self._scratch[:rest] = bytes(self._scratch[count : self._have])
        self._have = rest

    def _resize_scratch(self, size: int) -> None:
        old = self._scratch
        self._scratch = memoryview(bytearray(size))
        kept = min(self._have, size)
        self._scratch[:kept] = old[:kept]

    # ---- out ----

    def write(self, frame: bytes, tensor: memoryview | None = None) -> None:
        """Queue a frame; `frame` is from `pack_frame`, `tensor` must never change: it is sent from where it lies."""
        if tensor is None or len(tensor) == 0:
            self._pieces.append(frame)
        else:
            self._pieces.append(b"".join((frame, tensor[:JOIN_BYTES])))
            rest = tensor[JOIN_BYTES:]
            self._pieces.extend(
                rest[start : start + PIECE_BYTES] for start in range(0, len(rest), PIECE_BYTES)
            )
        self._pump()

    @property
    def num_unsent(self) -> int:
        """Pieces that the other end does not take."""
        return len(self._pieces)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pump()

    def _pump(self) -> None:
        while self._pieces and not self._paused and self._transport is not None:
            piece = self._pieces.popleft()
            self.sent_bytes += len(piece)
            self._transport.write(piece)
