"""Peers as processes of this machine: started, killed, left behind by their launcher, told to leave.

Times are asserted where a bar names them (F6, F7), on a monotonic clock; a peer that leaves late is killed by its
launcher, which its exit code tells.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from dht.identity import Identity
from peer.config import HostConfig
from peer.control_client import connect
from peer.data import load_data
from peer.follow import follow
from peer.launch import LaunchError, LocalSwarm
from peer.pointers import find_peers
from peer.progress import ProgressTracker
from peer.run_file import write_run_file
from peer.schedule import Schedule, parse_events
from protocols.errors import ConfigError
from protocols.run_spec import RunSpec, preset
from protocols.swarm import PeerState
from tests.live.until import wait_until

LIVENESS = dict(heartbeat_s=1.0, record_ttl_s=6.0, view_poll_s=1.0, ping_s=1.0)
QUIET = ["--no-auto-nat", "--no-use-relay", "--threads", "1", "--device", "cpu"]
LOCAL = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", *QUIET]
GOSSAMER = [sys.executable, "-m", "peer"]


def a_spec(total_rounds: int = 1000, **rounds: Any) -> RunSpec:
    return preset("pico", "live", rounds=dict(total_rounds=total_rounds, rows=2, **rounds), liveness=LIVENESS)


def family(pid: int) -> list[psutil.Process]:
    """The process and all its descendants: python and its libp2p daemon."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.timeout(300)
def test_a_swarm_trains_survives_a_kill_and_leaves_in_time(tmp_path: Path):
    """F6, F7: signal 9 to one of two replicas: its daemon ends too, its port is free, rounds go on; then all leave."""
    swarm = LocalSwarm(a_spec(), {0: 1, 1: 2, 2: 1}, tmp_path)
    with swarm:
        swarm.wait_round(2, timeout_s=120)
        victim = swarm.replicas(1)[0]
        assert victim.process.pid is not None
        assert victim.status is not None
        processes = family(victim.process.pid)
        assert len(processes) > 1  # there is a daemon to be left behind
        port = int(victim.status.addresses[0].split("/tcp/")[1].split("/")[0])

        assert swarm.kill(1, 0) == [victim]
        wait_until(lambda: all(is_gone(process) for process in processes), 2.0, "no descendant is alive")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every server does
            probe.bind(("127.0.0.1", port))

        reached = max(status.round for status in swarm.status() if status.stage == 0)
        swarm.wait_round(reached + 3, timeout_s=120)
        everybody = [
            process for peer in swarm.peers if peer.is_alive for process in family(peer.process.pid or 0)
        ]
    assert [peer.process.exitcode for peer in swarm.peers if peer is not victim] == [0, 0, 0]
    assert all(is_gone(process) for process in everybody)
    assert list((tmp_path / "run").iterdir()) == []


START_MAX_S = LEAVE_MAX_S = 15.0  # bar F7
ROUND_FLOOR_S = 0.5  # rounds of this size last less than a look at them


def seconds_between_rounds(swarm: LocalSwarm, rounds: int) -> list[float]:
    """How long each of the next rounds takes, seen from outside."""
    first = swarm.status()[0].round
    seen_s = []
    for number in range(first + 1, first + rounds + 2):
        swarm.wait_round(number, timeout_s=60)
        seen_s.append(time.monotonic())
    return [later - earlier for earlier, later in pairwise(seen_s)]


@pytest.mark.timeout(300)
def test_others_go_on_within_two_round_times_of_a_kill(tmp_path: Path):
    """F6: the microbatches that were at the dead replica go to its sibling at once, not after a timeout."""
    with LocalSwarm(a_spec(), {0: 1, 1: 2, 2: 1}, tmp_path) as swarm:
        swarm.wait_round(5, timeout_s=120)
        round_s = max(*seconds_between_rounds(swarm, 8), ROUND_FLOOR_S)
        reached = swarm.status()[0].round
        swarm.kill(1, 0)
        killed_s = time.monotonic()
        swarm.wait_round(reached + 2, timeout_s=60)  # the next one may have been all but done
        assert time.monotonic() - killed_s <= 2 * round_s


@pytest.mark.timeout(300)
def test_a_lost_stage_is_taken_over_and_a_newcomer_serves(tmp_path: Path):
    """The demo's story in small, to the last round: two kills, one join, every event dealt with."""
    events = parse_events("kill stage=1 replica=0 at round=3; kill stage=1 at round=8; join at round=20")
    swarm = LocalSwarm(a_spec(60, eval_every=20), {0: 1, 1: 2, 2: 2}, tmp_path, {"checkpoint_every": 0})
    with swarm:
        schedule = Schedule(swarm, events)
        progress = follow(swarm, schedule, ProgressTracker(num_stages=3))
        folders = swarm.checkpoints(tmp_path / "checkpoints")
    assert progress.round >= 60
    assert [incident.seconds is not None for incident in schedule.incidents] == [True, True, True]
    assert progress.validation_loss is not None
    assert [sorted(folder.glob("round-*")) != [] for folder in folders] == [True, True, True]


@pytest.mark.timeout(300)
def test_the_only_reader_of_the_text_dies_and_a_relay_takes_its_place(tmp_path: Path):
    """A6: embedding and head come back from the copy that the last stage keeps; it was the bootstrap peer, too."""
    with LocalSwarm(a_spec(), {0: 1, 1: 2, 2: 1}, tmp_path) as swarm:
        swarm.wait_round(12, timeout_s=120)
        (originator,) = swarm.kill(0)
        assert originator.status is not None
        swarm.wait_round(originator.status.round + 3, timeout_s=120)
        (successor,) = swarm.replicas(0)
        assert "recovery-done stage 0: shadow" in successor.log_path.read_text()


@pytest.mark.timeout(200)
def test_peers_end_when_their_launcher_is_killed(tmp_path: Path):
    """kill -9 of `gossamer up` runs no clean-up at all; its peers notice by themselves."""
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom peer.launch import LocalSwarm\n"
        "from protocols.run_spec import RunSpec\n"
        f"spec = RunSpec.from_json({a_spec().to_json()!r})\n"
        f"swarm = LocalSwarm(spec, {{0: 1, 1: 1, 2: 1}}, Path({str(tmp_path)!r}))\n"
        "swarm.start()\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "up\n"
            processes = family(launcher.pid)
            assert sum("p2pd" in process.name() for process in processes) == 3
        finally:
            launcher.kill()
    wait_until(lambda: all(is_gone(process) for process in processes), 15.0, "all peers have ended")


def test_a_layout_that_cannot_train_is_refused_before_anything_starts(tmp_path: Path):
    with pytest.raises(ConfigError, match="needs a peer for stage 0"):
        LocalSwarm(a_spec(), {1: 1, 2: 1}, tmp_path)
    with pytest.raises(ConfigError, match="has no stage 3"):
        LocalSwarm(a_spec(), {0: 1, 3: 1}, tmp_path)


@pytest.mark.timeout(200)
def test_a_peer_that_cannot_start_is_named_with_its_log(tmp_path: Path):
    swarm = LocalSwarm(a_spec(), {0: 1, 1: 1, 2: 1}, tmp_path, {"device": "cuda:99"})
    with pytest.raises(LaunchError, match=r"p00 ended with exit code [12].*p00.log:\n.*cuda"):
        swarm.start()
    swarm.stop()


# ---- the command line -----------------------------------------------------------------------------------------------


TWO_STAGES = preset("pico", "live", num_stages=2, liveness=LIVENESS)  # each process imports torch anew


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    write_run_file(path, TWO_STAGES, Identity.load_or_create(tmp_path / "owner.key"))
    return path


class Commands:
    """`gossamer` processes of one test, with folders of their own; ended with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[str]] = []

    def _environ(self, who: str) -> dict[str, str]:
        own = {
            "GOSSAMER_DATA_DIR": str(self.folder / who),
            "GOSSAMER_RUNTIME_DIR": str(self.folder / "run"),
            "GOSSAMER_CACHE_DIR": str(HostConfig().cache_dir),
        }
        return {**os.environ, **own}

    def start(self, who: str, *arguments: str) -> subprocess.Popen[str]:
        log = (self.folder / f"{who}.log").open("w")
        command = [*GOSSAMER, *arguments]
        process = subprocess.Popen(command, env=self._environ(who), stdout=log, stderr=log, text=True)
        log.close()
        self.running.append(process)
        return process

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*GOSSAMER, *arguments]
        return subprocess.run(
            command, env=self._environ("tool"), capture_output=True, text=True, timeout=100, check=False
        )

    def states(self) -> list[PeerState]:
        """Of those that have a stage; asked without a process each time, which would take the peers' cores."""
        found = []
        for pointer in find_peers(self.folder / "run"):
            with connect(pointer.socket_path) as client:
                status = client.begin_status()()
            if status is not None and status.stage is not None:
                found.append(status.state)
        return found


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    yield commands
    for process in commands.running:
        process.kill()
        process.wait()


@pytest.mark.timeout(300)
def test_volunteers_join_by_run_id_through_a_bootstrap_peer_and_leave_when_asked(
    commands: Commands, run_file: Path, tmp_path: Path
):
    """The path of the documentation: bootstrap with a run file; others know its address and the run id alone."""
    address_file = tmp_path / "bootstrap.addr"
    bootstrap = commands.start(
        "bootstrap", "bootstrap", "--run", str(run_file), "--write-address", str(address_file), *LOCAL
    )
    join = ["join", "--run", TWO_STAGES.run_id, "--initial_peers", f"@{address_file}", *LOCAL]
    peers = [commands.start(f"peer{stage}", *join, "--stage", str(stage)) for stage in range(2)]

    wait_until(lambda: commands.states() == [PeerState.SERVING] * 2, 200, "all serve")
    assert commands.run("healthcheck").returncode == 0
    shown = json.loads(commands.run("status", "--json").stdout)
    assert {status["stage"] for status in shown} == {0, 1, None}
    assert len(json.loads(commands.run("peers", "--json").stdout)) == 2
    first_screen = (tmp_path / "peer0.log").read_text()
    assert f"gossamer join --run {TWO_STAGES.run_id} --initial-peers /ip4/127.0.0.1/tcp/" in first_screen

    exported = commands.run("export", str(tmp_path / "model"), "--live")
    assert (exported.returncode, exported.stderr) == (0, "")
    assert (tmp_path / "model" / "config.json").exists()

    bootstrap.send_signal(signal.SIGINT)
    assert bootstrap.wait(timeout=60) == 0
    assert commands.run("leave").returncode == 0
    assert [process.wait(timeout=60) for process in peers] == [0, 0]
    assert commands.run("healthcheck").returncode == 1


def test_one_peer_starts_and_leaves_within_fifteen_seconds(commands: Commands, run_file: Path):
    """F7, from `gossamer join` to serving, imports and all. (That a second signal forces: test_host.)

    But for the text, which is tokenized once on a machine.
    """
    load_data(TWO_STAGES, HostConfig().cache_dir)
    began_s = time.monotonic()
    peer = commands.start("alone", "join", "--run", str(run_file), "--stage", "0", "--new-swarm", *LOCAL)
    wait_until(lambda: commands.states() == [PeerState.SERVING], START_MAX_S, "it serves")
    assert time.monotonic() - began_s <= START_MAX_S
    peer.send_signal(signal.SIGINT)
    assert peer.wait(timeout=LEAVE_MAX_S) == 0


@pytest.mark.timeout(200)
def test_a_peer_that_leaves_every_choice_to_us_serves_and_shows_its_metrics(
    commands: Commands, run_file: Path
):
    """As the documentation types it. It asked torch for no threads at all, and bound the metrics port twice."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        metrics = f"127.0.0.1:{probe.getsockname()[1]}"
    join = ["join", "--run", str(run_file), "--stage", "1", "--new-swarm", "--no-auto-nat", "--no-use-relay"]
    local = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    peer = commands.start("defaults", *join, *local, "--metrics-addr", metrics)
    wait_until(lambda: commands.states() == [PeerState.SERVING], 100, "it serves")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{metrics}/metrics", timeout=10) as reply:
        assert b"gossamer_uptime_seconds" in reply.read()
    peer.send_signal(signal.SIGINT)
    assert peer.wait(timeout=60) == 0


@pytest.mark.timeout(200)
def test_an_unreachable_swarm_and_a_busy_port_end_with_their_codes(commands: Commands, run_file: Path):
    stranger = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
    nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{stranger}"
    done = commands.run("join", "--run", str(run_file), "--initial-peers", nobody, *LOCAL)
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    assert nobody in done.stderr

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        taken = ["--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}", *QUIET]
        done = commands.run("join", "--run", str(run_file), "--new-swarm", *taken)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert str(port) in done.stderr
