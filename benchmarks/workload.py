"""What every contender trains: one RunSpec, the same text in the same order, the same optimizer.

All of them do the same round: `rounds.microbatches` microbatches of 1,024 tokens, gradients added up, divided by the
rows, clipped, one AdamW step. Only the way the layers are spread over processes differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from peer.config import HostConfig
from peer.data import load_data
from peer.model.stage import FirstStage, build_stage
from protocols.run_spec import OptimizerSpec, RunSpec, preset

MICROBATCHES = 8  # more than stages, so that a 1F1B schedule has no fewer microbatches than it asks for
ORIGINATOR = "benchmark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One microbatch."""

    tokens_BL: Tensor
    targets_BL: Tensor

    def to(self, device: str) -> Batch:
        return Batch(tokens_BL=self.tokens_BL.to(device), targets_BL=self.targets_BL.to(device))


def benchmark_spec(model: str) -> RunSpec:
    """`micro` and `nano` hold 1,024 tokens a microbatch: rows x seq_len = 4 x 256 and 8 x 128."""
    rounds = {"microbatches": MICROBATCHES, "eval_every": 0, "total_rounds": 100_000, "window": 6, "slots": 6}
    # a busy machine must not look like a dead peer
    patience = {"attempt_s": 120.0, "round_s": 300.0, "lease_s": 600.0}
    return preset(model, name=f"benchmark-{model}", seed=1, rounds=rounds, liveness=patience)


def tokens_per_round(spec: RunSpec) -> int:
    return spec.rounds.microbatches * spec.tokens_per_microbatch


def training_rounds(spec: RunSpec) -> Iterator[list[Batch]]:
    """The microbatches of round 0, 1, ...: what a swarm with one originator of that name would draw."""
    data = load_data(spec, HostConfig().cache_dir)
    size = spec.rounds
    for round_number in range(size.total_rounds):
        batches = []
        for counter in range(size.microbatches):
            tokens_BL, targets_BL = data.sample(
                spec.seed, round_number, ORIGINATOR, counter, size.rows, size.seq_len
            )
            batches.append(Batch(tokens_BL=tokens_BL, targets_BL=targets_BL))
        yield batches


def first_stage(spec: RunSpec) -> FirstStage:
    stage = build_stage(spec, 0)
    assert isinstance(stage, FirstStage), "stage 0 is"
    return stage


class RoundOptimizer:
    """Divide by the rows, clip, AdamW, zero: what a stage does at the end of a round."""

    def __init__(self, spec: OptimizerSpec, parameters: Iterable[nn.Parameter], *, rows: int) -> None:
        self._parameters = list(parameters)
        self._rows = rows
        self._clip_norm = spec.clip_norm
        matrices = [parameter for parameter in self._parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in self._parameters if parameter.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=spec.lr, betas=(spec.beta1, spec.beta2), fused=True,
        )  # fmt: skip

    def step(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self._rows)
        nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
