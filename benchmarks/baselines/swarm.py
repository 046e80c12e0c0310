"""Ours: a real swarm on this machine, one peer process a stage, each with its own libp2p daemon, DHT node and control
socket. Nothing is switched off but validation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from peer.launch import LocalSwarm
from protocols.run_spec import RunSpec

ROUND_LIMIT_S = 300.0


def train(spec: RunSpec) -> Iterator[float]:
    """Mean loss of each round, for ever; the swarm leaves when the generator is closed."""
    layout = dict.fromkeys(range(spec.num_stages), 1)
    with TemporaryDirectory() as folder, LocalSwarm(spec, layout, Path(folder)) as swarm:
        for round_ in count(1):
            swarm.wait_round(round_, ROUND_LIMIT_S)
            yield next((status.loss for status in swarm.status() if status.loss is not None), float("nan"))
