"""F1: the gradient of a round over the pipeline is a single process's, for any cut, with skips and swaps."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from peer.compute.inner_optimizer import learning_rate
from peer.compute.stage_runtime import StageRuntime
from peer.model.llama import Llama
from peer.model.stage import build_model, is_head
from protocols.messages import WorkKey
from protocols.run_spec import Codec, RunSpec, preset
from protocols.stage_order import legal_orders

ME = "originator"
ROWS, TOKENS = 3, 16
Order = tuple[int, ...]


def a_spec(
    num_stages: int, *, first_stage_layers: int = 0, inner_layers: int = 1, **changes: object
) -> RunSpec:
    num_layers = first_stage_layers + inner_layers * (num_stages - 1)
    fields = preset("pico", seed=11, boundary_codec=Codec.RAW, **changes).model_dump()
    fields["model"] |= dict(num_hidden_layers=num_layers, vocab_size=64)
    fields["rounds"] |= dict(rows=ROWS, seq_len=TOKENS)
    fields |= dict(num_stages=num_stages, first_stage_layers=first_stage_layers)
    return RunSpec.model_validate(fields)


def batches(orders: list[Order]) -> list[tuple[Order, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(64, (ROWS, TOKENS + 1), generator=generator) for _ in orders]
    return [(order, id_[:, :-1], id_[:, 1:]) for order, id_ in zip(orders, ids, strict=True)]


def walk(
    stages: Mapping[int, StageRuntime], number: int, order: Order, tokens: Tensor, targets: Tensor
) -> float:
    """One microbatch out along `order` and back, as the messages of the swarm would carry it."""
    key = WorkKey(ME, number, 1)
    stages[0].put_batch(key, tokens, targets)
    packet = stages[0].forward(key, None, train=True)
    for stage in order[1:]:
        packet = stages[stage].forward(key, packet, train=True)
    loss, gradient = stages[0].loss(key, packet, train=True)
    for stage in (*reversed(order[1:]), 0):
        assert gradient is not None
        gradient = stages[stage].backward(key, gradient)
    assert gradient is None
    return loss


def uncut_loss(model: Llama, order: Order, spec: RunSpec, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean token loss of the whole model with its layers in the path's order."""
    x = model.model.embed_tokens(tokens)
    for stage in order:
        for layer in spec.layer_range(stage):
            x = model.model.layers[str(layer)](x)
    logits = model.lm_head(model.model.norm(x))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def assert_equal_gradients(spec: RunSpec, orders: list[Order], stages: Mapping[int, StageRuntime]) -> None:
    model = build_model(spec)
    for number, (order, tokens, targets) in enumerate(batches(orders)):
        reference = uncut_loss(model, order, spec, tokens, targets)
        (reference * ROWS).backward()
        assert walk(stages, number, order, tokens, targets) == pytest.approx(reference.item(), abs=1e-6)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    visits = {stage: sum(stage in order for order in orders) for stage in stages}
    for stage, runtime in stages.items():
        rows = ROWS * visits[stage]  # each stage divides by what it did itself
        for name, gradient in runtime.mean_gradients().items():
            torch.testing.assert_close(gradient, expected.pop(name) / rows, atol=1e-5, rtol=1e-4)
            assert is_head(name) or gradient.abs().max() > 0, f"{name} got no gradient"
    assert not expected, "every parameter of the model lives on some stage"


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("first_stage_layers", [0, 1])
@pytest.mark.parametrize("graphs_bytes_max", [0, 1 << 30], ids=["recompute", "kept graphs"])
def test_full_paths(num_stages: int, first_stage_layers: int, graphs_bytes_max: int) -> None:
    """No faults, nothing skipped: two microbatches in a round."""
    spec = a_spec(num_stages, first_stage_layers=first_stage_layers)
    stages = {k: StageRuntime(spec, k, graphs_bytes_max=graphs_bytes_max) for k in range(num_stages)}
    assert_equal_gradients(spec, [tuple(range(num_stages))] * 2, stages)
    assert all((runtime.num_recomputed == 0) == (graphs_bytes_max > 0) for runtime in stages.values())
    assert all(runtime.num_stashes == 0 for runtime in stages.values())


@pytest.mark.parametrize(
    ("num_stages", "path_stages", "swaps_max"), [(3, 2, 0), (3, 3, 1), (5, 4, 0), (5, 5, 1), (5, 4, 2)]
)
def test_skips_and_swaps(num_stages: int, path_stages: int, swaps_max: int) -> None:
    """Every legal order once: stages see different numbers of microbatches, each divides by its own."""
    spec = a_spec(num_stages)
    orders = list(legal_orders(num_stages, path_stages, swaps_max=swaps_max, skip_width_max=4))
    assert set().union(*orders) == set(range(num_stages))
    stages = {stage: StageRuntime(spec, stage) for stage in range(num_stages)}
    assert_equal_gradients(spec, orders, stages)


def test_stages_of_two_layers_and_a_first_stage_with_layers() -> None:
    """The cut is by equal slices; the originator's own layers come before all of them."""
    spec = a_spec(3, first_stage_layers=2, inner_layers=2)
    stages = {stage: StageRuntime(spec, stage) for stage in range(3)}
    assert_equal_gradients(spec, [(0, 1, 2), (0, 2, 1), (0, 2)], stages)


def test_two_rounds_equal_two_adamw_steps_of_one_process() -> None:
    """Clipping never strikes here (it is per stage in a swarm), so the weights must agree as well."""
    spec = a_spec(3, optimizer=dict(clip_norm=1e9, warmup_rounds=0, lr=1e-2))
    stages = {stage: StageRuntime(spec, stage) for stage in range(3)}
    model = build_model(spec)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for round_, (order, tokens, targets) in enumerate(batches([(0, 1, 2)] * 2)):
        uncut_loss(model, order, spec, tokens, targets).backward()
        walk(stages, round_, order, tokens, targets)
        for group in reference.param_groups:
            group["lr"] = learning_rate(spec, round_ + 1)
        reference.step()
        reference.zero_grad()
        for runtime in stages.values():
            runtime.inner_step(round_)
    cut = {name: weight for runtime in stages.values() for name, weight in runtime.weights().items()}
    for name, parameter in model.named_parameters():
        difference = (cut[name] - parameter.detach()).abs()
        # where a gradient is about Adam's epsilon, rounding decides a part of the step; nowhere else
        assert difference.mean() < 1e-6
        assert difference.max() < 1e-3
