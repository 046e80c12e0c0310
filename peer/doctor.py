"""`gossamer doctor`: what a peer needs of its machine, one by one, each with the remedy when it is missing."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from peer.config import DEFAULT_PORT, HostConfig, is_port_free, read_initial_peers
from peer.pointers import private_folder
from protocols.errors import GossamerError

FREE_BYTES_MIN = 1 << 30
OPEN_FILES_MIN = 1024
RELEASED_UNIX_S = 1_735_689_600  # start of 2025: a clock before it was never set
ADDRESS_WAIT_S = 0.0  # a doctor does not wait for files that may come


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    what: str
    ok: bool
    detail: str


def examine(config: HostConfig) -> Iterator[Finding]:
    """Findings as they come; the network's comes last and may take a minute."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", _python),
        ("torch", lambda: _torch(config.device)),
        ("folder data", lambda: _folder(config.data_dir)),
        ("folder cache", lambda: _folder(config.cache_dir)),
        ("folder runtime", lambda: _folder(config.runtime_dir)),
        ("open files", _open_files),
        ("clock", _clock),
        ("port", lambda: _port(config)),
        ("network", lambda: _network(config)),
    ]
    for what, check in checks:
        yield _examine_one(what, check)


def _examine_one(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what=what, ok=True, detail=check())
    except (GossamerError, OSError, ImportError) as error:
        return Finding(what=what, ok=False, detail=str(error))


def _python() -> str:
    found = ".".join(map(str, sys.version_info[:3]))
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        raise GossamerError(f"{found}: Gossamer needs 3.10, 3.11 or 3.12")
    return found


def _torch(device: str) -> str:
    import torch

    from peer.compute.device import pick_device

    return f"{torch.__version__} on {pick_device(device)}, {torch.get_num_threads()} threads"


def _folder(folder: Path) -> str:
    private_folder(folder)
    with tempfile.NamedTemporaryFile(dir=folder):
        pass
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < FREE_BYTES_MIN:
        raise GossamerError(f"{folder}: only {free_bytes >> 20} MiB free; checkpoints need room")
    return f"{folder}, {free_bytes >> 30} GiB free"


def _open_files() -> str:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < OPEN_FILES_MIN:
        raise GossamerError(f"{limit} allowed: raise it with `ulimit -n {OPEN_FILES_MIN * 4}`")
    return f"{limit} allowed"


def _clock() -> str:
    now_unix_s = time.time()
    if now_unix_s < RELEASED_UNIX_S:
        raise GossamerError("the clock was never set: switch on network time (timedatectl set-ntp true)")
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_unix_s))


def _port(config: HostConfig) -> str:
    port = DEFAULT_PORT if config.port is None else config.port
    if port and not is_port_free(port):
        if config.port is None:
            return f"{port} is taken: a peer would choose another"
        raise GossamerError(f"{port} is taken by another program: choose another --port, or end that program")
    return f"{port or 'any'} is free"


def _network(config: HostConfig) -> str:
    """Really start the libp2p daemon; with initial peers, really join through them (which also compares the clocks)."""
    initial = read_initial_peers(config.initial_peers, wait_s=ADDRESS_WAIT_S)
    return asyncio.run(_join(config, initial))


async def _join(config: HostConfig, initial: tuple[str, ...]) -> str:
    from dht.identity import Identity
    from dht.node import DhtNode

    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        began_s = time.monotonic()
        node = await DhtNode.start(
            Identity.load_or_create(Path(folder) / "identity.key"),
            host_maddrs=("/ip4/127.0.0.1/tcp/0",),
            initial_peers=initial,
            use_relay=False,
            startup_timeout_s=config.startup_timeout_s,
        )
        took_s = time.monotonic() - began_s
        offset_s = node.clock_offset_s
        await node.close()
    ran = f"libp2p daemon ran on {os.uname().machine}, {took_s:.1f} s"
    if not initial:
        return f"{ran}; give --initial-peers to try a swarm"
    return f"{ran}; joined through {len(initial)} initial peer(s), clock offset {offset_s:+.2f} s"
