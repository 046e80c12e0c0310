"""The inner step: mean gradient, clipping, AdamW, and the learning rate of a round.

Invariant: a part (body, head) that no microbatch contributed to keeps its weights and its moments.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from peer.compute.flat import FlatStage
from protocols.run_spec import RunSpec

RAMP_STEPS = 30  # after a rebuild Adam knows nothing: its first steps are signs, so start small
NORM_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


def learning_rate(spec: RunSpec, round_: int) -> float:
    """Of the step after which the weights have seen `round_` rounds: linear warm-up, then cosine."""
    optimizer, last = spec.optimizer, spec.rounds.total_rounds
    if round_ < optimizer.warmup_rounds:
        return optimizer.lr * max(round_, 1) / optimizer.warmup_rounds
    progress = min(1.0, (round_ - optimizer.warmup_rounds) / max(1, last - optimizer.warmup_rounds))
    share = optimizer.lr_min_share + (1 - optimizer.lr_min_share) * 0.5 * (1 + math.cos(math.pi * progress))
    return optimizer.lr * share


class InnerOptimizer:
    """AdamW over the parts of a flat stage; its moments are vectors in the same order."""

    def __init__(self, spec: RunSpec, flat: FlatStage) -> None:
        self._spec = spec
        self._flat = flat
        self.rows = {False: 0, True: 0}  # that contributed to the gradient, by Part.head
        self.moment = torch.zeros_like(flat.weights)
        self.square = torch.zeros_like(flat.weights)
        # one count a part, where the fused kernel wants it: in fp32 and on the device
        self.steps = torch.zeros(len(flat.parts), dtype=torch.float32, device=flat.weights.device)
        self.ramp_steps_left = 0
        self.num_nonfinite = 0
        self._variables = [nn.Parameter(flat.weights[part.span]) for part in flat.parts]
        self._adamw = self._build()

    def _build(self) -> torch.optim.AdamW:
        optimizer = self._spec.optimizer
        groups = [
            {"params": [variable], "weight_decay": optimizer.weight_decay if part.decayed else 0.0}
            for part, variable in zip(self._flat.parts, self._variables, strict=True)
        ]
        adamw = torch.optim.AdamW(
            groups, lr=optimizer.lr, betas=(optimizer.beta1, optimizer.beta2), fused=True
        )
        for index, (part, variable) in enumerate(zip(self._flat.parts, self._variables, strict=True)):
            adamw.state[variable] = {
                "step": self.steps[index],
                "exp_avg": self.moment[part.span],
                "exp_avg_sq": self.square[part.span],
            }
        return adamw

    def mean_gradient(self) -> Tensor:
        """The accumulated gradient, each part divided by the rows that contributed to it."""
        mean = self._flat.gradient.clone()
        for part in self._flat.parts:
            mean[part.span].div_(max(1, self.rows[part.head]))
        return mean

    def step(self, round_: int) -> float:
        """Norm of the mean gradient before clipping; 0.0 when there was none, or none that is finite."""
        if not any(self.rows.values()):
            return 0.0
        gradient = self._flat.gradient
        for part, variable in zip(self._flat.parts, self._variables, strict=True):
            rows = self.rows[part.head]
            variable.grad = gradient[part.span].div_(rows) if rows else None
        norm = float(torch.linalg.vector_norm(gradient))
        if math.isfinite(norm):
            self._apply(norm, learning_rate(self._spec, round_))
        else:
            self.num_nonfinite += 1
        self.forget_gradient()
        return norm if math.isfinite(norm) else 0.0

    def _apply(self, norm: float, rate: float) -> None:
        if self.ramp_steps_left:
            rate *= 1 - (self.ramp_steps_left - 1) / RAMP_STEPS
            self.ramp_steps_left -= 1
        if norm > self._spec.optimizer.clip_norm:
            self._flat.gradient.mul_(self._spec.optimizer.clip_norm / (norm + NORM_EPS))
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()

    def forget_gradient(self) -> None:
        self._flat.gradient.zero_()
        self.rows = {False: 0, True: 0}

    def restart(self) -> None:
        """The weights are other ones now, and no moments came with them."""
        for state in (self.moment, self.square, self.steps):
            state.zero_()
        self.ramp_steps_left = RAMP_STEPS
        self.forget_gradient()
