"""The cut: names, shapes and first weights."""

from __future__ import annotations

import pytest
import torch

from peer.model.stage import INIT_STD, build_model, build_stage, renumbered, schema_hash
from protocols.errors import LocalProtocolError
from protocols.run_spec import RunSpec, preset


def a_spec(num_stages: int, first_stage_layers: int, num_layers: int = 6, seed: int = 3) -> RunSpec:
    fields = preset("pico", seed=seed).model_dump()
    fields["model"] |= dict(num_hidden_layers=num_layers, vocab_size=64)
    fields |= dict(num_stages=num_stages, first_stage_layers=first_stage_layers)
    return RunSpec.model_validate(fields)


@pytest.mark.parametrize(("num_stages", "first_stage_layers"), [(2, 0), (3, 2), (4, 3), (7, 0)])
def test_all_stages_together_are_the_model(num_stages: int, first_stage_layers: int) -> None:
    """Export is a union of dicts; the first weights do not depend on the cut."""
    spec = a_spec(num_stages, first_stage_layers)
    union: dict[str, torch.Tensor] = {}
    for stage in range(num_stages):
        state = build_stage(spec, stage).state_dict()
        assert not union.keys() & state.keys()
        union |= state
    whole = build_model(spec).state_dict()
    assert union.keys() == whole.keys()
    assert all(torch.equal(union[name], weight) for name, weight in whole.items())


def test_first_weights_depend_on_the_seed_alone() -> None:
    """Two peers of a run begin equal without exchanging a byte; two runs do not."""
    same, again, other = (build_stage(a_spec(3, 0, seed=seed), 1).state_dict() for seed in (3, 3, 4))
    name = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(same[name], again[name])
    assert not torch.equal(same[name], other[name])


def test_first_weights_have_the_stated_spread() -> None:
    """Nothing keeps torch's default, and what writes into the residual stream is smaller."""
    for name, weight in build_model(a_spec(3, 0)).state_dict().items():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            scale = (2 * 6) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            assert weight.std().item() == pytest.approx(INIT_STD * scale, rel=0.1)
            assert abs(weight.mean().item()) < INIT_STD / 10


def test_a_neighbours_layers_get_our_numbers() -> None:
    """CheckFree mixes layer by layer: the first of theirs with the first of ours."""
    spec = a_spec(3, 2, num_layers=6)
    left = dict(build_stage(spec, 1).named_parameters())
    ours = renumbered(spec, left, 1, 2)
    assert ours.keys() == build_stage(spec, 2).state_dict().keys()
    assert ours["model.layers.5.mlp.up_proj.weight"] is left["model.layers.3.mlp.up_proj.weight"]
    assert renumbered(spec, ours, 2, 1) == left


def test_the_first_stage_has_no_twin() -> None:
    """Its weights fit nowhere else."""
    spec = a_spec(3, 2)
    with pytest.raises(LocalProtocolError):
        renumbered(spec, {}, 0, 1)
    with pytest.raises(LocalProtocolError):
        build_stage(spec, 3)


def test_the_schema_names_order_and_shape() -> None:
    """Two replicas average flat vectors: element i must mean the same parameter on both."""
    shapes = {"a": (2, 3), "b": (4,)}
    assert schema_hash(shapes) == schema_hash(dict(shapes))
    assert schema_hash(shapes) != schema_hash({"b": (4,), "a": (2, 3)})
    assert schema_hash(shapes) != schema_hash({"a": (3, 2), "b": (4,)})
