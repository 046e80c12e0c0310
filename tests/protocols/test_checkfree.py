"""CheckFree's mix against its formula (bar A2)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocols.checkfree import NORM_FLOOR, left_share, mix
from protocols.errors import LocalProtocolError

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
