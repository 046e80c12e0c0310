"""The averaging as a replica does it: in pairs, alone, while training goes on, and with partners that send nonsense."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from peer.compute import snapshot
from peer.compute.stage_runtime import StageRuntime
from protocols.run_spec import OuterMode
from protocols.tensor_codec import decode
from tests.peer.compute.replica import a_spec, assert_same, everything, train


@pytest.mark.parametrize("mode", list(OuterMode))
def test_two_replicas_average(mode: OuterMode) -> None:
    """They trained on different microbatches since they were equal."""
    spec = a_spec(outer=dict(mode=mode))
    left, right = StageRuntime(spec, 1), StageRuntime(spec, 1)
    for round_ in range(5):
        train(left, round_, seed=1)
        train(right, round_, seed=500)
    apart = (left.flat.weights - right.flat.weights).norm()
    (to_right, schema), (to_left, other_schema) = left.prepare_outer(1), right.prepare_outer(1)
    assert schema == other_schema
    assert left.apply_outer(1, to_left)
    assert right.apply_outer(1, to_right)
    # the same momentum on both sides (paper), or the mean of both proposals
    assert (left.flat.weights - right.flat.weights).norm() < 1e-3 * apart
    assert left.outer_step == 1


def test_what_was_trained_during_the_exchange_is_kept() -> None:
    """The exchange takes seconds; nobody waits for it."""
    spec = a_spec()
    busy, idle = StageRuntime(spec, 1), StageRuntime(spec, 1)
    for runtime in (busy, idle):
        train(runtime, 0)
        runtime.prepare_outer(1)
    before = busy.flat.weights.clone()
    train(busy, 1)
    trained = busy.flat.weights - before
    for runtime in (busy, idle):
        assert not runtime.apply_outer(1, None)
    torch.testing.assert_close(busy.flat.weights - idle.flat.weights, trained, atol=1e-6, rtol=0)
    assert_same(
        {"slow": everything(busy)[snapshot.SLOW_WEIGHTS]}, {"slow": everything(idle)[snapshot.SLOW_WEIGHTS]}
    )


def test_an_unfit_half_is_not_applied() -> None:
    """Wrong shape, wrong dtype, a NaN, or a half for another outer step: alone, exactly as with no half at all."""
    spec = a_spec()
    good, _ = StageRuntime(spec, 1).prepare_outer(1)
    nan = decode(good).clone()
    nan[3] = math.nan
    unfit = [
        replace(good, shape=(good.shape[0] // 2,)),
        replace(good, dtype="bfloat16"),
        replace(good, data=nan.view(torch.uint8).numpy().data),
        None,
    ]
    results = []
    for packet in unfit:
        runtime = StageRuntime(spec, 1)
        train(runtime, 0)
        runtime.prepare_outer(1)
        assert not runtime.apply_outer(1, packet)
        results.append(runtime.flat.weights)
    assert all(torch.equal(weights, results[-1]) for weights in results)
    late = StageRuntime(spec, 1)
    train(late, 0)
    late.prepare_outer(1)
    assert not late.apply_outer(2, good)
    assert torch.equal(late.flat.weights, results[-1])
