"""`torch.distributed.pipelining`, schedule 1F1B over gloo on loopback: a synchronous pipeline without peers.

The same cut, except that a straight pipeline ends on its last rank: final norm, head and loss sit there. Borders carry
fp32, since gloo never delivers bf16 (torch 2.13: the first round hangs); unencrypted loopback makes that cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.workload import Batch, RoundOptimizer, first_stage, training_rounds
from peer.model.stage import FirstStage, build_stage
from protocols.run_spec import RunSpec

TIMEOUT = timedelta(seconds=120)


def train(spec: RunSpec) -> Iterator[float]:
    """Mean loss of each round, for ever; the ranks end when the generator is closed."""
    context = get_context("spawn")
    results, sender = context.Pipe(duplex=False)
    with TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_rank, args=(spec.to_json(), rank, Path(folder) / "store", sender), daemon=True
            )
            for rank in range(spec.num_stages)
        ]
        for process in ranks:
            process.start()
        sender.close()
        try:
            while True:
                yield results.recv()
        finally:
            for process in ranks:  # all before the first is waited for, or its neighbours complain
                process.kill()
            for process in ranks:
                process.join()


def _rank(spec_json: str, rank: int, store: Path, results: Connection) -> None:
    """One process of the pipeline."""
    torch.set_num_threads(1)
    spec = RunSpec.from_json(spec_json)
    last = spec.num_stages - 1
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=spec.num_stages, timeout=TIMEOUT
    )
    body = _Embedding(first_stage(spec)) if rank == 0 else build_stage(spec, rank)
    ends = first_stage(spec) if rank == last else None  # for its norm and head
    schedule = Schedule1F1B(
        _pipeline_stage(spec, body, rank), spec.rounds.microbatches, loss_fn=_loss(ends), scale_grads=False
    )
    parameters = [*body.parameters(), *(ends.parameters() if ends else ())]
    optimizer = RoundOptimizer(spec.optimizer, parameters, rows=spec.rounds.rows * spec.rounds.microbatches)
    for batches in _rounds_seen_by(rank, spec):
        losses: list[Tensor] = []
        tokens = [torch.cat([batch.tokens_BL for batch in batches])] if rank == 0 else []
        targets = torch.cat([batch.targets_BL for batch in batches]) if rank == last else None
        schedule.step(*tokens, target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        if rank == last:
            results.send(torch.stack(losses).mean().item() / spec.rounds.rows)


def _rounds_seen_by(rank: int, spec: RunSpec) -> Iterator[list[Batch]]:
    """Only both ends read data."""
    if rank in (0, spec.num_stages - 1):
        return training_rounds(spec)
    return iter([[]] * spec.rounds.total_rounds)


def _pipeline_stage(spec: RunSpec, body: nn.Module, rank: int) -> PipelineStage:
    boundary = torch.zeros(spec.boundary_shape, requires_grad=True)
    tokens = torch.zeros(spec.boundary_shape[:2], dtype=torch.int64)
    return PipelineStage(
        body, rank, spec.num_stages, torch.device("cpu"),
        input_args=(boundary if rank else tokens,), output_args=(boundary,),
    )  # fmt: skip


class _Embedding(nn.Module):
    """The head of the pipeline: a first stage that only embeds."""

    def __init__(self, first: FirstStage) -> None:
        super().__init__()
        self.first = first

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return self.first.embed(tokens_BL)


def _loss(ends: FirstStage | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Sum over rows of the mean token loss; without `ends` it only tells the schedule that there is a backward."""

    def loss(x_BLD: Tensor, targets_BL: Tensor) -> Tensor:
        assert ends is not None, "only the last rank computes the loss"
        return ends.loss(x_BLD, targets_BL) * len(targets_BL)

    return loss
