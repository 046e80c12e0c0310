"""Boundary refit on stages of the product: bounded, never worse than its start, and it leaves gradients alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from peer.compute.flat import FlatStage
from peer.compute.refit import Kept, refit
from peer.model.stage import build_stage
from protocols.errors import LocalProtocolError
from tests.peer.compute.replica import a_spec

SPEC = a_spec(num_stages=5)
WIDTH = SPEC.model.hidden_size


def a_lost_stage(stage: int) -> nn.Module:
    """One that does something: first weights are near the identity."""
    module = build_stage(SPEC, stage)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return module


@torch.no_grad()
def kept_of(*lost: nn.Module, microbatches: int = 4, rows: int = 4, seed: int = 0) -> list[Kept]:
    """What neighbours have: inputs, and what came out behind the lost stages."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(microbatches):
        in_BLD = torch.randn(rows, 12, WIDTH, generator=generator)
        found.append(Kept(in_BLD, nn.Sequential(*lost)(in_BLD)))
    return found


def weights_of(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def distance(stages: Sequence[nn.Module], kept: list[Kept]) -> float:
    with torch.no_grad():
        error = sum(float((nn.Sequential(*stages)(one.in_BLD) - one.out_BLD).square().sum()) for one in kept)
        return error / sum(float((one.in_BLD - one.out_BLD).square().sum()) for one in kept)


def test_a_refit_brings_a_stage_closer_on_text_that_it_never_saw():
    lost = a_lost_stage(2)
    rebuilt = build_stage(SPEC, 3)
    unseen = kept_of(lost, seed=9)
    before = distance([rebuilt], unseen)
    outcome = refit([rebuilt], kept_of(lost, microbatches=16), steps=64, lr=4e-3)
    assert outcome.error_after < 0.85 * outcome.error_before
    assert distance([rebuilt], unseen) < 0.85 * before
    assert outcome.steps == 64
    assert 0 < outcome.best_step <= 64


def test_an_adjacent_pair_is_fitted_together():
    """Nobody kept what crossed the border between the two."""
    lost = [a_lost_stage(2), a_lost_stage(3)]
    rebuilt = [build_stage(SPEC, 1), build_stage(SPEC, 4)]
    before = [weights_of(module) for module in rebuilt]
    unseen = kept_of(*lost, seed=9)
    worse = distance(rebuilt, unseen)
    refit(rebuilt, kept_of(*lost, microbatches=8), steps=96, lr=4e-3)
    assert distance(rebuilt, unseen) < 0.95 * worse
    for module, old in zip(rebuilt, before, strict=True):
        assert any(not torch.equal(new, was) for new, was in zip(weights_of(module), old, strict=True))


def test_a_perfect_start_is_kept():
    """The lost stage itself: nothing that a step finds is better, so nothing changes, bit for bit."""
    lost = a_lost_stage(2)
    before = weights_of(lost)
    outcome = refit([lost], kept_of(lost), steps=32, lr=1e-2)
    assert outcome.best_step == 0
    assert outcome.error_after == outcome.error_before == 0.0
    assert all(torch.equal(new, old) for new, old in zip(weights_of(lost), before, strict=True))


@pytest.mark.parametrize("lr", [4e-3, 1.0, 1e30])
def test_it_never_leaves_a_stage_worse_than_it_was(lr: float):
    """Whatever the rate: the start is among the weights to choose from; a rate that breaks everything ends early."""
    rebuilt = build_stage(SPEC, 3)
    outcome = refit([rebuilt], kept_of(a_lost_stage(2)), steps=32, lr=lr)
    assert outcome.error_after <= outcome.error_before
    assert all(bool(weight.isfinite().all()) for weight in weights_of(rebuilt))


def test_a_bypass_has_error_one():
    """The unit of the error: a stage whose output projections are zero does nothing."""
    silent = build_stage(SPEC, 2)
    with torch.no_grad():
        for name, parameter in silent.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    outcome = refit([silent], kept_of(a_lost_stage(2)), steps=0, lr=1e-3)
    assert outcome.error_before == pytest.approx(1.0)
    assert (outcome.steps, outcome.best_step) == (0, 0)


def test_the_vectors_of_a_replica_are_written_in_place_and_its_gradient_is_left_alone():
    """A StageRuntime's parameters are views of two vectors; the refit must not unhook them."""
    module = build_stage(SPEC, 3)
    flat = FlatStage(module)
    flat.gradient.fill_(0.5)
    before = flat.weights.clone()
    refit([module], kept_of(a_lost_stage(2)), steps=16, lr=4e-3)
    assert not torch.equal(flat.weights, before)
    assert torch.equal(flat.gradient, torch.full_like(flat.gradient, 0.5))
    for parameter in module.parameters():
        assert parameter.untyped_storage().data_ptr() == flat.weights.untyped_storage().data_ptr()
        assert parameter.grad is not None


def test_the_same_refit_twice_gives_the_same_weights():
    first, second = build_stage(SPEC, 3), build_stage(SPEC, 3)
    for module in (first, second):
        refit([module], kept_of(a_lost_stage(2)), steps=16, lr=4e-3)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(first), weights_of(second), strict=True))


def test_rows_of_different_number_may_be_kept():
    """A neighbour may hold a last, smaller microbatch."""
    lost = a_lost_stage(2)
    kept = [*kept_of(lost, rows=4), *kept_of(lost, microbatches=1, rows=1, seed=5)]
    assert refit([build_stage(SPEC, 3)], kept, steps=16, lr=4e-3).steps == 16


def test_too_little_kept_is_refused():
    lost = a_lost_stage(2)
    with pytest.raises(LocalProtocolError, match="nothing was kept"):
        refit([lost], [], steps=8, lr=1e-3)
    with pytest.raises(LocalProtocolError, match="one row"):
        refit([lost], kept_of(lost, microbatches=1, rows=1), steps=8, lr=1e-3)
    odd = [Kept(torch.zeros(2, 12, WIDTH), torch.zeros(2, 11, WIDTH))]
    with pytest.raises(LocalProtocolError, match="differ in shape"):
        refit([lost], odd, steps=8, lr=1e-3)
