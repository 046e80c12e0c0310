"""Messages to and from other peers over libp2p streams: the only module that moves bytes between machines.

One long-lived stream per (receiver, lane); opening one for each tensor would cost more than the tensor. What is sent
arrives whole and checked, or its sender learns why not. A peer that dies is noticed when its streams break, within a
fraction of a second and with nothing under way; one that freezes, by `ping` or by the stall of a send. Invariant: a
peer's misbehaviour, crash or silence ends in an exception of `send`, in `on_unreachable` once, and in nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2 as _p2pd_pb2

from peer.framing import PREFIX, FrameKind, check_crc, pack_frame, unpack_prefix
from peer.inbound import BYTES_PER_TOKEN, Inbound, InboundHost
from peer.outbound import (
    DIAL_FAILED,
    DIAL_S,
    GREETING,
    LEAVING,
    Lane,
    Link,
    MessageRefused,
    Outbound,
    OutboundHost,
    PeerUnreachable,
    lane_of,
)
from peer.quota import Backoff, Bucket, Budget, Offences
from protocols.admission import WireLimits
from protocols.errors import RemoteProtocolError
from protocols.events import AccessMeasured
from protocols.messages import Message
from protocols.run_spec import PROTOCOL_VERSION, RunSpec
from protocols.swarm import PeerId
from protocols.wire import encode, require, run_tag

__all__ = ["MessageRefused", "PeerUnreachable", "Transport"]

p2pd_pb2: Any = _p2pd_pb2  # its generated code has no types

CHECK_EVERY_S = 1.0
CLOSE_MAX_S = 1.0  # our own daemon answers in milliseconds, or is about to be ended
INBOUND_MAX = 768  # open lanes over all senders; each is a file descriptor
REMOTES_MAX = 4096  # peers remembered
GREETINGS_MAX = 2 * len(Lane)  # unanswered, of one peer
TOKENS_PER_S = 1000.0  # of one sender: messages, or 256 KiB pieces
BUDGET_FRAMES = 32  # half-read tensors of the largest size on a lane ...
BUDGET_BYTES_MIN = 64 << 20  # ... and at least so much
BULK_BUDGET_FRAMES = 4


@dataclass(slots=True)
class _Remote:
    """All that we keep of one peer."""

    bucket: Bucket
    outbound: dict[Lane, Outbound] = field(default_factory=dict)
    inbound: dict[Lane, Inbound] = field(default_factory=dict)
    offences: Offences = field(default_factory=Offences)
    backoff: Backoff = field(default_factory=Backoff)
    link: Link = field(default_factory=Link)
    num_greetings: int = 0

    def is_idle(self, now: float) -> bool:
        lanes_idle = all(lane.is_idle for lane in self.outbound.values())
        return lanes_idle and not self.inbound and not self.num_greetings and self.offences.clean(now)


class Transport:
    """Use `start`; then `send`, `ping`, `close`."""

    def __init__(
        self,
        p2p: P2P,
        spec: RunSpec,
        *,
        on_message: Callable[[PeerId, Message], None],
        on_unreachable: Callable[[PeerId], None],
        count: Callable[[str, float], None],
    ) -> None:
        assert p2p.peer_id is not None, "P2P.create sets it"
        self._p2p = p2p
        self._limits = limits = WireLimits.of(spec)
        self._stream_name = f"{spec.run_id}/frames"
        self._loop = asyncio.get_running_loop()
        self._on_unreachable, self._count = on_unreachable, count
        self._remotes: dict[PeerId, _Remote] = {}
        self._closing = False
        self._checks: asyncio.Task[None] | None = None
        self._outbound_host = OutboundHost(
            run_tag=run_tag(spec.run_id),
            open_stream=self._open_stream,
            on_broken=self._on_broken,
            count=count,
        )
        bulk_bytes = max(limits.exchange_bytes_max, limits.chunk_bytes_max)
        self._inbound_host = InboundHost(
            me=p2p.peer_id.to_base58(),
            limits=limits,
            budgets={
                Lane.DATA: Budget(max(BUDGET_BYTES_MIN, BUDGET_FRAMES * limits.boundary_bytes_max)),
                Lane.BULK: Budget(max(BUDGET_BYTES_MIN, BULK_BUDGET_FRAMES * bulk_bytes)),
            },
            deliver=on_message,
            on_broken=self._on_broken,
            count=count,
        )

    @classmethod
    async def start(
        cls,
        p2p: P2P,
        spec: RunSpec,
        *,
        on_message: Callable[[PeerId, Message], None],
        on_unreachable: Callable[[PeerId], None],
        count: Callable[[str, float], None],
    ) -> Transport:
        """Listen for this run's streams. The callbacks are called from the loop and must not block."""
        transport = cls(p2p, spec, on_message=on_message, on_unreachable=on_unreachable, count=count)
        await p2p.add_binary_stream_handler(transport._stream_name, transport._on_stream)
        transport._checks = asyncio.create_task(transport._check_lanes())
        return transport

    async def send(self, to: PeerId, message: Message) -> None:
        """Returns when `to` has `message` in its inbox. Messages of a lane arrive in the order of the calls."""
        header, tensor = encode(message, run_id=self._limits.run_id)
        await self._outbound(to, lane_of(message)).send(FrameKind.MESSAGE, header, tensor)
        self._count(f"sent-bytes.{type(message).__name__}", len(header) + len(tensor))

    async def ping(self, to: PeerId, timeout_s: float) -> float:
        """Seconds to `to` and back, past whatever else is under way; PeerUnreachable after `timeout_s`."""
        began_s = monotonic()
        pong = self._outbound(to, Lane.PING).send(FrameKind.PING)
        try:
            await asyncio.wait_for(pong, timeout_s)
        except asyncio.TimeoutError:
            raise PeerUnreachable(to, "ping-timeout") from None
        seconds = monotonic() - began_s
        self._remote(to).link.round_trip_s.add(seconds)
        return seconds

    def access(self) -> AccessMeasured:
        """Of our own line: as fast as to or from the fastest peer; 0 before anything large went or came."""
        links = [remote.link for remote in self._remotes.values()]
        return AccessMeasured(
            upload_bytes_per_s=max((link.sent_bytes_per_s.value or 0.0 for link in links), default=0.0),
            download_bytes_per_s=max((link.received_bytes_per_s.value or 0.0 for link in links), default=0.0),
        )

    def link(self, to: PeerId) -> Link:
        """What was measured between us and one peer."""
        return self._remote(to).link

    async def close(self) -> None:
        """Say goodbye on every stream; sends that are under way fail."""
        self._closing = True
        if self._checks is not None:
            self._checks.cancel()
        for remote in self._remotes.values():
            self._hang_up(remote, LEAVING)
        with contextlib.suppress(OSError, P2PDaemonError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            await asyncio.wait_for(self._p2p.remove_binary_stream_handler(self._stream_name), CLOSE_MAX_S)

    # ---- peers ----

    def _remote(self, peer_id: PeerId) -> _Remote:
        remote = self._remotes.get(peer_id)
        if remote is None:
            if len(self._remotes) >= REMOTES_MAX:
                self._forget_idle()
            burst = TOKENS_PER_S + 2 * self._limits.tensor_bytes_max / BYTES_PER_TOKEN
            bucket = Bucket(rate=TOKENS_PER_S, burst=burst, now=self._loop.time())
            remote = self._remotes[peer_id] = _Remote(bucket)
        return remote

    def _outbound(self, to: PeerId, lane: Lane) -> Outbound:
        if self._closing:
            raise PeerUnreachable(to, "transport-closed")
        remote = self._remote(to)
        if lane not in remote.outbound:
            remote.outbound[lane] = Outbound(to, lane, self._outbound_host, remote.backoff, remote.link)
        return remote.outbound[lane]

    def _on_broken(self, peer_id: PeerId, reason: str) -> None:
        """One stream broke: so will the others, or they are useless; hang up all, and say it once."""
        remote = self._remotes.get(peer_id)
        if remote is None or self._closing:
            return
        self._hang_up(remote, reason)
        self._count(f"lost.{reason}", 1)
        self._on_unreachable(peer_id)

    def _hang_up(self, remote: _Remote, reason: str) -> None:
        for outbound in remote.outbound.values():
            outbound.close(reason)
        for inbound in tuple(remote.inbound.values()):
            inbound.close(reason)

    async def _check_lanes(self) -> None:
        """Every second: who stalls, who trickles."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            now = self._loop.time()
            for remote in tuple(self._remotes.values()):
                for outbound in tuple(remote.outbound.values()):
                    outbound.check(now)
                for inbound in tuple(remote.inbound.values()):
                    inbound.check(now)

    def _forget_idle(self) -> None:
        now = self._loop.time()
        for peer_id in [p for p, remote in self._remotes.items() if remote.is_idle(now)]:
            del self._remotes[peer_id]

    # ---- opening streams ----

    async def _open_stream(self, to: PeerId) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Ask the daemon for a stream. (The library's own call leaves its connection open when it fails.)"""
        try:
            peer_id = PeerID.from_base58(to)
            client: Any = self._p2p._client
            reader, writer = await client.control.daemon_connector.open_connection()
        except (OSError, ValueError) as error:
            raise PeerUnreachable(
                to, "daemon-gone" if isinstance(error, OSError) else "bad-peer-id"
            ) from error
        try:
            open_it = p2pd_pb2.StreamOpenRequest(peer=peer_id.to_bytes(), proto=[self._stream_name])
            await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=open_it))
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
        except BaseException as error:
            writer.close()
            if isinstance(error, OSError | asyncio.IncompleteReadError):
                raise PeerUnreachable(to, "daemon-gone") from error
            raise
        if response.type == p2pd_pb2.Response.ERROR:
            writer.close()
            raise PeerUnreachable(to, DIAL_FAILED)
        return reader, writer

    async def _on_stream(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """A stream from `info.peer_id` (proven by the channel): greet, then live as long as the lane."""
        sender = info.peer_id.to_base58()
        remote = self._remote(sender)
        if remote.num_greetings >= GREETINGS_MAX:
            writer.close()
            return
        remote.num_greetings += 1
        try:
            lane = await asyncio.wait_for(self._read_hello(reader), DIAL_S)
            inbound = self._admit(sender, remote, lane)
        except RemoteProtocolError as error:
            self._count(f"refused.{error.reason}", 1)
            writer.write(pack_frame(FrameKind.CLOSE, header=error.reason.encode()))
            writer.close()
            return
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError):
            self._count("refused.no-greeting", 1)
            writer.close()
            return
        finally:
            remote.num_greetings -= 1
        inbound.begin(reader, writer)
        await inbound.closed
        if remote.inbound.get(lane) is inbound:
            del remote.inbound[lane]

    async def _read_hello(self, reader: asyncio.StreamReader) -> Lane:
        """Exactly one frame: the dialer says no more until it is welcome, so the reader holds nothing after it."""
        frame = await reader.readexactly(PREFIX.size + GREETING.size)
        prefix = unpack_prefix(frame)
        require(prefix.kind is FrameKind.HELLO and prefix.header_bytes == GREETING.size, "bad-greeting")
        check_crc(frame)
        version, tag = GREETING.unpack_from(frame, PREFIX.size)
        require(version == PROTOCOL_VERSION, "other-protocol")
        require(tag == self._outbound_host.run_tag, "other-run")
        require(prefix.lane in tuple(Lane), "bad-lane")
        return Lane(prefix.lane)

    def _admit(self, sender: PeerId, remote: _Remote, lane: Lane) -> Inbound:
        require(not self._closing, LEAVING)
        require(not remote.offences.ignored(self._loop.time()), "ignored")
        require(sum(len(other.inbound) for other in self._remotes.values()) < INBOUND_MAX, "too-many-streams")
        if lane in remote.inbound:  # its old stream is dead, or it misbehaves; either way the new one counts
            remote.inbound[lane].close("replaced")
        remote.backoff.clear()
        inbound = Inbound(
            sender, lane, self._inbound_host, bucket=remote.bucket, offences=remote.offences, link=remote.link
        )
        remote.inbound[lane] = inbound
        return inbound
