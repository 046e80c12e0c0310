"""N7 and the codecs on a small scale; the values are `python -m benchmarks averaging`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import averaging
from benchmarks.averaging import FULL, QUICK, WAYS, loss_ratio, perplexity_ratio, proposing
from benchmarks.averaging_pipeline import routed, staged_spec
from benchmarks.averaging_team import Outcome, Replica, Team, Way, team_spec

SPEC = team_spec(seed=1, rounds=4)


def a_team(way: Way, count: int = 2) -> Team:
    return Team(SPEC, count, way, held_out_batches=1, curve_points=1)


def an_outcome(single: float) -> Outcome:
    return Outcome(single=single, averaged=single, best=single, spread=0.0, round_bytes=1.0, curve=())


def test_a_group_of_all_leaves_no_spread():
    """DiLoCo: after its averaging everybody holds the same weights."""
    team = a_team(Way(outer=proposing(inner_steps=2), is_group_of_all=True), count=3)
    assert team.run().spread < 1e-7
    assert not torch.equal(team.replicas[0].flat.weights, Replica(SPEC).flat.weights)


def test_bytes_are_counted_as_they_are_sent():
    """Two outer steps in four rounds: 8 bytes of fp32; two messages each with a second round among four."""
    assert a_team(Way(outer=proposing(inner_steps=2))).run().round_bytes == pytest.approx(8 / 4)
    two = Way(outer=proposing(inner_steps=2, rounds=2))
    assert a_team(two, count=4).run().round_bytes == pytest.approx(16 / 4)
    assert a_team(Way(outer=None)).run().round_bytes == 4.0


def test_a_fragment_leaves_the_others_alone():
    """One outer step: the first of two fragments agrees, the second is what each has trained."""
    team = a_team(Way(outer=proposing(inner_steps=4, fragments=2)))
    team.run()
    left, right = (one.flat.weights for one in team.replicas)
    half = len(left) // 2
    torch.testing.assert_close(
        left[half:], right[half:], atol=1e-7, rtol=0
    )  # outer step 1: the second's turn
    assert (left[:half] != right[:half]).float().mean() > 0.5


def test_a_hostile_replica_is_not_judged():
    """What it did to itself is its own affair; the honest ones stay finite."""
    outcome = a_team(Way(outer=proposing(inner_steps=2), is_one_hostile=True), count=4).run()
    assert 5 < outcome.single < 8


def test_random_paths_train_all_replicas():
    """Nobody is averaged, so replicas differ; and each has a loss."""
    outcome = routed(staged_spec(seed=1, rounds=2), 2, is_random=True, held_out_batches=1)
    assert 6 < outcome.single < 8
    assert outcome.spread > 0


def test_ratios_pair_the_seeds():
    """Each seed against its own, then the mean."""
    found = {
        "ours": [an_outcome(1.0), an_outcome(2.0)],
        "base": [an_outcome(1.0), an_outcome(2.0)],
        "once": [an_outcome(1.0)],
    }
    assert perplexity_ratio(found, "ours", "base") == 1.0
    assert perplexity_ratio(found, "once", "base") == 1.0  # against the same seed
    assert loss_ratio([2.2, 1.0], [2.0, 1.0]) == pytest.approx(1.05)


def test_the_report_has_every_bar_and_tells_every_way(monkeypatch: pytest.MonkeyPatch):
    """One outer step on the real text: numbers of an untrained model, but all of them."""
    small = replace(QUICK, rounds=10, replicas=2, curve_points=1)
    monkeypatch.setattr(averaging, "QUICK", small)
    report = averaging.run(quick=True)
    assert [bar.id for bar in report.bars] == [
        "N7a", "N7b", "N7c", "N7d", "N8", "C-boundary", "C-outer-bytes", "C-outer-loss",
    ]  # fmt: skip
    facts = dict(report.facts)
    assert all(
        f"{name}, rate {way.learning_rate:g}: loss of a replica" in facts for name, way in WAYS.items()
    )
    assert len(FULL.seeds) >= 3
