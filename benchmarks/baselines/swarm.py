"""Ours: a real swarm on this machine, one peer process a stage, each with its own libp2p daemon, DHT node and control
socket. Nothing is switched off but validation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from peer.control_client import ControlClient
from peer.launch import LaunchError, LocalSwarm
from protocols.run_spec import RunSpec

ROUND_LIMIT_S = 300.0
LOOK_EVERY_S = 0.25  # answering costs the originator 3 ms: looking on must not become the load


def train(spec: RunSpec, device: str = "cpu") -> Iterator[float]:
    """Mean loss of each round, for ever; the swarm leaves when the generator is closed."""
    layout = dict.fromkeys(range(spec.num_stages), 1)
    with TemporaryDirectory() as folder, LocalSwarm(spec, layout, Path(folder), {"device": device}) as swarm:
        originator = swarm.peers[0].client
        assert originator is not None, "it serves, so it was asked"
        for round_ in count(1):
            yield _loss_at(originator, round_)


def _loss_at(originator: ControlClient, round_: int) -> float:
    """Wait until the originator has finished `round_`."""
    deadline_s = time.monotonic() + ROUND_LIMIT_S
    while time.monotonic() < deadline_s:
        status = originator.status()
        if status.round >= round_:
            return float("nan") if status.loss is None else status.loss
        time.sleep(LOOK_EVERY_S)
    raise LaunchError(f"round {round_} did not come within {ROUND_LIMIT_S:.0f} s")
