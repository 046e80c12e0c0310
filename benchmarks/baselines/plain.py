"""Plain torch: the whole model in one process and one autograd graph. The floor of what the arithmetic costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from benchmarks.workload import Batch, RoundOptimizer, first_stage, training_rounds
from peer.model.stage import FirstStage, build_stage
from protocols.run_spec import RunSpec


def train(spec: RunSpec, device: str = "cpu") -> Iterator[float]:
    """Mean loss of each round, for ever."""
    first = first_stage(spec).to(device)
    middle = nn.Sequential(*(build_stage(spec, stage) for stage in range(1, spec.num_stages))).to(device)
    rows = spec.rounds.rows * spec.rounds.microbatches
    optimizer = RoundOptimizer(spec.optimizer, [*first.parameters(), *middle.parameters()], rows=rows)
    for batches in training_rounds(spec):
        losses = []
        for batch in batches:
            with _products(spec, device):
                loss = _forward(first, middle, batch.to(device))
            # the objective is the sum over rows of their mean token loss
            (loss * spec.rounds.rows).backward()
            losses.append(loss.detach())
        optimizer.step()
        yield torch.stack(losses).mean().item()


def _forward(first: FirstStage, middle: nn.Module, batch: Batch) -> Tensor:
    return first.loss(middle(first.embed(batch.tokens_BL)), batch.targets_BL)


def _products(spec: RunSpec, device: str) -> AbstractContextManager[object]:
    """Matrix products in the run's dtype, as a stage does them."""
    if spec.optimizer.dtype == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)
