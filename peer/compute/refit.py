"""Boundary refit: teach a rebuilt stage what the lost one did, from inputs and outputs that its neighbours still hold.

    min over W of  || g_W(h_in) - h_out ||^2 / || h_in - h_out ||^2        h_in, h_out: kept boundary activations

The error is 1.0 for a stage that does nothing (a bypass) and 0.0 for the lost stage itself. Stages in a row are fitted
together: what crossed the border between them is lost with them. CheckFree's convergence bound (arXiv 2506.15461,
eq. 1) is in this distance between functions, not between weights.

Every fourth row is held out; the weights kept are those of the least error there, the start included.

Shape suffixes: N rows of all kept microbatches, B rows of one step, L tokens, D model width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protocols.errors import LocalProtocolError

HELD_OUT_EVERY = 4  # rows; the newest are as well represented there as the oldest
CHECK_EVERY = 16  # steps between looks at the held-out rows
BETAS = (0.9, 0.95)
CLIP_NORM = 1.0
EPS = 1e-12  # of an error's denominator: a stage that did nothing at all


@dataclass(frozen=True, slots=True)
class Kept:
    """One microbatch at both borders of what was lost."""

    in_BLD: Tensor
    out_BLD: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """What came of it; errors of the held-out rows as above."""

    error_before: float
    error_after: float
    steps: int  # taken
    best_step: int  # of the weights that were kept; 0: those of the start


def refit(
    stages: Sequence[nn.Module], kept: Sequence[Kept], *, steps: int, lr: float, rows: int | None = None
) -> Refit:
    """Fit `stages` (of `peer.model`, in the order of the path) in place; `steps` bounds the work.

    A step takes `rows` rows, or as many as the first kept microbatch has. The rate falls linearly to nothing.
    All work is on copies: gradients of the stages are left alone, and their weights change once, at the end, in place.
    LocalProtocolError where too little was kept, or in other shapes than the stages have.
    """
    train, held_out = _split(kept)
    trial = nn.Sequential(*(copy.deepcopy(stage) for stage in stages))
    parameters = list(trial.parameters())
    adam = torch.optim.AdamW(parameters, lr=lr, betas=BETAS, weight_decay=0.0)
    step_rows = min(rows or len(kept[0].in_BLD), len(train.in_BLD))
    before = after = _error(trial, held_out)
    best, best_step, step = _weights(parameters), 0, 0
    for step in range(1, steps + 1):
        for group in adam.param_groups:
            group["lr"] = lr * (1 - (step - 1) / steps)
        _step(trial, adam, _rows_of_step(train, step, step_rows))
        if step % CHECK_EVERY == 0 or step == steps:
            error = _error(trial, held_out)
            if not math.isfinite(error):
                break
            if error < after:
                after, best, best_step = error, _weights(parameters), step
    _write(stages, best)
    return Refit(error_before=before, error_after=after, steps=step, best_step=best_step)


def _split(kept: Sequence[Kept]) -> tuple[Kept, Kept]:
    """Rows to learn from, and rows to judge by."""
    if not kept or any(one.in_BLD.shape != one.out_BLD.shape for one in kept):
        raise LocalProtocolError("nothing was kept, or inputs and outputs differ in shape")
    in_NLD = torch.cat([one.in_BLD.detach().float() for one in kept])
    out_NLD = torch.cat([one.out_BLD.detach().float() for one in kept])
    if len(in_NLD) < 2:
        raise LocalProtocolError("one row cannot both teach and judge")
    is_held_out_N = torch.arange(len(in_NLD)) % HELD_OUT_EVERY == 1
    return (
        Kept(in_NLD[~is_held_out_N], out_NLD[~is_held_out_N]),
        Kept(in_NLD[is_held_out_N], out_NLD[is_held_out_N]),
    )


def _rows_of_step(kept: Kept, step: int, rows: int) -> Kept:
    """The next rows, in turn, around the end."""
    chosen_B = (torch.arange(rows) + (step - 1) * rows) % len(kept.in_BLD)
    return Kept(kept.in_BLD[chosen_B], kept.out_BLD[chosen_B])


def _step(trial: nn.Module, adam: torch.optim.Optimizer, some: Kept) -> None:
    with torch.enable_grad():
        _distance(trial, some).backward()
    nn.utils.clip_grad_norm_(trial.parameters(), CLIP_NORM)
    adam.step()
    adam.zero_grad(set_to_none=True)


@torch.no_grad()
def _error(trial: nn.Module, some: Kept) -> float:
    return float(_distance(trial, some))


def _distance(trial: nn.Module, some: Kept) -> Tensor:
    return F.mse_loss(trial(some.in_BLD), some.out_BLD) / (F.mse_loss(some.in_BLD, some.out_BLD) + EPS)


def _weights(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def _write(stages: Sequence[nn.Module], weights: Sequence[Tensor]) -> None:
    targets = [parameter for stage in stages for parameter in stage.parameters()]
    for parameter, weight in zip(targets, weights, strict=True):
        parameter.copy_(weight)
