"""Frames out of bytes, however the bytes are cut; and bytes that are no frames."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.framing import (
    PIECE_BYTES,
    PREFIX,
    SCRATCH_BYTES,
    FrameKind,
    FrameStream,
    FramingError,
    Prefix,
    pack_frame,
    unpack_prefix,
)
from protocols.wire import HEADER_BYTES_MAX

Frame = tuple[bytes, bytes]


@dataclass
class Owner:
    """Takes every tensor, or throws it away, or makes the sender wait."""

    takes: bool = True
    holds: bool = False
    stream: FrameStream | None = None
    frames: list[Frame] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    header: bytes = b""
    buffer: bytearray = field(default_factory=bytearray)

    def on_head(self, prefix: Prefix, header: bytes) -> bytearray | None:
        self.header, self.buffer = header, bytearray()
        if not self.takes or not prefix.tensor_bytes:
            return None
        self.buffer = bytearray(prefix.tensor_bytes)
        if self.holds and self.stream is not None:
            self.stream.hold()
            return None
        return self.buffer

    def on_frame(self, prefix: Prefix) -> None:
        self.frames.append((self.header, bytes(self.buffer)))

    def on_lost(self, reason: str) -> None:
        self.lost.append(reason)


class Pipe:
    """The end of a connection that never sends by itself; keeps what is written, closes when told."""

    def __init__(self, stream: FrameStream) -> None:
        self.stream, self.written, self.open, self.reading = stream, bytearray(), True, True
        stream.attach(None, self)  # type: ignore[arg-type]

    @property
    def transport(self) -> Pipe:
        return self

    def set_protocol(self, protocol: object) -> None:
        assert protocol is self.stream

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return not self.open

    def abort(self) -> None:
        self.open = False

    close = abort

    def arrive(self, data: bytes) -> int:
        """Like a socket: as much as the stream asks for at once, while it reads; the number of bytes taken."""
        taken = 0
        while taken < len(data) and self.reading and self.open:
            buffer = self.stream.get_buffer(-1)
            piece = data[taken : taken + len(buffer)]
            buffer[: len(piece)] = piece
            self.stream.buffer_updated(len(piece))
            taken += len(piece)
        return taken


def connected(**traits: bool) -> tuple[Owner, Pipe]:
    owner = Owner(**traits)
    owner.stream = FrameStream(owner)
    return owner, Pipe(owner.stream)


def message(header: bytes, tensor: bytes) -> bytes:
    return pack_frame(FrameKind.MESSAGE, header=header, tensor_bytes=len(tensor)) + tensor


headers = st.binary(max_size=300) | st.integers(0, 3 * SCRATCH_BYTES).map(bytes)
tensors = st.binary(max_size=300) | st.integers(0, 5 * SCRATCH_BYTES).map(lambda n: b"\x07" * n)
frame_lists = st.lists(st.tuples(headers, tensors), min_size=1, max_size=6)
cuts = st.lists(st.integers(1, 4 * SCRATCH_BYTES), min_size=1, max_size=20)


def pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` cut by the sizes in turn."""
    cut, start, turn = [], 0, 0
    while start < len(data):
        size = sizes[turn % len(sizes)]
        cut.append(data[start : start + size])
        start, turn = start + size, turn + 1
    return cut


@given(frame_lists, cuts)
def test_frames_come_out_whole_however_they_were_cut(frames: list[Frame], sizes: list[int]):
    """The daemon hands over 32 KiB here and 7 bytes there; frames begin and end where they like."""
    owner, pipe = connected()
    for piece in pieces(b"".join(message(*frame) for frame in frames), sizes):
        assert pipe.arrive(piece) == len(piece)
    assert owner.frames == frames
    assert not owner.stream.mid_frame


@given(frame_lists, cuts)
def test_tensors_nobody_wants_are_skipped_and_the_next_frame_is_found(frames: list[Frame], sizes: list[int]):
    """A refused message costs its own bytes; the stream goes on behind it."""
    owner, pipe = connected(takes=False)
    for piece in pieces(b"".join(message(*frame) for frame in frames), sizes):
        pipe.arrive(piece)
    assert owner.frames == [(header, b"") for header, _ in frames]


@given(frame_lists, cuts)
def test_a_held_stream_loses_nothing(frames: list[Frame], sizes: list[int]):
    """No room for a tensor: reading stops, and goes on into the buffer that is given later."""
    owner, pipe = connected(holds=True)
    for piece in pieces(b"".join(message(*frame) for frame in frames), sizes):
        left = piece
        while left:
            taken = pipe.arrive(left)
            left = left[taken:]
            while not pipe.reading:
                owner.stream.release(owner.buffer)
    assert owner.frames == frames


async def reasons_for(data: bytes) -> list[str]:
    """Why the stream was given up, when `data` and a long silence of zeros come in."""
    owner, pipe = connected()
    pipe.arrive(data + bytes(HEADER_BYTES_MAX))
    assert not owner.frames
    assert not pipe.open
    return owner.lost


@given(st.binary(max_size=400))
def test_garbage_hangs_up_once_and_says_why(garbage: bytes):
    """Another program on our port, or a sender that lost count: one reason, and the connection is closed."""
    assert asyncio.run(reasons_for(garbage)) in (
        ["bad-magic"],
        ["header-too-long"],
        ["unknown-frame"],
        ["bad-crc"],
    )


@given(st.integers(0, PREFIX.size + 40 - 1), st.integers(1, 255))
def test_any_damage_to_prefix_or_header_is_seen(where: int, flip: int):
    """One byte of a frame is wrong: its tensor must not be taken for whatever the prefix says now."""
    frame = bytearray(pack_frame(FrameKind.MESSAGE, sequence=7, header=b"h" * 40, tensor_bytes=3))
    frame[where] ^= flip
    assert len(asyncio.run(reasons_for(bytes(frame)))) == 1


def test_a_huge_header_is_refused_before_it_is_read():
    """8 GiB announced in 24 bytes: nothing is allocated."""
    prefix = PREFIX.pack(0x6753, FrameKind.MESSAGE, 0, 1, HEADER_BYTES_MAX + 1, 0, 0)
    with pytest.raises(FramingError, match="header-too-long"):
        unpack_prefix(prefix)


def test_a_large_tensor_leaves_in_pieces_only_while_the_other_end_reads():
    """A peer that reads nothing costs one piece in the transport, not a copy of the tensor."""
    _, pipe = connected()
    tensor = memoryview(bytes(3 * PIECE_BYTES))
    pipe.stream.pause_writing()
    pipe.stream.write(pack_frame(FrameKind.MESSAGE, tensor_bytes=len(tensor)), tensor)
    assert not pipe.written
    pipe.stream.resume_writing()
    assert len(pipe.written) == PREFIX.size + len(tensor) == pipe.stream.sent_bytes
    assert pipe.stream.num_unsent == 0


def test_the_end_of_the_connection_is_told_once_and_not_after_close():
    owner, pipe = connected()
    pipe.stream.eof_received()
    pipe.stream.connection_lost(None)
    assert owner.lost == ["connection-closed"]
    owner, pipe = connected()
    pipe.stream.close()
    pipe.stream.connection_lost(None)
    assert owner.lost == []


def test_two_streams_over_a_real_socket_with_each_event_loop():
    """Taking a connection over from its StreamReader works alike in asyncio and uvloop."""
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")
    for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        loop = new_loop()
        try:
            assert loop.run_until_complete(over_a_socket()) == [(b"head", b"\x05" * 700_000)]
        finally:
            loop.close()


async def over_a_socket() -> list[Frame]:
    ends = socket.socketpair()
    streams = []
    owners = [Owner(), Owner()]
    for end, owner in zip(ends, owners, strict=True):
        stream = FrameStream(owner)
        stream.attach(*await asyncio.open_unix_connection(sock=end))
        streams.append(stream)
    tensor = memoryview(b"\x05" * 700_000)
    streams[0].write(pack_frame(FrameKind.MESSAGE, header=b"head", tensor_bytes=len(tensor)), tensor)
    for _ in range(1000):
        if owners[1].frames:
            break
        await asyncio.sleep(0.01)
    for stream in streams:
        stream.close()
    return owners[1].frames
