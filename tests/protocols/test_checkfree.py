"""CheckFree's mix against its formula (bar A2)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocols.checkfree import NORM_FLOOR, is_swapped, left_share, mix, swapped_order, twin
from protocols.errors import LocalProtocolError
from protocols.stage_order import is_legal

norms = st.floats(min_value=0.0, max_value=1e12)


def a_stage(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.layers.1.mlp.up_proj.weight": torch.randn(6, 4, generator=generator),
        "model.layers.1.input_layernorm.weight": torch.randn(4, generator=generator),
    }


@given(left_norm=norms, right_norm=norms)
def test_the_mix_is_the_formula(left_norm: float, right_norm: float) -> None:
    """Zero norms included: two stages that never trained give the plain average."""
    left, right = a_stage(1), a_stage(2)
    w_left, w_right = left_norm + NORM_FLOOR, right_norm + NORM_FLOOR
    for name, mixed in mix(left, right, left_norm, right_norm).items():
        expected = (w_left * left[name].double() + w_right * right[name].double()) / (w_left + w_right)
        torch.testing.assert_close(mixed.double(), expected, atol=1e-6, rtol=0)


@given(left_norm=norms, right_norm=norms)
def test_a_mix_of_equal_neighbours_is_the_neighbour(left_norm: float, right_norm: float) -> None:
    """Bit for bit, whatever the weights."""
    neighbour = a_stage(3)
    for name, mixed in mix(neighbour, a_stage(3), left_norm, right_norm).items():
        assert torch.equal(mixed, neighbour[name])


@given(left_norm=st.floats(), right_norm=st.floats())
def test_no_number_in_a_record_makes_a_nan(left_norm: float, right_norm: float) -> None:
    """Norms come from strangers' records: NaN, infinities, negative ones."""
    assert 0.0 <= left_share(left_norm, right_norm) <= 1.0


def test_the_larger_gradient_takes_the_larger_part() -> None:
    """The published intuition: a stage with a larger gradient is further from done."""
    assert left_share(3.0, 1.0) == pytest.approx(0.75, abs=1e-4)
    assert left_share(math.nan, 1.0) < 1e-3


def test_neighbours_of_different_shape_are_a_bug() -> None:
    """The caller has checked both against its own stage; half a mix must never be used."""
    odd = a_stage(2)
    odd["model.layers.1.input_layernorm.weight"] = torch.ones(5)
    with pytest.raises(LocalProtocolError):
        mix(a_stage(1), odd, 1.0, 1.0)
    del odd["model.layers.1.input_layernorm.weight"]
    with pytest.raises(LocalProtocolError):
        mix(a_stage(1), odd, 1.0, 1.0)


def test_the_mix_is_new_memory() -> None:
    """The neighbours' tensors may be views of received bytes."""
    left, right = a_stage(1), a_stage(2)
    mixed = mix(left, right, 1.0, 1.0)
    mixed["model.layers.1.input_layernorm.weight"].zero_()
    assert left["model.layers.1.input_layernorm.weight"].abs().max() > 0


def test_two_stages_without_gradient_give_the_plain_average() -> None:
    """Zero norms: the floor alone decides, and it is the same for both."""
    left, right = a_stage(1), a_stage(2)
    for name, mixed in mix(left, right, 0.0, 0.0).items():
        torch.testing.assert_close(mixed, (left[name] + right[name]) / 2, atol=1e-6, rtol=0)


@given(left_norm=norms, right_norm=norms)
def test_the_mix_lies_between_its_neighbours(left_norm: float, right_norm: float) -> None:
    left, right = a_stage(1), a_stage(2)
    for name, mixed in mix(left, right, left_norm, right_norm).items():
        low, high = torch.minimum(left[name], right[name]), torch.maximum(left[name], right[name])
        assert bool(((mixed >= low - 1e-6) & (mixed <= high + 1e-6)).all())


@pytest.mark.parametrize("num_stages", [5, 6, 7, 12])
def test_a_swapped_path_is_legal_and_exchanges_the_twins(num_stages: int) -> None:
    """All stages, two swaps; a stage stands where its twin stood, all others where they were."""
    order = swapped_order(num_stages)
    assert is_legal(order, num_stages, num_stages, swaps_max=2, skip_width_max=2)
    for place, stage in enumerate(order):
        other = twin(place, num_stages)
        assert stage == (place if other is None else other)
        assert other is None or twin(other, num_stages) == place


def test_edges_have_twins_and_half_of_the_microbatches_are_swapped() -> None:
    assert [twin(stage, 7) for stage in range(7)] == [None, 2, 1, None, None, 6, 5]
    assert [is_swapped(microbatch) for microbatch in range(4)] == [False, True, False, True]
    with pytest.raises(LocalProtocolError):
        swapped_order(4)
