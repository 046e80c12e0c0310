"""One replica of each stage in this process, trained as a run would train it; and all that a study may do to it.

Stages are those of `peer.model`, each with the optimizer of the product. A stage that some rows skip is the identity
for them, forward and backward (Crucible's bypass); a stage's gradient is divided by the rows that ran it.

Shape suffixes: B rows, L tokens, D model width.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from benchmarks.recovery_sizes import Size
from peer.compute.flat import FlatStage
from peer.compute.inner_optimizer import InnerOptimizer
from peer.compute.refit import Kept
from peer.config import HostConfig
from peer.data import TokenData, load_data
from peer.model.stage import FirstStage, MiddleStage, build_stage
from protocols.checkfree import RATE_BOOST
from protocols.run_spec import RunSpec

ORIGINATOR = "recovery"
NORM_MEMORY = 0.9  # of the smoothed gradient norm, a round
VALIDATION_ROWS = 64  # in one pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """A stage with its optimizer, copied."""

    weights: Tensor
    moment: Tensor
    square: Tensor
    steps: Tensor
    ramp_steps_left: int
    is_boosted: bool
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything that training goes on from."""

    stages: tuple[StageState, ...]
    round: int
    kept: tuple[tuple[Tensor, ...], ...]


class Trainer:
    """A run of one originator and one microbatch a round, with the text of its seed."""

    def __init__(self, size: Size, spec: RunSpec) -> None:
        self.spec, self.size = spec, size
        self.order = tuple(range(spec.num_stages))
        self.round = 0
        modules = [build_stage(spec, stage).to(size.device) for stage in self.order]
        self.first = cast(FirstStage, modules[0])
        self.middle: dict[int, MiddleStage] = {
            stage: cast(MiddleStage, module) for stage, module in enumerate(modules) if stage
        }
        self.flats = [FlatStage(module) for module in modules]
        self.optimizers = [InnerOptimizer(spec, flat) for flat in self.flats]
        self.boosted: set[int] = set()
        self.norms = [0.0] * spec.num_stages
        self.kept: deque[tuple[Tensor, ...]] = deque(maxlen=size.kept_microbatches)
        self._data = load_data(spec, HostConfig().cache_dir)
        self._validation = validation_text(self._data, size)

    # ---- training ----

    def batch(self) -> tuple[Tensor, Tensor]:
        """The text of this round: tokens and targets, [B, L]."""
        size = self.spec.rounds
        tokens_BL, targets_BL = self._data.sample(
            self.spec.seed, self.round, ORIGINATOR, 0, size.rows, size.seq_len
        )
        return tokens_BL.to(self.size.device), targets_BL.to(self.size.device)

    def train(self, skips: Mapping[int, Tensor] | None = None) -> float:
        """A round, all stages in turn; `skips[stage]` [B]: the rows that pass it by. The loss (nats a token)."""
        tokens_BL, targets_BL = self.batch()
        loss = self.accumulate(tokens_BL, targets_BL, self.order, skips or {})
        self.step()
        return loss

    def accumulate(
        self, tokens_BL: Tensor, targets_BL: Tensor, order: Sequence[int], skips: Mapping[int, Tensor]
    ) -> float:
        """Add the gradient of some rows along `order`, which begins with stage 0; their mean loss."""
        rows = len(tokens_BL)
        with self._precision():
            x_BLD, boundaries = self._forward(tokens_BL, order, skips)
            loss = self.first.loss(x_BLD, targets_BL)
        (loss * rows).backward()
        for stage in order:
            num_rows = rows - int(skips[stage].sum()) if stage in skips else rows
            self.optimizers[stage].rows[False] += num_rows
        self.optimizers[0].rows[True] += rows
        if tuple(order) == self.order:
            self._keep(boundaries, skips)
        return float(loss.detach())

    def _forward(
        self, tokens_BL: Tensor, order: Sequence[int], skips: Mapping[int, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """What the last stage gives, and what each gave."""
        x_BLD = self.first.embed(tokens_BL)
        boundaries = [x_BLD.detach()]
        for stage in order[1:]:
            skipped_B = skips.get(stage)
            if skipped_B is None:
                x_BLD = self.middle[stage](x_BLD)
            elif not bool(skipped_B.all()):
                x_BLD = torch.where(
                    skipped_B.to(x_BLD.device)[:, None, None], x_BLD, self.middle[stage](x_BLD)
                )
            boundaries.append(x_BLD.detach())
        return x_BLD, boundaries

    def _precision(self) -> AbstractContextManager[object]:
        """As in `StageRuntime`."""
        if self.spec.optimizer.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.size.device, dtype=torch.bfloat16)

    def _keep(self, boundaries: Sequence[Tensor], skips: Mapping[int, Tensor]) -> None:
        """What peers have in their stashes anyway; only rows that ran everything."""
        if skips:
            ran_all_B = ~torch.stack(list(skips.values())).any(dim=0)
            boundaries = [boundary_BLD[ran_all_B] for boundary_BLD in boundaries]
        if len(boundaries[0]):
            self.kept.append(tuple(boundaries))

    def step(self) -> None:
        """Close the round."""
        self.round += 1
        for stage, optimizer in enumerate(self.optimizers):
            norm = optimizer.step(self.round)
            if norm > 0:
                before = self.norms[stage] or norm
                self.norms[stage] = NORM_MEMORY * before + (1 - NORM_MEMORY) * norm

    @torch.inference_mode()
    def validate(self, missing: Collection[int] = ()) -> float:
        """Loss on held-out text without the `missing` stages, nats a token."""
        order = [stage for stage in self.order if stage not in missing]
        with self._precision():
            losses = [
                float(self.first.loss(self._forward(tokens_BL, order, {})[0], targets_BL))
                for tokens_BL, targets_BL in self._validation
            ]
        return sum(losses) / len(losses)

    # ---- loss and repair ----

    def boundaries_of(self, first: int, last: int) -> list[Kept]:
        """What crossed the borders of stages `first` to `last` in the last microbatches."""
        return [Kept(one[first - 1], one[last]) for one in self.kept]

    def set_weights(
        self, stage: int, weights: Tensor | Mapping[str, Tensor], *, boosted: bool = False
    ) -> None:
        """Other weights, flat or by name; Adam starts anew with a warm-up, perhaps at CheckFree's higher rate."""
        flat = self.flats[stage]
        with torch.no_grad():
            if isinstance(weights, Tensor):
                flat.weights.copy_(weights)
            else:
                for name, view in flat.by_name(flat.weights).items():
                    view.copy_(weights[name])
        self.restart_adam(stage, boosted=boosted)

    def restart_adam(self, stage: int, *, boosted: bool = False) -> None:
        self._build_optimizer(stage, boosted=boosted)
        self.optimizers[stage].restart()

    def _build_optimizer(self, stage: int, *, boosted: bool) -> None:
        spec = self.spec
        if boosted:
            rate = RATE_BOOST * spec.optimizer.lr
            spec = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"lr": rate})})
        self.boosted = self.boosted | {stage} if boosted else self.boosted - {stage}
        self.optimizers[stage] = InnerOptimizer(spec, self.flats[stage])

    def snapshot(self) -> State:
        stages = tuple(
            StageState(
                weights=self.flats[stage].weights.clone(),
                moment=optimizer.moment.clone(),
                square=optimizer.square.clone(),
                steps=optimizer.steps.clone(),
                ramp_steps_left=optimizer.ramp_steps_left,
                is_boosted=stage in self.boosted,
                norm=self.norms[stage],
            )
            for stage, optimizer in enumerate(self.optimizers)
        )
        return State(stages=stages, round=self.round, kept=tuple(self.kept))

    def restore(self, state: State) -> None:
        for stage, saved in enumerate(state.stages):
            self._build_optimizer(stage, boosted=saved.is_boosted)
            optimizer = self.optimizers[stage]
            self.flats[stage].weights.copy_(saved.weights)
            self.flats[stage].gradient.zero_()
            optimizer.moment.copy_(saved.moment)
            optimizer.square.copy_(saved.square)
            optimizer.steps.copy_(saved.steps)
            optimizer.ramp_steps_left = saved.ramp_steps_left
            self.norms[stage] = saved.norm
        self.round = state.round
        self.kept.clear()
        self.kept.extend(state.kept)


def validation_text(data: TokenData, size: Size) -> list[tuple[Tensor, Tensor]]:
    """The same held-out windows for everyone, in passes of VALIDATION_ROWS."""
    num_passes = max(1, size.validation_tokens // (VALIDATION_ROWS * size.seq_len))
    passes = [data.validation_batch(index, VALIDATION_ROWS, size.seq_len) for index in range(num_passes)]
    return [(tokens_BL.to(size.device), targets_BL.to(size.device)) for tokens_BL, targets_BL in passes]


def training_skips(spec: RunSpec, round_: int, share: float, stages: Sequence[int]) -> dict[int, Tensor]:
    """`skip_train_share`: so many rows of a round, each of which passes one of `stages` by; from seed and round."""
    draws = random.Random(f"{spec.seed}/{round_}/skip")
    rows = spec.rounds.rows
    skips: dict[int, Tensor] = {}
    for row in draws.sample(range(rows), round(share * rows)):
        stage = draws.choice(stages)
        skips.setdefault(stage, torch.zeros(rows, dtype=torch.bool))[row] = True
    return skips
