"""The control plane as its clients see it: real server, real socket, a daemon reduced to what it offers."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from peer.control import ControlService, attach, status_from_proto, status_to_proto
from peer.control_client import ControlError, choose_peers, connect
from peer.pointers import SOCKET_PATH_BYTES_MAX, find_peers, socket_path_for
from peer.status import PeerStatus, ValidationPoint
from protocols.errors import ConfigError, GossamerError
from protocols.proto import control_pb2, control_pb2_grpc
from protocols.swarm import PeerInfo, PeerState

PEER = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"


def a_status(**changes: Any) -> PeerStatus:
    info = PeerInfo(peer=PEER, stage=0, state=PeerState.SERVING, round=7, grad_norm=0.5)
    joiner = PeerInfo(peer="12D3other", stage=None, state=PeerState.JOINING)
    status = PeerStatus(
        peer=PEER,
        name="calm-otter",
        run_id="demo-0123456789abcdef",
        stage=0,
        state=PeerState.SERVING,
        round=7,
        total_rounds=300,
        loss=3.5,
        validation=(
            ValidationPoint(round=0, loss=6.9, num_microbatches=2),
            ValidationPoint(round=5, loss=4.0),
        ),
        tokens=12_345,
        tokens_per_s=99.5,
        counters={"retries": 2.0},
        addresses=("/ip4/127.0.0.1/tcp/1/p2p/" + PEER,),
        peers=(info, joiner),
        events=("a peer left",),
    )
    return replace(status, **changes)


@dataclass
class ADaemon:
    """The smallest thing that the control plane can serve."""

    now: PeerStatus = field(default_factory=a_status)
    asked: list[str] = field(default_factory=list)
    export_error: Exception | None = None

    def status(self) -> PeerStatus:
        return self.now

    def request_leave(self) -> None:
        self.asked.append("leave")

    def request_pause(self) -> None:
        self.asked.append("pause")

    def request_resume(self) -> None:
        self.asked.append("resume")

    async def export_stage(self, folder: Path | None) -> Path:
        if self.export_error is not None:
            raise self.export_error
        return (folder or Path("/checkpoints")) / "round-00000007"


def talk(daemon: ADaemon, runtime_dir: Path, conversation: Callable[[], Any]) -> Any:
    """Serve `daemon` while `conversation` (blocking, as a command line is) runs in a thread."""

    async def whole() -> Any:
        handle = await attach(daemon, runtime_dir)
        try:
            return await asyncio.to_thread(conversation)
        finally:
            await handle.close()

    return asyncio.run(asyncio.wait_for(whole(), timeout=30))


def test_a_status_survives_the_wire_unchanged():
    status = a_status()
    assert status_from_proto(status_to_proto(status)) == status
    relay = a_status(stage=None, loss=None, validation=(), counters={})
    message = control_pb2.PeerStatus.FromString(status_to_proto(relay).SerializeToString())
    assert status_from_proto(message) == relay


def test_a_client_finds_the_peer_and_every_request_reaches_the_daemon(tmp_path: Path):
    daemon = ADaemon()

    def conversation() -> None:
        [pointer] = choose_peers(tmp_path)
        assert (pointer.peer, pointer.name, pointer.run_id) == (PEER, "calm-otter", daemon.now.run_id)
        with connect(pointer.socket_path) as client:
            assert client.status() == daemon.now
            assert client.begin_status()() == daemon.now
            assert client.peers() == list(daemon.now.peers)
            assert next(client.watch(interval_s=0.2)) == daemon.now
            client.pause()
            client.resume()
            client.leave()
            assert client.checkpoint() == Path("/checkpoints/round-00000007")
            assert client.checkpoint(tmp_path) == tmp_path.resolve() / "round-00000007"

    talk(daemon, tmp_path, conversation)
    assert daemon.asked == ["pause", "resume", "leave"]
    assert list(tmp_path.iterdir()) == []  # socket and pointer are gone


def test_only_the_owner_may_use_the_socket(tmp_path: Path):
    def conversation() -> int:
        return stat.S_IMODE(Path(choose_peers(tmp_path)[0].socket_path).stat().st_mode)

    assert talk(ADaemon(), tmp_path, conversation) & 0o077 == 0


@pytest.mark.parametrize(("state", "healthy"), [(PeerState.SERVING, True), (PeerState.CATCHING_UP, False)])
def test_health_says_serving_only_while_the_peer_serves(tmp_path: Path, state: PeerState, healthy: bool):
    """A container platform must not send users to a peer that still copies its weights."""

    def conversation() -> bool:
        with connect(choose_peers(tmp_path)[0].socket_path) as client:
            return client.is_serving()

    assert talk(ADaemon(now=a_status(state=state)), tmp_path, conversation) is healthy


def test_a_full_disk_reaches_the_person_as_its_message(tmp_path: Path):
    daemon = ADaemon(export_error=GossamerError("no space left in /data: free 40 MB"))

    def conversation() -> None:
        with connect(choose_peers(tmp_path)[0].socket_path) as client:
            with pytest.raises(ControlError, match="no space left in /data: free 40 MB"):
                client.checkpoint()
            assert client.status() == daemon.now  # and the peer lives on

    talk(daemon, tmp_path, conversation)


def test_what_a_killed_peer_left_behind_is_dropped_on_sight(tmp_path: Path):
    """kill -9 leaves pointer and socket file; `status` must not wait for them, nor show them twice."""
    dead_socket = tmp_path / "dead.sock"
    dead_socket.touch()
    pointer = tmp_path / "dead.json"
    pointer.write_text(
        f'{{"peer": "{PEER}", "name": "x", "run_id": "r", "pid": 1, "socket_path": "{dead_socket}"}}'
    )
    (tmp_path / "foreign.json").write_text('{"not": "ours"}')
    assert find_peers(tmp_path) == []
    assert not pointer.exists()
    assert not dead_socket.exists()
    assert (tmp_path / "foreign.json").exists()
    with pytest.raises(ConfigError, match="no peer is running"):
        choose_peers(tmp_path)


def test_a_name_that_fits_no_running_peer_lists_those_there_are(tmp_path: Path):
    def conversation() -> None:
        assert [p.peer for p in choose_peers(tmp_path, "calm-otter")] == [PEER]
        assert [p.peer for p in choose_peers(tmp_path, PEER[-6:])] == [PEER]
        with pytest.raises(ConfigError, match="calm-otter"):
            choose_peers(tmp_path, "brave-newt")

    talk(ADaemon(), tmp_path, conversation)


def test_a_socket_path_too_long_for_the_kernel_falls_back_to_a_short_one(tmp_path: Path):
    """Runtime folders below a deep home exceed the kernel's 107 bytes; bind() would fail with a riddle."""
    deep = tmp_path / ("d" * 90) / ("e" * 90)
    path = socket_path_for(deep, PEER)
    assert len(str(path)) <= SOCKET_PATH_BYTES_MAX
    assert path.name == f"{PEER[-8:]}.sock"

    def conversation() -> PeerStatus:
        with connect(choose_peers(deep)[0].socket_path) as client:
            return client.status()

    assert talk(ADaemon(), deep, conversation) == a_status()


def test_a_peer_that_is_gone_is_an_answer_not_a_hang(tmp_path: Path):
    with connect(tmp_path / "nobody.sock") as client:
        assert client.begin_status(timeout_s=1.0)() is None
        with pytest.raises(ControlError, match="does not answer"):
            client.leave()


def test_every_call_of_the_schema_is_answered():
    """The generated base refuses each; a call that is added there must be written here."""
    calls = [name for name in vars(control_pb2_grpc.ControlServicer) if not name.startswith("_")]
    assert calls
    assert [name for name in calls if name not in vars(ControlService)] == []
