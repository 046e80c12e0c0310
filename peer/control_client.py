"""Talking to a running peer's control plane; starts in milliseconds (no torch, no hivemind)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc

from peer.control import info_from_proto, status_from_proto
from peer.pointers import Pointer, find_peers
from peer.status import PeerStatus
from protocols.errors import ConfigError, GossamerError
from protocols.proto import control_pb2, control_pb2_grpc
from protocols.swarm import PeerInfo

CALL_TIMEOUT_S = 5.0
CHECKPOINT_TIMEOUT_S = 120.0
CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


class ControlError(GossamerError):
    """The peer did not answer, or said no."""


class ControlClient:
    """One peer's control plane. Calls raise ControlError."""

    def __init__(self, socket_path: str | Path) -> None:
        self._path = str(socket_path)
        self._channel = grpc.insecure_channel(f"unix:{self._path}", options=CHANNEL_OPTIONS)
        self._control = control_pb2_grpc.ControlStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._explained(error) from None

    def _explained(self, error: Any) -> ControlError:
        if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
            return ControlError(error.details())
        return ControlError(f"the peer at {self._path} does not answer ({error.code().name.lower()})")

    def status(self) -> PeerStatus:
        return status_from_proto(self._call(self._control.Status, Empty()))

    def begin_status(self, timeout_s: float = CALL_TIMEOUT_S) -> Callable[[], PeerStatus | None]:
        """Ask now, collect later, as a launcher asks all its peers at once; None when no answer came."""
        call = self._control.Status.future(Empty(), timeout=timeout_s)

        def collect() -> PeerStatus | None:
            try:
                return status_from_proto(call.result())
            except grpc.RpcError:
                return None

        return collect

    def watch(self, interval_s: float) -> Iterator[PeerStatus]:
        """A status each `interval_s`, until the peer is gone."""
        try:
            for message in self._control.WatchStatus(control_pb2.WatchRequest(interval_s=interval_s)):
                yield status_from_proto(message)
        except grpc.RpcError:
            return

    def peers(self) -> list[PeerInfo]:
        reply = self._call(self._control.Peers, Empty())
        return [info_from_proto(info) for info in reply.peers]

    def pause(self) -> None:
        self._call(self._control.Pause, Empty())

    def resume(self) -> None:
        self._call(self._control.Resume, Empty())

    def leave(self) -> None:
        self._call(self._control.Leave, Empty())

    def checkpoint(self, folder: Path | None = None) -> Path:
        request = control_pb2.CheckpointRequest(folder=str(folder.resolve()) if folder else "")
        reply = self._call(self._control.Checkpoint, request, CHECKPOINT_TIMEOUT_S)
        return Path(reply.path)

    def is_serving(self) -> bool:
        """Asks the standard health service, as any container platform would."""
        try:
            reply = self._health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING


@contextmanager
def connect(socket_path: str | Path) -> Iterator[ControlClient]:
    client = ControlClient(socket_path)
    try:
        yield client
    finally:
        client.close()


def choose_peers(runtime_dir: Path, which: str | None = None) -> list[Pointer]:
    """Running peers on this machine; `which` narrows to those whose name or id it begins or ends.

    ConfigError when none is left: the person expected one.
    """
    found = find_peers(runtime_dir)
    if not found:
        raise ConfigError(
            f"no peer is running on this machine (looked in {runtime_dir}): start one with `gossamer join`, "
            "or point --runtime-dir at its folder"
        )
    if which is None:
        return found
    chosen = [p for p in found if which == p.name or p.peer.endswith(which) or p.peer.startswith(which)]
    if not chosen:
        names = ", ".join(f"{pointer.name} (...{pointer.peer[-6:]})" for pointer in found)
        raise ConfigError(f"no running peer is called {which!r}; there are: {names}")
    return chosen
