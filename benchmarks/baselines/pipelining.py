"""`torch.distributed.pipelining`, schedule 1F1B over gloo on loopback: a synchronous pipeline without peers.

The same cut, except that a straight pipeline ends on its last rank: final norm, head and loss sit there. What crosses
a border is bf16, as in the swarm.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.workload import RoundOptimizer, training_rounds
from peer.model.stage import FirstStage, MiddleStage
from protocols.run_spec import RunSpec

TIMEOUT = timedelta(seconds=120)


def train(spec: RunSpec) -> Iterator[float]:
    """Mean loss of each round, for ever; the ranks end when the generator is closed."""
    context = get_context("spawn")
    results, sender = context.Pipe(duplex=False)
    with TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(spec.to_json(), rank, Path(folder) / "store", sender), daemon=True)
            for rank in range(spec.num_stages)
        ]
        for process in ranks:
            process.start()
        sender.close()
        try:
            while True:
                yield results.recv()
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _rank(spec_json: str, rank: int, store: Path, sender: Connection) -> None:
    """One process of the pipeline."""
    torch.set_num_threads(1)
    spec = RunSpec.from_json(spec_json)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=spec.num_stages, timeout=TIMEOUT
    )
    body = _First(spec) if rank == 0 else _Middle(spec, rank)
    ends = FirstStage(spec) if rank == spec.num_stages - 1 else None  # for its norm and head
    schedule = Schedule1F1B(
        _stage(spec, body, rank), spec.rounds.microbatches, loss_fn=ends and _loss(ends), scale_grads=False
    )
    parameters = [*body.parameters(), *(ends.parameters() if ends else ())]
    optimizer = RoundOptimizer(spec.optimizer, parameters, rows=spec.rounds.rows * spec.rounds.microbatches)
    for batches in training_rounds(spec):
        losses: list[Tensor] = []
        inputs = (torch.cat([batch.tokens_BL for batch in batches]),) if rank == 0 else ()
        targets = torch.cat([batch.targets_BL for batch in batches]) if ends else None
        schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        if ends:
            sender.send(torch.stack(losses).mean().item() / spec.rounds.rows)


def _stage(spec: RunSpec, body: nn.Module, rank: int) -> PipelineStage:
    boundary = torch.zeros(spec.boundary_shape, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.zeros(spec.boundary_shape[:2], dtype=torch.int64)
    return PipelineStage(
        body, rank, spec.num_stages, torch.device("cpu"),
        input_args=(tokens if rank == 0 else boundary,), output_args=(boundary,),
    )  # fmt: skip


class _First(nn.Module):
    """Embedding and first layers."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        self.first = FirstStage(spec)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return self.first.embed(tokens_BL).bfloat16()


class _Middle(nn.Module):
    """One slice of layers between two bf16 borders."""

    def __init__(self, spec: RunSpec, stage: int) -> None:
        super().__init__()
        self.middle = MiddleStage(spec, stage)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.middle(x_BLD.float()).bfloat16()


def _loss(ends: FirstStage):  # noqa: ANN202
    def loss(x_BLD: Tensor, targets_BL: Tensor) -> Tensor:
        return ends.loss(x_BLD.float(), targets_BL) * len(targets_BL)

    return loss
