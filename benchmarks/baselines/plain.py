"""Plain torch: the whole model in one process and one autograd graph. The floor of what the arithmetic costs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from benchmarks.workload import Batch, RoundOptimizer, training_rounds
from peer.model.stage import FirstStage, build_stage
from protocols.run_spec import RunSpec


def train(spec: RunSpec) -> Iterator[float]:
    """Mean loss of each round, for ever."""
    first = build_stage(spec, 0)
    middle = nn.Sequential(*(build_stage(spec, stage) for stage in range(1, spec.num_stages)))
    rows = spec.rounds.rows * spec.rounds.microbatches
    optimizer = RoundOptimizer(spec.optimizer, [*first.parameters(), *middle.parameters()], rows=rows)
    for batches in training_rounds(spec):
        losses = [_microbatch(first, middle, batch) for batch in batches]
        optimizer.step()
        yield sum(losses) / len(losses)


def _microbatch(first: FirstStage, middle: nn.Module, batch: Batch) -> float:
    """Adds this microbatch's gradient; the objective is the sum over rows of their mean token loss."""
    loss = first.loss(middle(first.embed(batch.tokens_BL)), batch.targets_BL)
    (loss * len(batch.tokens_BL)).backward()
    return loss.item()
