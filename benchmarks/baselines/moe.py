"""A client-driven chain of `hivemind.moe` experts: every middle stage is an expert on its own server, the client
embeds, calls the experts one after the other, computes the loss and calls them back in reverse.

The library as it comes (fp32 on the wire), but for experts that step once a round like everybody here, instead of at
every backward; `moe_half` puts float16 on the wire as well. A server recomputes the forward in its backward, and
activations pass the client twice a stage: that is the design, and what the comparison is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from hivemind import DHT
from hivemind.moe import ModuleBackend, Server
from hivemind.moe.client.expert import create_remote_experts
from hivemind.moe.server.dht_handler import get_experts
from hivemind.proto.runtime_pb2 import CompressionType
from hivemind.utils.tensor_descr import BatchTensorDescriptor
from torch import nn

from benchmarks.cpu import kill_tree
from benchmarks.workload import Batch, RoundOptimizer, first_stage, training_rounds
from peer.model.stage import FirstStage, build_stage
from protocols.run_spec import RunSpec

LOOPBACK: dict[str, Any] = {
    "host_maddrs": ["/ip4/127.0.0.1/tcp/0"],
    "nat_port_map": False,
    "auto_nat": False,
    "use_relay": False,
}
START_S = 120.0


def train(spec: RunSpec, compression: int = CompressionType.NONE) -> Iterator[float]:
    """Mean loss of each round, for ever; the servers end when the generator is closed."""
    with ExitStack() as cleanup:
        # its forked helpers outlive a hasty end of their parents
        cleanup.callback(kill_tree, psutil.Process())
        dht = DHT(start=True, **LOOPBACK)
        cleanup.callback(dht.shutdown)
        addresses = [str(address) for address in dht.get_visible_maddrs()]
        uids = [f"stage.{stage}" for stage in range(1, spec.num_stages)]
        for uid in uids:
            cleanup.enter_context(closing(_ServerProcess(spec, uid, addresses, compression)))
        experts = nn.Sequential(*create_remote_experts(get_experts(dht, uids), dht))
        yield from _rounds(spec, first_stage(spec), experts)


def _rounds(spec: RunSpec, first: FirstStage, experts: nn.Module) -> Iterator[float]:
    rows = spec.rounds.rows * spec.rounds.microbatches
    optimizer = RoundOptimizer(spec.optimizer, first.parameters(), rows=rows)
    for batches in training_rounds(spec):
        losses = [_microbatch(first, experts, batch) for batch in batches]
        optimizer.step()
        yield sum(losses) / len(losses)


def _microbatch(first: FirstStage, experts: nn.Module, batch: Batch) -> float:
    loss = first.loss(experts(first.embed(batch.tokens_BL)), batch.targets_BL)
    (loss * len(batch.tokens_BL)).backward()
    return loss.item()


class _ServerProcess:
    """A server in its own process: it forks helpers, so it may not be a daemon and must be asked to end."""

    def __init__(self, spec: RunSpec, uid: str, addresses: list[str], compression: int) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(spec.to_json(), uid, addresses, compression, theirs)
        )
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_S) or self._pipe.recv() != "ready":
            raise RuntimeError(f"server of {uid} did not start within {START_S:.0f} s")

    def close(self) -> None:
        self._pipe.close()
        self._process.join(timeout=10)


def _serve(spec_json: str, uid: str, addresses: list[str], compression: int, pipe: Connection) -> None:
    """Serve one expert until the client's end of the pipe closes."""
    torch.set_num_threads(1)
    spec = RunSpec.from_json(spec_json)
    _, length, width = spec.boundary_shape
    boundary = BatchTensorDescriptor(length, width, dtype=torch.float32, compression=compression)
    module = build_stage(spec, int(uid.split(".")[1]))
    backend = ModuleBackend(
        uid, module, optimizer=_OnceARound(spec, module), args_schema=(boundary,), outputs_schema=boundary,
        max_batch_size=spec.rounds.rows,
    )  # fmt: skip
    dht = DHT(initial_peers=addresses, start=True, **LOOPBACK)
    server = Server(dht, {uid: backend}, num_connection_handlers=1, start=True)
    pipe.send("ready")
    pipe.poll(None)
    server.shutdown()


class _OnceARound:
    """The expert's optimizer: called after each backward, it steps after the last one of a round."""

    def __init__(self, spec: RunSpec, module: nn.Module) -> None:
        self._microbatches = spec.rounds.microbatches
        rows = spec.rounds.rows * self._microbatches
        self._optimizer = RoundOptimizer(spec.optimizer, module.parameters(), rows=rows)
        self._backwards = 0

    def step(self) -> None:
        self._backwards += 1
        if self._backwards % self._microbatches == 0:
            self._optimizer.step()

    def zero_grad(self) -> None:
        """The step has done it."""
