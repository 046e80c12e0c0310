"""A replica by hand, microbatch by microbatch: what is kept, what is recomputed, what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from peer.compute.stage_runtime import StageRuntime
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.run_spec import Codec
from protocols.tensor_codec import decode, encode
from tests.peer.compute.replica import (
    ROWS,
    TOKENS,
    VOCAB,
    a_batch,
    a_boundary,
    a_key,
    a_spec,
    assert_same,
    round_trip,
    train,
)


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.TOPK])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pipeline_learns_a_batch_by_heart(codec: Codec, dtype: str) -> None:
    """Forward, loss, backward and step fit together, with every codec and both precisions."""
    optimizer = dict(dtype=dtype, lr=1e-2, warmup_rounds=0)
    spec = a_spec(boundary_codec=codec, optimizer=optimizer, outer=dict(inner_steps=50))
    stages = {stage: StageRuntime(spec, stage) for stage in range(3)}
    losses = []
    for round_ in range(25):
        losses.append(round_trip(stages, a_key(round_)))
        for runtime in stages.values():
            assert runtime.inner_step(round_) > 0
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.2)
    assert losses[-1] < 0.5 * losses[0]
    assert all(runtime.flat.weights.dtype == torch.float32 for runtime in stages.values())
    assert stages[1].tokens_trained == 25 * ROWS * TOKENS


def test_validation_keeps_nothing_and_changes_nothing() -> None:
    """No gradient will ever come back for it; the first stage has its targets until it is told that no retry comes."""
    spec = a_spec()
    stages = {stage: StageRuntime(spec, stage) for stage in range(3)}
    round_trip(stages, a_key(1), train=False)
    assert [runtime.num_stashes for runtime in stages.values()] == [1, 0, 0]
    stages[0].drop(a_key(1))
    assert [runtime.num_stashes for runtime in stages.values()] == [0, 0, 0]
    assert all(runtime.inner_step(0) == 0.0 for runtime in stages.values())


def test_a_step_between_forward_and_backward_makes_backward_recompute() -> None:
    """With staleness the round before is still open: the graph holds weights that are gone."""
    runtime, other = StageRuntime(a_spec(), 1), StageRuntime(a_spec(), 1)
    runtime.forward(a_key(50), a_boundary(7), train=True)
    for replica in (runtime, other):
        train(replica, 0)
    assert runtime.num_recomputed == 0
    late = runtime.backward(a_key(50), a_boundary(8))
    other.forward(a_key(50), a_boundary(7), train=True)
    fresh = other.backward(a_key(50), a_boundary(8))
    assert runtime.num_recomputed == 1
    assert late is not None
    assert fresh is not None
    assert torch.equal(decode(late), decode(fresh))
    assert_same(runtime.mean_gradients(), other.mean_gradients())


def test_memory_for_graphs_is_bounded() -> None:
    """Beyond the bound a forward keeps its input alone; its backward gives the same gradient."""
    spec = a_spec()
    roomy, tight = StageRuntime(spec, 1), StageRuntime(spec, 1, graphs_bytes_max=200_000)
    for runtime in (roomy, tight):
        for counter in range(4):
            runtime.forward(a_key(counter), a_boundary(counter), train=True)
        for counter in range(4):
            runtime.backward(a_key(counter), a_boundary(counter + 10))
    assert roomy.num_recomputed == 0
    assert 0 < tight.num_recomputed < 4
    assert_same(roomy.mean_gradients(), tight.mean_gradients())


def test_a_dropped_attempt_gives_its_room_back() -> None:
    """Released by the originator, or out of lease; dropping twice does no harm."""
    runtime = StageRuntime(a_spec(), 1, graphs_bytes_max=150_000)
    for counter in range(10):
        runtime.forward(a_key(counter), a_boundary(), train=True)
        runtime.drop(a_key(counter))
        runtime.drop(a_key(counter))
    assert runtime.num_stashes == 0
    train(runtime, 99)
    assert runtime.num_recomputed == 0
    with pytest.raises(LocalProtocolError, match="no stash"):
        runtime.backward(a_key(3), a_boundary())


def test_the_first_stage_keeps_a_microbatch_for_all_its_attempts() -> None:
    """Attempt 1 was lost on its way back; attempt 2 needs loss and backward of the same tokens."""
    spec = a_spec()
    stages = {stage: StageRuntime(spec, stage) for stage in range(3)}
    stages[0].put_batch(a_key(5), *a_batch())
    packet = stages[0].forward(a_key(5), None, train=True)
    first, _ = stages[0].loss(a_key(5), packet, train=True)
    second, gradient = stages[0].loss(a_key(5, attempt=2), packet, train=True)
    assert first == second
    assert gradient is not None
    assert stages[0].backward(a_key(5, attempt=2), gradient) is None
    assert stages[0].num_stashes == 0
    for name, mean in stages[0].mean_gradients().items():
        assert mean.abs().max() > 0 or name.startswith("model.layers")


def test_a_loss_that_is_not_finite_never_reaches_the_gradient() -> None:
    """The head has diverged; the rest of the stage need not follow it."""
    runtime = StageRuntime(a_spec(), 0)
    runtime.put_batch(a_key(1), *a_batch())
    runtime.flat.by_name(runtime.flat.weights)["lm_head.weight"].fill_(math.inf)
    with pytest.raises(FloatingPointError):
        runtime.loss(a_key(1), a_boundary(), train=True)
    assert runtime.flat.gradient.isfinite().all()


@pytest.mark.parametrize("value", [3e38, -1e9])
def test_absurd_numbers_of_a_stranger_never_reach_the_gradient(value: float) -> None:
    """They are finite; their squares in our norm are not, and one NaN would cost the whole round."""
    absurd = encode(torch.full((ROWS, TOKENS, 64), value), Codec.RAW)
    runtime, head = StageRuntime(a_spec(), 1), StageRuntime(a_spec(), 0)
    with pytest.raises(RemoteProtocolError, match="too-large"):
        runtime.forward(a_key(1), absurd, train=True)
    runtime.forward(a_key(2), a_boundary(), train=True)
    with pytest.raises(RemoteProtocolError, match="too-large"):
        runtime.backward(a_key(2), absurd)
    head.put_batch(a_key(3), *a_batch())
    with pytest.raises(RemoteProtocolError, match="too-large"):
        head.loss(a_key(3), absurd, train=True)
    assert runtime.inner_step(0) == head.inner_step(0) == 0.0
