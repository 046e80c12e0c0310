"""Outages of single replicas: how frequent they are, what a policy does, and what is compared."""

from __future__ import annotations

import pytest

from benchmarks.recovery_outages import DROP, NONE, SKIP, Outages, noise, outcome, rows_of, train_without
from benchmarks.recovery_sizes import TINY
from peer.compute.inner_optimizer import learning_rate
from tests.benchmarks.small_trainer import SMALL, a_trainer, changed, weights


def test_published_outages_are_as_frequent_as_published():
    """1 % a replica and step, 6 steps each: 5.7 % of replica-steps degraded at 4 stages; an inner stage misses half."""
    outages = Outages(depth=4, multiple=1, seed=0)
    for round_ in range(20_000):
        away = outages.away(round_)
        assert set(away) <= {2, 3}
    total = 20_000 * 8
    assert outages.num_degraded / total == pytest.approx(0.057, abs=0.003)
    assert outages.num_missing / (2 * total) == pytest.approx(0.0285, abs=0.002)


def test_a_dropped_replica_teaches_nothing():
    """A round of the other rows alone, then one in which nobody is there."""
    some, others = a_trainer(1), a_trainer(1)
    train_without(some, rows_of({0, 7}, rows=8))
    tokens_BL, targets_BL = others.batch()
    others.accumulate(tokens_BL[1:7], targets_BL[1:7], others.order, {})
    others.step()
    assert changed(some, weights(others)) == set()
    before = weights(some)
    train_without(some, rows_of(set(range(8)), rows=8))
    assert changed(some, before) == set()
    assert some.round == 3


def test_every_policy_sees_the_same_outages():
    bare, skip, drop = (outcome(SMALL, 1, 4, 16, policy) for policy in (NONE, SKIP, DROP))
    assert bare.degraded_share == 0
    assert skip.degraded_share == drop.degraded_share > 0.1
    assert len({bare.loss, skip.loss, drop.loss}) == 3


def test_a_second_draw_is_of_outages_alone():
    """The same run but for them; without any, nothing is left that differs."""
    assert outcome(SMALL, 1, 4, 16, SKIP, 0).missing_share != outcome(SMALL, 1, 4, 16, SKIP, 1).missing_share
    assert outcome(SMALL, 1, 4, 16, NONE, 0) == outcome(SMALL, 1, 4, 16, NONE, 1)
    assert noise([(1.01, 1.01), (1.0, 1.0)]) == 0.0
    assert noise([(1.002, 1.0), (1.0, 1.002)]) == pytest.approx(0.002 / 2**0.5)


def test_the_rate_falls_to_a_tenth_at_the_end_of_an_outage_study():
    spec = TINY.spec(1, is_outage_study=True)
    assert learning_rate(spec, TINY.crucible_rounds) == pytest.approx(0.1 * TINY.crucible_lr)
    assert learning_rate(TINY.spec(1), TINY.crucible_rounds) == TINY.spec(1).optimizer.lr
