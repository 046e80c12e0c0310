"""The inner step against plain torch, and what must not move."""

from __future__ import annotations

import math

import pytest
import torch

from peer.compute.flat import FlatStage
from peer.compute.inner_optimizer import RAMP_STEPS, InnerOptimizer, learning_rate
from peer.model.stage import build_stage, is_head
from protocols.run_spec import RunSpec, preset

SPEC = preset(
    "pico", rounds=dict(total_rounds=120, rows=16, seq_len=64), optimizer=dict(lr=1e-2, warmup_rounds=20)
)


def an_optimizer(stage: int, spec: RunSpec = SPEC) -> tuple[FlatStage, InnerOptimizer]:
    flat = FlatStage(build_stage(spec, stage))
    return flat, InnerOptimizer(spec, flat)


def test_the_rate_warms_up_linearly_and_ends_at_its_share() -> None:
    """Round counts from 1, since the rate belongs to the step that closes it."""
    assert learning_rate(SPEC, 1) == pytest.approx(1e-2 / 20)
    assert learning_rate(SPEC, 10) == pytest.approx(5e-3)
    assert learning_rate(SPEC, 20) == pytest.approx(1e-2)
    assert learning_rate(SPEC, 70) == pytest.approx(1e-2 * (0.1 + 0.9 / 2))
    assert learning_rate(SPEC, 120) == pytest.approx(1e-3)
    assert learning_rate(SPEC, 500) == pytest.approx(1e-3)


def test_three_steps_are_those_of_torch_with_clipping() -> None:
    """Same gradients, divided by hand: AdamW, decay on matrices alone, norm clipped over the whole stage."""
    flat, optimizer = an_optimizer(1)
    reference = {name: torch.nn.Parameter(w.clone()) for name, w in flat.by_name(flat.weights).items()}
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in reference.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in reference.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1.0,
        betas=(0.9, 0.95),
    )
    generator = torch.Generator().manual_seed(1)
    for round_ in (1, 2, 3):
        gradient = torch.randn(flat.size, generator=generator)
        flat.gradient.copy_(gradient * 12)
        optimizer.rows[False] = 12
        for name, part in flat.by_name(gradient).items():
            reference[name].grad = part.clone()
        expected_norm = torch.nn.utils.clip_grad_norm_(reference.values(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(SPEC, round_)
        adamw.step()
        assert optimizer.step(round_) == pytest.approx(expected_norm.item(), rel=1e-5)
        assert flat.gradient.abs().max() == 0
    for name, weight in flat.by_name(flat.weights).items():
        torch.testing.assert_close(weight, reference[name].detach(), atol=1e-6, rtol=1e-5)


def test_without_rows_nothing_changes() -> None:
    """A round of which this replica saw nothing: no decay, no moments, no count."""
    flat, optimizer = an_optimizer(1)
    before = flat.weights.clone()
    assert optimizer.step(1) == 0.0
    assert torch.equal(flat.weights, before)
    assert optimizer.steps.max() == 0


def test_head_and_body_are_divided_by_their_own_rows() -> None:
    """A loss pass whose backward never came back counts for the head alone."""
    flat, optimizer = an_optimizer(0)
    flat.gradient.fill_(6.0)
    optimizer.rows = {True: 3, False: 2}
    for name, mean in flat.by_name(optimizer.mean_gradient()).items():
        assert torch.equal(mean, torch.full_like(mean, 2.0 if is_head(name) else 3.0))


def test_a_part_without_rows_keeps_weights_and_moments() -> None:
    """All backward passes of the round were lost; the head still learns."""
    flat, optimizer = an_optimizer(0)
    before = {name: weight.clone() for name, weight in flat.by_name(flat.weights).items()}
    for name, gradient in flat.by_name(flat.gradient).items():
        gradient.fill_(1.0 if is_head(name) else 0.0)
    optimizer.rows[True] = 4
    assert optimizer.step(5) > 0
    for name, weight in flat.by_name(flat.weights).items():
        assert torch.equal(weight, before[name]) != is_head(name)
    assert sorted(set(optimizer.steps.tolist())) == [0.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_costs_the_round_and_nothing_else(value: float) -> None:
    """It must not reach the weights, nor Adam's moments, nor the next round."""
    flat, optimizer = an_optimizer(1)
    before = flat.weights.clone()
    flat.gradient[7] = value
    optimizer.rows[False] = 8
    assert optimizer.step(3) == 0.0
    assert optimizer.num_nonfinite == 1
    assert torch.equal(flat.weights, before)
    assert optimizer.moment.abs().max() == 0
    assert flat.gradient.isfinite().all()
    assert optimizer.step(4) == 0.0
    assert optimizer.num_nonfinite == 1


def test_after_a_restart_the_rate_ramps_up() -> None:
    """Adam's first step moves every weight by the rate, whatever the gradient: begin with a thirtieth."""
    flat, optimizer = an_optimizer(
        1, SPEC.model_copy(update=dict(optimizer=SPEC.optimizer.model_copy(update=dict(weight_decay=0.0))))
    )
    optimizer.restart()
    moves = []
    for _ in range(RAMP_STEPS + 1):
        before = flat.weights.clone()
        flat.gradient.fill_(1.0)
        optimizer.rows[False] = 1
        optimizer.step(20)
        moves.append((flat.weights - before).abs().max().item())
    assert moves[0] == pytest.approx(1e-2 / RAMP_STEPS, rel=1e-2)
    assert moves[RAMP_STEPS // 2] == pytest.approx(1e-2 * (RAMP_STEPS // 2 + 1) / RAMP_STEPS, rel=1e-2)
    assert moves[RAMP_STEPS] == pytest.approx(1e-2, rel=1e-2)
