"""What one border crossing costs: CPU ms of the four processes that a boundary tensor passes.

Two peers' transports on loopback, sender and receiver in processes of their own. The pause between sends is as in
training, where tensors come one at a time; back to back, wake-ups are shared and a hop looks cheaper than it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil
import torch
import uvloop

from benchmarks.bars import Report
from benchmarks.cpu import process_cpu_s
from benchmarks.workload import benchmark_spec
from dht.identity import Identity
from dht.node import DhtNode
from peer.transport import Transport
from protocols.messages import BoundaryActivation, Hop, WorkKey
from protocols.run_spec import RunSpec
from protocols.tensor_codec import encode

MODELS = ("nano", "micro")  # 256 and 512 KiB in bf16
PAUSE_S = 0.02
HOPS_WARM_UP = 30
ROLES = ("sending peer", "its libp2p daemon", "receiving peer's daemon", "receiving peer")
JOIN_LIMIT_S = 60.0


def run(*, quick: bool) -> Report:
    hops, repeats = (100, 1) if quick else (400, 3)
    facts = []
    for model in MODELS:
        samples = [uvloop.run(measure(benchmark_spec(model), hops)) for _ in range(repeats)]
        by_role = [median(sample[role] for sample in samples) for role in range(len(ROLES))]
        total = median(sum(sample) for sample in samples)
        kib = len(boundary(benchmark_spec(model), "sender", "receiver").packet.data) >> 10
        split = ", ".join(f"{role} {value:.2f}" for role, value in zip(ROLES, by_role, strict=True))
        facts.append((f"CPU ms of one hop of {kib} KiB", f"{total:.2f} ({split})"))
    return Report(facts=tuple(facts))


async def measure(spec: RunSpec, hops: int) -> list[float]:
    """CPU ms per hop, by role."""
    ours, theirs = get_context("spawn").Pipe()
    receiver = get_context("spawn").Process(target=_receive, args=(spec.to_json(), theirs))
    receiver.start()
    theirs.close()
    try:
        to, addresses = await asyncio.to_thread(ours.recv)
        return await with_transport(
            spec, addresses, lambda node, wire: _send(spec, node, wire, to, receiver.pid, hops)
        )
    finally:
        ours.close()
        await asyncio.to_thread(receiver.join)


async def _send(spec: RunSpec, node: DhtNode, wire: Transport, to: str, receiver_pid: int | None, hops: int):
    """Warm up, then count."""
    message = boundary(spec, node.peer_id, to)
    sender, receiver = psutil.Process(), psutil.Process(receiver_pid)
    processes = [sender, _daemon_of(sender), _daemon_of(receiver), receiver]
    for _ in range(HOPS_WARM_UP):
        await wire.send(to, message)
    before = [process_cpu_s(process) for process in processes]
    for _ in range(hops):
        await wire.send(to, message)
        await asyncio.sleep(PAUSE_S)
    return [1e3 * (process_cpu_s(p) - start) / hops for p, start in zip(processes, before, strict=True)]


def _receive(spec_json: str, pipe: Connection) -> None:
    """The other process: takes what comes until the pipe closes."""
    spec = RunSpec.from_json(spec_json)

    async def stay(node: DhtNode, _: Transport) -> None:
        pipe.send((node.peer_id, await node.visible_maddrs()))
        await asyncio.to_thread(pipe.poll, None)

    uvloop.run(with_transport(spec, (), stay))


async def with_transport(
    spec: RunSpec, initial_peers: tuple[str, ...], use: Callable[[DhtNode, Transport], Awaitable]
):
    """A peer's network and nothing else of it."""
    with TemporaryDirectory() as folder:
        node = await DhtNode.start(
            Identity.load_or_create(Path(folder) / "identity.key"),
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            initial_peers=initial_peers,
            run_ids=[spec.run_id],
            use_relay=False,
            startup_timeout_s=JOIN_LIMIT_S,
        )
        wire = await Transport.start(
            node.p2p, spec, on_message=lambda *_: None, on_unreachable=lambda _: None, count=lambda *_: None
        )
        try:
            return await use(node, wire)
        finally:
            await wire.close()
            await node.close()


def boundary(spec: RunSpec, sender: str, receiver: str) -> BoundaryActivation:
    """A first hop with a tensor of the run's size and codec."""
    x_BLD = torch.randn(spec.boundary_shape, generator=torch.Generator().manual_seed(spec.seed))
    return BoundaryActivation(
        key=WorkKey(sender, 1, 1), round=1, path=(Hop(0, sender), Hop(1, receiver)), hop=1, train=True,
        packet=encode(x_BLD, spec.boundary_codec),
    )  # fmt: skip


def _daemon_of(process: psutil.Process) -> psutil.Process:
    return next(child for child in process.children() if "p2pd" in child.name())
