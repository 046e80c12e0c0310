"""The peer's local control plane: a gRPC service on a Unix socket, in the daemon's own event loop.

It only asks the daemon (`Controllable`) and never decides. The socket is 0600: who may connect may do
everything here. The health service says SERVING only while the peer does, which is what containers wait for.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc

from peer.pointers import Pointer, socket_path_for, write_pointer
from peer.status import PeerStatus, ValidationPoint
from protocols.coordinates import Coordinate
from protocols.errors import ConfigError, GossamerError
from protocols.proto import control_pb2, control_pb2_grpc
from protocols.swarm import PeerInfo, PeerState

SERVICE = "gossamer.control.Control"
WATCH_INTERVAL_MIN_S, WATCH_INTERVAL_MAX_S = 0.2, 60.0
HEALTH_WATCH_S = 1.0
STOP_GRACE_S = 0.5

logger = logging.getLogger(__name__)


class Controllable(Protocol):
    """What the control plane needs of a daemon. All of it is called in the daemon's loop."""

    def status(self) -> PeerStatus: ...

    def request_leave(self) -> None: ...

    def request_pause(self) -> None: ...

    def request_resume(self) -> None: ...

    async def export_stage(self, folder: Path | None) -> Path:
        """Write a checkpoint now, below `folder` or where it always goes; its path."""
        ...


# ---- messages ---------------------------------------------------------------------------------------


_PLAIN_INFO_FIELDS = (
    "peer", "round", "outer_step", "slots", "forward_s", "backward_s", "upload_bytes_per_s", "download_bytes_per_s",
    "grad_norm", "started_unix_s", "fresh",
)  # fmt: skip


def info_to_proto(info: PeerInfo) -> control_pb2.PeerInfo:
    return control_pb2.PeerInfo(
        **{name: getattr(info, name) for name in _PLAIN_INFO_FIELDS},
        stage=info.stage,
        state=info.state.value,
        coordinate=() if info.coordinate is None else astuple(info.coordinate),
        link_numbers=[number for number, _ in info.links],
        link_s=[seconds for _, seconds in info.links],
    )


def info_from_proto(message: control_pb2.PeerInfo) -> PeerInfo:
    return PeerInfo(
        **{name: getattr(message, name) for name in _PLAIN_INFO_FIELDS},
        stage=message.stage if message.HasField("stage") else None,
        state=PeerState(message.state),
        coordinate=Coordinate(*message.coordinate) if message.coordinate else None,
        links=tuple(zip(message.link_numbers, message.link_s, strict=True)),
    )


_PLAIN_FIELDS = (
    "peer", "name", "run_id", "device", "paused", "round", "total_rounds", "outer_step", "tokens",
    "tokens_per_s", "num_in_flight", "queue_depth", "uptime_s", "planned_round_s",
    "apart", "cosine", "outer_wait_s",
)  # fmt: skip


def status_to_proto(status: PeerStatus) -> control_pb2.PeerStatus:
    return control_pb2.PeerStatus(
        **{name: getattr(status, name) for name in _PLAIN_FIELDS},
        stage=status.stage,
        state=status.state.value,
        loss=status.loss,
        validation=[
            control_pb2.ValidationPoint(
                round=point.round, loss=point.loss, num_microbatches=point.num_microbatches
            )
            for point in status.validation
        ],
        counters=dict(status.counters),
        addresses=status.addresses,
        peers=[info_to_proto(info) for info in status.peers],
        events=status.events,
    )


def status_from_proto(message: control_pb2.PeerStatus) -> PeerStatus:
    return PeerStatus(
        **{name: getattr(message, name) for name in _PLAIN_FIELDS},
        stage=message.stage if message.HasField("stage") else None,
        state=PeerState(message.state),
        loss=message.loss if message.HasField("loss") else None,
        validation=tuple(
            ValidationPoint(round=point.round, loss=point.loss, num_microbatches=point.num_microbatches)
            for point in message.validation
        ),
        counters=dict(message.counters),
        addresses=tuple(message.addresses),
        peers=tuple(info_from_proto(info) for info in message.peers),
        events=tuple(message.events),
    )


# ---- service ----------------------------------------------------------------------------------------


class ControlService(control_pb2_grpc.ControlServicer):
    """The methods of control.proto, under its names."""

    def __init__(self, daemon: Controllable) -> None:
        self._daemon = daemon

    async def Status(self, request: Empty, context: Any) -> control_pb2.PeerStatus:
        return status_to_proto(self._daemon.status())

    async def WatchStatus(
        self, request: control_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[control_pb2.PeerStatus]:
        interval_s = min(max(request.interval_s, WATCH_INTERVAL_MIN_S), WATCH_INTERVAL_MAX_S)
        while True:
            yield status_to_proto(self._daemon.status())
            await asyncio.sleep(interval_s)

    async def Peers(self, request: Empty, context: Any) -> control_pb2.PeersReply:
        return control_pb2.PeersReply(peers=[info_to_proto(info) for info in self._daemon.status().peers])

    async def Pause(self, request: Empty, context: Any) -> Empty:
        self._daemon.request_pause()
        return Empty()

    async def Resume(self, request: Empty, context: Any) -> Empty:
        self._daemon.request_resume()
        return Empty()

    async def Leave(self, request: Empty, context: Any) -> Empty:
        self._daemon.request_leave()
        return Empty()

    async def Checkpoint(
        self, request: control_pb2.CheckpointRequest, context: Any
    ) -> control_pb2.CheckpointReply:
        if request.folder and not os.path.isabs(request.folder):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"{request.folder!r} is not an absolute path"
            )
        try:
            path = await self._daemon.export_stage(Path(request.folder) if request.folder else None)
        except (OSError, GossamerError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return control_pb2.CheckpointReply(path=str(path))


class HealthService(health_pb2_grpc.HealthServicer):
    """grpc.health.v1: answers for the whole server ("") and for our service."""

    def __init__(self, daemon: Controllable) -> None:
        self._daemon = daemon

    def _health(self, service: str) -> health_pb2.HealthCheckResponse | None:
        if service not in ("", SERVICE):
            return None
        serving = self._daemon.status().state is PeerState.SERVING
        response = health_pb2.HealthCheckResponse
        return response(status=response.SERVING if serving else response.NOT_SERVING)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:
        health = self._health(request.service)
        if health is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return health

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> AsyncIterator[Any]:
        unknown = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        last = None
        while True:
            health = self._health(request.service) or unknown
            if health != last:
                yield health
                last = health
            await asyncio.sleep(HEALTH_WATCH_S)


@dataclass(slots=True)
class ControlHandle:
    """A running control plane; `close` also removes its files."""

    server: grpc.aio.Server
    socket_path: Path
    pointer_path: Path | None = None

    async def close(self) -> None:
        await self.server.stop(STOP_GRACE_S)
        for path in (self.pointer_path, self.socket_path):
            if path is not None:
                path.unlink(missing_ok=True)


async def serve(daemon: Controllable, socket_path: Path) -> ControlHandle:
    """Listen on `socket_path`, readable and writable for this user alone."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(daemon), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(daemon), server)
    umask_before = os.umask(0o177)  # the socket is never wider open, not even for a moment
    try:
        server.add_insecure_port(f"unix:{socket_path}")
        await server.start()
    except RuntimeError as error:
        raise ConfigError(f"the control socket {socket_path} cannot be opened ({error})") from None
    finally:
        os.umask(umask_before)
    return ControlHandle(server=server, socket_path=socket_path)


async def attach(daemon: Controllable, runtime_dir: Path) -> ControlHandle:
    """`serve` where tools look for it, and leave a pointer for them."""
    status = daemon.status()
    handle = await serve(daemon, socket_path_for(runtime_dir, status.peer))
    pointer = Pointer(
        peer=status.peer,
        name=status.name,
        run_id=status.run_id,
        pid=os.getpid(),
        socket_path=str(handle.socket_path),
    )
    handle.pointer_path = write_pointer(runtime_dir, pointer)
    return handle
