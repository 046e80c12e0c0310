"""A trainer of the recovery studies, small enough for a test."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.recovery_sizes import TINY, Size
from benchmarks.recovery_trainer import Trainer

SMALL = replace(
    TINY,
    seeds=(1,),
    base_rounds=13,
    tail_rounds=5,
    churn_rounds=6,
    target_rounds=12,
    crucible_rounds=6,
    validation_tokens=4_096,
    validate_every=2,
    kept_microbatches=4,
    shadow_every=5,
    checkpoint_every=5,
    refit_steps=4,
)


def a_trainer(rounds: int = 0, size: Size = SMALL) -> Trainer:
    trainer = Trainer(size, size.spec(1))
    for _ in range(rounds):
        trainer.train()
    return trainer


def weights(trainer: Trainer) -> list[Tensor]:
    return [flat.weights.clone() for flat in trainer.flats]


def changed(trainer: Trainer, before: list[Tensor]) -> set[int]:
    """Stages whose weights are other ones now."""
    return {stage for stage, old in enumerate(before) if not torch.equal(trainer.flats[stage].weights, old)}
