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
    (to_right, schema), (to_left, other_schema) = left.prepare_outer(1, 0), right.prepare_outer(1, 0)
    assert schema == other_schema
    told = left.apply_outer(1, 0, to_left)
    assert right.apply_outer(1, 0, to_right).with_partner
    # the same momentum on both sides (paper), or the mean of both proposals
    assert (left.flat.weights - right.flat.weights).norm() < 1e-3 * apart
    assert left.outer_step == 1
    assert told.with_partner
    assert told.apart > 0
    assert abs(told.cosine) < 0.9


def test_what_was_trained_during_the_exchange_is_kept() -> None:
    """The exchange takes seconds; nobody waits for it."""
    spec = a_spec()
    busy, idle, partner = (StageRuntime(spec, 1) for _ in range(3))
    train(partner, 0, seed=500)
    half, _ = partner.prepare_outer(1, 0)
    for runtime in (busy, idle):
        train(runtime, 0)
        runtime.prepare_outer(1, 0)
    before = busy.flat.weights.clone()
    train(busy, 1)
    trained = busy.flat.weights - before
    for runtime in (busy, idle):
        assert runtime.apply_outer(1, 0, half).with_partner
    torch.testing.assert_close(busy.flat.weights - idle.flat.weights, trained, atol=1e-6, rtol=0)
    assert_same(
        {"slow": everything(busy)[snapshot.SLOW_WEIGHTS]}, {"slow": everything(idle)[snapshot.SLOW_WEIGHTS]}
    )


def test_an_unfit_half_is_not_applied() -> None:
    """Wrong shape, wrong dtype, a NaN, or a half for another outer step: alone, exactly as with no half at all."""
    spec = a_spec()
    good, _ = StageRuntime(spec, 1).prepare_outer(1, 0)
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
        runtime.prepare_outer(1, 0)
        assert not runtime.apply_outer(1, 0, packet).with_partner
        results.append(runtime.flat.weights)
    assert all(torch.equal(weights, results[-1]) for weights in results)
    late = StageRuntime(spec, 1)
    train(late, 0)
    late.prepare_outer(1, 0)
    assert not late.apply_outer(2, 0, good).with_partner
    assert torch.equal(late.flat.weights, results[-1])


@pytest.mark.parametrize("mode", list(OuterMode))
def test_a_second_pair_round_brings_four_replicas_to_one_mean(mode: OuterMode) -> None:
    """(0, 1), (2, 3), then (0, 2), (1, 3): the hypercube's exact mean of all slow weights, progress since then kept."""
    spec = a_spec(outer=dict(mode=mode, rounds=2))
    replicas = [StageRuntime(spec, 1) for _ in range(4)]
    for number, replica in enumerate(replicas):
        train(replica, 0, seed=1 + number)
    for pair_round, pairs in enumerate([((0, 1), (2, 3)), ((0, 2), (1, 3))]):
        for pair in pairs:
            one, other = (replicas[number] for number in pair)
            halves = [replica.prepare_outer(1, pair_round)[0] for replica in (one, other)]
            assert one.apply_outer(1, pair_round, halves[1]).with_partner
            assert other.apply_outer(1, pair_round, halves[0]).with_partner
    slow = [everything(replica)[snapshot.SLOW_WEIGHTS] for replica in replicas]
    for replica, weights in zip(replicas, slow, strict=True):
        torch.testing.assert_close(weights, slow[0], atol=1e-6, rtol=0)
        torch.testing.assert_close(replica.flat.weights, weights, atol=1e-6, rtol=0)


def test_a_fragment_is_averaged_when_its_turn_comes_and_the_others_are_left_alone() -> None:
    spec = a_spec(outer=dict(fragments=3))
    one, other = StageRuntime(spec, 1), StageRuntime(spec, 1)
    train(one, 0, seed=1)
    train(other, 0, seed=500)
    before = one.flat.weights.clone()
    size = len(before)
    for outer_step, part in ((1, slice(size // 3, 2 * size // 3)), (2, slice(2 * size // 3, size))):
        (to_other, _), (to_one, _) = one.prepare_outer(outer_step, 0), other.prepare_outer(outer_step, 0)
        assert to_other.shape == (part.stop - part.start,)
        assert one.apply_outer(outer_step, 0, to_one).with_partner
        assert other.apply_outer(outer_step, 0, to_other).with_partner
        torch.testing.assert_close(one.flat.weights[part], other.flat.weights[part], atol=1e-6, rtol=0)
        assert not torch.equal(one.flat.weights[part], before[part])
    assert torch.equal(one.flat.weights[: size // 3], before[: size // 3])


def test_whoever_trained_more_counts_more() -> None:
    """Three times the microbatches, three times the weight: the outer momentum is the weighted mean of both Deltas."""
    spec = a_spec(outer=dict(mode=OuterMode.PAPER))
    one, other = StageRuntime(spec, 1), StageRuntime(spec, 1)
    start = one.flat.weights.clone()
    train(one, 0, seed=1)
    train(other, 0, seed=500)
    moved = [replica.flat.weights - start for replica in (one, other)]
    (to_other, _), (to_one, _) = one.prepare_outer(1, 0, weight=1.5), other.prepare_outer(1, 0, weight=0.5)
    one.apply_outer(1, 0, to_one)
    other.apply_outer(1, 0, to_other)
    mean = spec.outer.beta * (0.75 * moved[0] + 0.25 * moved[1])
    for replica in (one, other):
        torch.testing.assert_close(everything(replica)[snapshot.OUTER_MOMENTUM], mean, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", list(OuterMode))
def test_the_cosine_tells_whether_two_replicas_went_the_same_way(mode: OuterMode) -> None:
    spec = a_spec(outer=dict(mode=mode))
    one, twin = StageRuntime(spec, 1), StageRuntime(spec, 1)
    for replica in (one, twin):
        train(replica, 0, seed=1)
    one.prepare_outer(1, 0)
    told = one.apply_outer(1, 0, twin.prepare_outer(1, 0)[0])
    assert (told.apart, told.cosine) == (0.0, pytest.approx(1.0, abs=1e-5))
