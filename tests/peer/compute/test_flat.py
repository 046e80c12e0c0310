"""Two vectors hold everything, and autograd keeps to them."""

from __future__ import annotations

import torch

from peer.compute.flat import FlatStage
from peer.model.stage import FirstStage, build_stage, is_head
from protocols.run_spec import preset

SPEC = preset("pico")


def test_parameters_and_gradients_are_views_of_the_vectors() -> None:
    """Also after backward: autograd adds in place, and never puts a tensor of its own there."""
    stage = build_stage(SPEC, 0)
    assert isinstance(stage, FirstStage)
    flat = FlatStage(stage)
    tokens = torch.arange(20).view(2, 10)
    for passes in (1, 2):
        stage.loss(stage.embed(tokens), tokens).backward()
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.data_ptr() == flat.by_name(flat.gradient)[name].data_ptr()
            assert parameter.data_ptr() == flat.by_name(flat.weights)[name].data_ptr()
        if passes == 1:
            once = flat.gradient.clone()
    torch.testing.assert_close(flat.gradient, 2 * once)


def test_flattening_changes_no_weight() -> None:
    """Seeded first weights must survive it."""
    before = {name: weight.clone() for name, weight in build_stage(SPEC, 1).state_dict().items()}
    stage = build_stage(SPEC, 1)
    flat = FlatStage(stage)
    assert all(torch.equal(weight, before[name]) for name, weight in stage.state_dict().items())
    assert flat.by_name(flat.weights).keys() == before.keys()
    assert flat.size == sum(weight.numel() for weight in before.values())


def test_parts_cover_the_vector_once_and_split_head_and_norms() -> None:
    """Rows of loss passes divide the head, weight decay leaves norms alone."""
    flat = FlatStage(build_stage(SPEC, 0))
    assert [part.span.start for part in flat.parts] == [0, *(part.span.stop for part in flat.parts[:-1])]
    assert flat.parts[-1].span.stop == flat.size
    offset = 0
    for name, shape in flat.shapes.items():
        part = next(part for part in flat.parts if part.span.start <= offset < part.span.stop)
        assert (part.head, part.decayed) == (is_head(name), len(shape) >= 2)
        offset += flat.by_name(flat.weights)[name].numel()
