"""A replica's state, saved, handed over and rebuilt: all of it, or nothing changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from peer.compute import snapshot
from peer.compute.inner_optimizer import RAMP_STEPS
from peer.compute.stage_runtime import StageRuntime
from protocols.actions import DonorState, RecoverySource
from protocols.checkfree import mix
from protocols.errors import ConfigError
from protocols.messages import WeightsKind
from tests.peer.compute.replica import (
    ROWS,
    TOKENS,
    a_boundary,
    a_donor,
    a_key,
    a_recovery,
    a_spec,
    assert_same,
    everything,
    round_trip,
    train,
)


def test_a_resumed_replica_goes_on_bit_for_bit() -> None:
    """Weights, slow weights, momentum, moments, counts and ramp: nothing is forgotten."""
    spec = a_spec()
    runtime, resumed = StageRuntime(spec, 1), StageRuntime(spec, 1)
    for round_ in range(3):
        train(runtime, round_)
    runtime.prepare_outer(1, 0)
    runtime.apply_outer(1, 0, None)
    tensors, meta = runtime.state_for_checkpoint()
    train(runtime, 3)  # the copy must not move with it
    resumed.load_checkpoint(tensors, meta)
    assert (resumed.round, resumed.outer_step, resumed.tokens_trained) == (3, 1, 3 * ROWS * TOKENS)
    train(resumed, 3)
    for replica in (runtime, resumed):
        replica.prepare_outer(2, 0)
        replica.apply_outer(2, 0, None)
    assert_same(everything(runtime), everything(resumed))


def test_a_foreign_checkpoint_changes_nothing() -> None:
    """Another stage's, or one of a wider model."""
    spec = a_spec()
    runtime = StageRuntime(spec, 1)
    before = everything(runtime)
    other = StageRuntime(spec, 2)
    train(other, 0)
    with pytest.raises(ConfigError, match="does not fit stage 1"):
        runtime.load_checkpoint(*other.state_for_checkpoint())
    tensors, meta = StageRuntime(spec, 1).state_for_checkpoint()
    del tensors[snapshot.SQUARE]
    with pytest.raises(ConfigError):
        runtime.load_checkpoint(tensors, meta)
    assert_same(everything(runtime), before)


def test_a_joiner_that_caught_up_goes_on_as_its_donor() -> None:
    """Rung 3: exact. Slow weights AND momentum of one donor, or the spread jumps."""
    spec = a_spec()
    donor, joiner = StageRuntime(spec, 1), StageRuntime(spec, 1)
    for round_ in range(3):
        train(donor, round_)
    donor.prepare_outer(1, 0)
    donor.apply_outer(1, 0, None)
    train(joiner, 0, seed=77)  # whatever it did before
    joiner.forward(a_key(500), a_boundary(), train=True)
    assert joiner.recover(a_recovery(1, RecoverySource.CATCH_UP, a_donor(donor, WeightsKind.FULL)))
    assert (joiner.round, joiner.outer_step) == (9, 3)
    assert_same(everything(joiner), everything(donor))
    for runtime in (donor, joiner):
        train(runtime, 9)
        runtime.prepare_outer(4, 0)
        runtime.apply_outer(4, 0, None)
    assert_same(everything(joiner), everything(donor))


def test_a_first_stage_peer_catches_up_too() -> None:
    """Two parts more: head and final norm."""
    spec = a_spec()
    stages = {stage: StageRuntime(spec, stage) for stage in range(3)}
    round_trip(stages, a_key(0))
    stages[0].inner_step(0)
    joiner = StageRuntime(spec, 0)
    assert joiner.recover(a_recovery(0, RecoverySource.CATCH_UP, a_donor(stages[0], WeightsKind.FULL)))
    assert_same(everything(joiner), everything(stages[0]))


def corrupted(donor: DonorState, fault: str) -> DonorState:
    packets = list(donor.packets)
    first = bytearray(packets[0].data)
    if fault == "flipped bit":
        first[-1] ^= 1
    packets[0] = replace(packets[0], data=bytes(first))
    match fault:
        case "missing slice":
            return replace(donor, packets=())
        case "wrong hash":
            return replace(donor, sha256="0" * 64)
        case "another stage":
            return replace(donor, stage=2)
        case _:
            return replace(donor, packets=tuple(packets))


@pytest.mark.parametrize("fault", ["flipped bit", "missing slice", "wrong hash", "another stage"])
def test_a_damaged_snapshot_changes_nothing(fault: str) -> None:
    """All or nothing: the next donor is asked."""
    spec = a_spec()
    donor, joiner = StageRuntime(spec, 1), StageRuntime(spec, 1)
    train(donor, 0)
    before = everything(joiner)
    state = corrupted(a_donor(donor, WeightsKind.FULL), fault)
    assert not joiner.recover(a_recovery(1, RecoverySource.CATCH_UP, state))
    assert_same(everything(joiner), before)
    assert joiner.round == 0


def test_weights_alone_are_not_enough_to_catch_up() -> None:
    """A donor that sends less than it was asked for."""
    spec = a_spec()
    joiner = StageRuntime(spec, 1)
    donor = a_donor(StageRuntime(spec, 1), WeightsKind.WEIGHTS)
    assert not joiner.recover(a_recovery(1, RecoverySource.CATCH_UP, donor))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_shadow_gives_a_lost_stage_back_bit_for_bit(stage: int) -> None:
    """Rung 4, A6: embedding, final norm and head as well; only the optimizer and the averaging start anew."""
    spec = a_spec(num_stages=3)
    owner, adopter = StageRuntime(spec, stage), StageRuntime(spec, stage)
    owner.flat.weights.add_(torch.randn_like(owner.flat.weights))  # what it has learned
    kept = a_donor(owner, WeightsKind.WEIGHTS)
    as_they_were = {name: weight.clone() for name, weight in owner.weights().items()}
    owner.flat.weights.zero_()  # later than the copy, and lost
    assert adopter.recover(a_recovery(stage, RecoverySource.SHADOW, kept))
    assert_same(adopter.weights(), as_they_were)
    assert snapshot.pack(adopter.weights(), {})[1] == snapshot.pack(as_they_were, {})[1]
    state = everything(adopter)
    assert torch.equal(state[snapshot.SLOW_WEIGHTS], adopter.flat.weights)
    assert state[snapshot.MOMENT].abs().max() == 0
    assert state[snapshot.RAMP].item() == RAMP_STEPS


def test_a_shadow_whose_hash_is_wrong_changes_nothing() -> None:
    spec = a_spec()
    adopter = StageRuntime(spec, 1)
    before = everything(adopter)
    kept = a_donor(StageRuntime(spec, 1), WeightsKind.WEIGHTS)
    assert not adopter.recover(a_recovery(1, RecoverySource.SHADOW, replace(kept, sha256="0" * 64)))
    other = a_donor(StageRuntime(spec, 2), WeightsKind.WEIGHTS)
    assert not adopter.recover(a_recovery(1, RecoverySource.SHADOW, other))
    assert_same(everything(adopter), before)


@pytest.mark.parametrize("kind", [WeightsKind.FULL, WeightsKind.WEIGHTS])
def test_a_lost_stage_is_the_mix_of_its_neighbours(kind: WeightsKind) -> None:
    """Rung 5: by gradient norm, layer by layer; slow weights follow, momentum and moments start anew."""
    spec = a_spec(num_stages=4)
    left, lost, right = (StageRuntime(spec, stage) for stage in (1, 2, 3))
    train(left, 0, seed=1)
    train(right, 0, seed=2)
    train(lost, 0, seed=3)
    donors = (a_donor(right, kind, grad_norm=1.0), a_donor(left, kind, grad_norm=3.0))  # in any order
    assert lost.recover(a_recovery(2, RecoverySource.MERGE, *donors))
    left_named = {name.replace("layers.0.", "layers.1."): w for name, w in left.weights().items()}
    right_named = {name.replace("layers.2.", "layers.1."): w for name, w in right.weights().items()}
    assert_same(lost.weights(), mix(left_named, right_named, 3.0, 1.0))
    state = everything(lost)
    assert torch.equal(state[snapshot.SLOW_WEIGHTS], lost.flat.weights)
    for name in (snapshot.OUTER_MOMENTUM, snapshot.MOMENT, snapshot.SQUARE, snapshot.STEPS):
        assert state[name].abs().max() == 0
    assert state[snapshot.RAMP].item() == RAMP_STEPS
    assert lost.round == 9


def test_an_edge_stage_is_a_copy_of_its_one_neighbour() -> None:
    """Rung 6: stage 1 has nothing but stage 2 beside it."""
    spec = a_spec(num_stages=3)
    lost, neighbour = StageRuntime(spec, 1), StageRuntime(spec, 2)
    train(neighbour, 0)
    assert lost.recover(a_recovery(1, RecoverySource.COPY, a_donor(neighbour, WeightsKind.WEIGHTS)))
    assert torch.equal(lost.flat.weights, neighbour.flat.weights)


def test_the_first_stage_gives_no_weights_to_a_middle_one() -> None:
    """Its layers may have the same shapes, but they are not a neighbour's."""
    spec = a_spec(num_stages=3)
    lost = StageRuntime(spec, 1)
    donors = (
        a_donor(StageRuntime(spec, 0), WeightsKind.FULL),
        a_donor(StageRuntime(spec, 2), WeightsKind.FULL),
    )
    assert not lost.recover(a_recovery(1, RecoverySource.MERGE, *donors))
    assert not lost.recover(a_recovery(2, RecoverySource.INITIAL))


def test_the_first_in_a_run_keep_the_seeded_weights() -> None:
    """Everybody has the same ones: nothing to fetch."""
    runtime = StageRuntime(a_spec(), 1)
    before = everything(runtime)
    assert runtime.recover(replace(a_recovery(1, RecoverySource.INITIAL), round=0, outer_step=0))
    assert_same(everything(runtime), before)
