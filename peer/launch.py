"""A swarm on this machine: peers as processes, from one server process that has imported torch and hivemind once.

Importing them costs seconds of a core for each peer otherwise. Each peer writes its own log file and is talked to
through its control socket, as any peer is. Nothing is left behind: a child ends when the launcher ends, however
that came about, and takes its libp2p daemon with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from peer.config import HostConfig
from peer.control_client import ControlClient, ControlError
from peer.pointers import find_peers
from peer.status import PeerStatus
from protocols.errors import ConfigError, GossamerError
from protocols.run_spec import RunSpec
from protocols.swarm import PeerState

PRELOAD = ["peer.daemon", "torch._dynamo"]  # torch, hivemind, grpc; and what the first optimizer imports
START_TIMEOUT_S = 90.0
LEAVE_TIMEOUT_S = 15.0
POLL_S = 0.2
LOG_TAIL_LINES = 5
BOOTSTRAP_ADDRESSES_MAX = 3


class LaunchError(GossamerError):
    """The local swarm did not come up, or is gone."""


@dataclass(eq=False, slots=True)
class LocalPeer:
    """One of our processes. `stage` is what it was started for; its status knows what it serves now."""

    label: str
    stage: int | None
    process: BaseProcess
    config: HostConfig
    log_path: Path
    client: ControlClient | None = None
    status: PeerStatus | None = None  # the newest that was read
    is_frozen: bool = False  # stopped by `freeze`: it lives, and answers nothing

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    @property
    def name(self) -> str:
        return f"{self.label} {self.status.name}" if self.status else self.label

    def log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        return ""


def parse_layout(text: str) -> dict[int, int]:
    """`0:2,1:3` is two peers for stage 0 and three for stage 1."""
    layout: dict[int, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        stage, _, number = part.partition(":")
        if not (stage.isdecimal() and (number or "1").isdecimal()):
            raise ConfigError(f"peers {part!r}: write STAGE:NUMBER, such as 0:2,1:2")
        layout[int(stage)] = layout.get(int(stage), 0) + int(number or "1")
    return layout


class LocalSwarm:
    """Peers as processes of this machine. `layout` is replicas by stage; the first peer of stage 0 introduces."""

    def __init__(
        self,
        spec: RunSpec,
        layout: Mapping[int, int],
        folder: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        enter: Callable[[str], None] | None = None,
    ) -> None:
        """Logs, sockets and the peers' own folders lie in `folder`; `settings` are HostConfig fields for all.

        `enter` is called with the peer's label in its process before anything else, where peers are to run in
        different surroundings, such as networks of their own.
        """
        outside = [stage for stage in layout if stage >= spec.num_stages]
        if outside or not layout.get(0):
            wrong = (
                f"has no stage {outside[0]}" if outside else "needs a peer for stage 0, which reads the text"
            )
            raise ConfigError(f"layout {dict(layout)}: the run {wrong} (stages 0 to {spec.num_stages - 1})")
        self.spec = spec
        self.layout = dict(layout)
        self.folder = folder.resolve()
        self.peers: list[LocalPeer] = []
        self._num_added = 0
        self._settings = dict(settings or {})
        self._enter = enter
        self.runtime_dir = self.folder / "run"

    def __enter__(self) -> LocalSwarm:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # ---- start ----

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """All peers of the layout, until each serves its stage; LaunchError names the one that does not."""
        deadline_s = time.monotonic() + timeout_s
        stages = [stage for stage, number in sorted(self.layout.items()) for _ in range(number)]
        self.add(stages[0])
        self._wait(lambda: bool(self._addresses()), deadline_s, "to open its address")
        for stage in stages[1:]:
            self.add(stage)
        self.wait_serving(self.peers, max(deadline_s - time.monotonic(), 1.0))

    def add(self, stage: int | None = None, *, data_dir: Path | None = None) -> LocalPeer:
        """Start one more peer; stage None: where the swarm needs one. Does not wait for it.

        With the `data_dir` of a peer that has ended it comes back as that peer, identity and checkpoints and all.
        """
        label = f"p{self._num_added:02d}"
        self._num_added += 1
        log_path = self.folder / "logs" / f"{label}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        fields: dict[str, Any] = {
            "stage": stage,
            "host_maddrs": ("/ip4/127.0.0.1/tcp/0",),
            "initial_peers": self._addresses(),
            "new_swarm": not self.peers,
            "use_relay": False,
            "auto_nat": False,
            "startup_timeout_s": START_TIMEOUT_S,
            "data_dir": data_dir or self.folder / label,
            "runtime_dir": self.runtime_dir,
            "threads": 1,
            "device": "cpu",
        }
        config = HostConfig.model_validate(fields | self._settings)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        enter = partial(self._enter, label) if self._enter is not None else None
        arguments = (self.spec.to_json(), config.model_dump(), str(log_path), enter)
        process = context.Process(target=peer_process, args=arguments, name=label, daemon=True)
        with _without_main_module():
            process.start()
        started = LocalPeer(label=label, stage=stage, process=process, config=config, log_path=log_path)
        self.peers.append(started)
        return started

    def _addresses(self) -> tuple[str, ...]:
        known = [peer.status.addresses[0] for peer in self.poll() if peer.status and peer.status.addresses]
        return tuple(known[:BOOTSTRAP_ADDRESSES_MAX])

    def wait_serving(self, peers: Sequence[LocalPeer], timeout_s: float = START_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        for waited in peers:
            self._wait(lambda peer=waited: _serves(peer), deadline_s, "to serve its stage", waited)

    def _wait(
        self, is_done: Callable[[], bool], deadline_s: float, what: str, waited: LocalPeer | None = None
    ) -> None:
        """Poll until `is_done`. A peer that died on the way ends it."""
        waited = waited or self.peers[0]
        while True:
            self.poll()
            if is_done():
                return
            if not waited.is_alive:
                code = waited.process.exitcode
                raise LaunchError(
                    f"{waited.name} ended with exit code {code}; {waited.log_path}:\n{waited.log_tail()}"
                )
            if time.monotonic() >= deadline_s:
                raise LaunchError(
                    f"waited in vain for {waited.name} {what}; {waited.log_path}:\n{waited.log_tail()}"
                )
            time.sleep(POLL_S)

    # ---- look ----

    def poll(self) -> list[LocalPeer]:
        """Peers that answered just now, their `status` fresh. All are asked at once."""
        self._connect()
        asked = [
            (peer, peer.client.begin_status())
            for peer in self.peers
            if peer.client and peer.is_alive and not peer.is_frozen
        ]
        answered = []
        for peer, collect in asked:
            status = collect()
            if status is not None:
                peer.status = status
                answered.append(peer)
        return answered

    def status(self) -> list[PeerStatus]:
        return [peer.status for peer in self.poll() if peer.status is not None]

    def _connect(self) -> None:
        if all(peer.client for peer in self.peers if peer.is_alive):
            return
        sockets = {pointer.pid: pointer.socket_path for pointer in find_peers(self.runtime_dir)}
        for peer in self.peers:
            if peer.client is None and peer.process.pid in sockets:
                peer.client = ControlClient(sockets[peer.process.pid])

    def replicas(self, stage: int) -> list[LocalPeer]:
        """Living peers that serve `stage` now, in the order of their start."""
        return [p for p in self.poll() if p.status and p.status.stage == stage and _serves(p)]

    def wait_round(self, round_: int, timeout_s: float) -> None:
        """Until an originator has finished that round."""
        deadline_s = time.monotonic() + timeout_s
        while not any(status.stage == 0 and status.round >= round_ for status in self.status()):
            if not any(peer.is_alive for peer in self.peers):
                raise LaunchError("no peer is left")
            if time.monotonic() >= deadline_s:
                raise LaunchError(f"round {round_} did not come within {timeout_s:.0f} s")
            time.sleep(POLL_S)

    # ---- end ----

    def kill(self, stage: int, replica: int | None = None) -> list[LocalPeer]:
        """Signal 9 to one replica of a stage, or to all."""
        victims = self.replicas(stage)
        if replica is not None:
            victims = victims[replica : replica + 1]
        if not victims:
            raise LaunchError(
                f"stage {stage} has no living replica {'' if replica is None else replica}".rstrip()
            )
        for victim in victims:
            self.kill_peer(victim)
        return victims

    def kill_peer(self, victim: LocalPeer) -> None:
        assert victim.process.pid is not None, "it was started"
        os.kill(victim.process.pid, signal.SIGKILL)
        victim.process.join()

    def freeze(self, peer: LocalPeer) -> None:
        """SIGSTOP: its connections stay open and its libp2p daemon goes on, but nobody is at home."""
        assert peer.process.pid is not None, "it was started"
        os.kill(peer.process.pid, signal.SIGSTOP)
        peer.is_frozen = True

    def thaw(self, peer: LocalPeer) -> None:
        if peer.is_frozen and peer.is_alive:
            assert peer.process.pid is not None, "it was started"
            os.kill(peer.process.pid, signal.SIGCONT)
        peer.is_frozen = False

    def forget(self, ended: LocalPeer) -> None:
        """Give back what a peer that has ended still holds here: a launcher may see hundreds come and go."""
        self.peers.remove(ended)
        if ended.client is not None:
            ended.client.close()
        ended.process.close()

    def stop(self) -> None:
        """All leave; who has not left in time is killed."""
        living = [peer for peer in self.peers if peer.is_alive]
        for peer in living:
            self.thaw(peer)
            peer.process.terminate()
        deadline_s = time.monotonic() + LEAVE_TIMEOUT_S
        for peer in living:
            peer.process.join(max(deadline_s - time.monotonic(), 0.0))
            if peer.is_alive:
                self.kill_peer(peer)
        for peer in self.peers:
            if peer.client is not None:
                peer.client.close()
                peer.client = None
        find_peers(self.runtime_dir)  # drops the files of those that could not clean up

    def checkpoints(self, folder: Path) -> list[Path]:
        """Have one replica of each stage write its weights below `folder`; a checkpoint folder for each stage."""
        folders = []
        for stage in range(self.spec.num_stages):
            replicas = self.replicas(stage)
            if not replicas:
                raise LaunchError(f"stage {stage} has no replica to save")
            newest = max(replicas, key=lambda peer: peer.status.round if peer.status else 0)
            if newest.client is None:
                raise ControlError(f"{newest.name} cannot be asked")
            folders.append(newest.client.checkpoint(folder / f"stage-{stage}").parent)
        return folders


def _serves(peer: LocalPeer) -> bool:
    return peer.is_alive and peer.status is not None and peer.status.state is PeerState.SERVING


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Children need none of the caller's script; multiprocessing would run it again in each of them."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    main.__spec__, main.__file__ = None, None
    try:
        yield
    finally:
        main.__spec__, main.__file__ = spec, file


def peer_process(
    spec_json: str, fields: dict[str, Any], log_path: str, enter: Callable[[], None] | None
) -> None:
    """What runs in the child: a peer whose output goes to its log file."""
    if enter is not None:
        enter()
    os.setsid()  # Ctrl-C in the terminal is for the launcher, which then asks each peer to leave
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    from peer.host import run_daemon

    try:
        code = run_daemon(RunSpec.from_json(spec_json), HostConfig.model_validate(fields))
    except GossamerError as error:
        print(f"gossamer: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


def _end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGKILL)
