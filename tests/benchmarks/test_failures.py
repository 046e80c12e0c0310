"""CheckFree's failures as published (bar A1)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.failures import StageLoss, probability_of_iteration, published_schedule, stage_losses
from protocols.errors import LocalProtocolError

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
NEVER, REPLICAS, STAGES = 501, 3, 7
PROBABILITY = {10: 0.002, 16: 0.004, 33: 0.01}


def as_published(losses: list[StageLoss]) -> dict[str, list[int]]:
    """Node to iterations: three nodes a stage, which die together."""
    return {
        str(node): [*(loss.round for loss in losses if loss.stage == node // REPLICAS), NEVER]
        for node in range(REPLICAS * STAGES)
    }


@pytest.mark.parametrize("percent", [10, 16, 33])
def test_the_published_schedules_are_drawn_bit_for_bit(percent: int) -> None:
    published = (DATA / f"checkfree_{percent}.json").read_text("utf-8")
    assert json.dumps(as_published(published_schedule(percent, PROBABILITY[percent]))) == published.strip()


def test_the_rates_are_the_transcribed_ones() -> None:
    rates = json.loads((DATA / "checkfree_rates.json").read_text("utf-8"))
    table = rates["per_stage_per_iteration_probability_500M"]
    assert {int(percent): p for percent, p in table.items() if percent != "5"} == PROBABILITY


def test_every_stage_fails_by_itself() -> None:
    """Long enough to tell the rate; none outside the stages asked for; neighbours fall together now and then."""
    losses = stage_losses(0.05, range(100, 4_100), range(1, 7))
    assert len(losses) == pytest.approx(0.05 * 4_000 * 6, rel=0.1)
    assert {loss.stage for loss in losses} == set(range(1, 7))
    assert losses == sorted(losses)
    assert losses[0].round >= 100
    held = set(losses)
    assert any(StageLoss(loss.round, loss.stage + 1) in held for loss in losses)
    assert losses == stage_losses(0.05, range(100, 4_100), range(1, 7))
    assert losses != stage_losses(0.05, range(100, 4_100), range(1, 7), seed=43)


def test_sure_and_impossible_losses() -> None:
    assert stage_losses(0.0, range(10), range(1, 4)) == []
    assert len(stage_losses(1.0, range(10), range(1, 4))) == 30


def test_a_rate_an_hour_becomes_one_an_iteration() -> None:
    """An hour of iterations has the probability of the hour; the published 500M rates fit 63 to 90 s."""
    a_minute = probability_of_iteration(0.16, 60.0)
    assert 1 - (1 - a_minute) ** 60 == pytest.approx(0.16)
    assert probability_of_iteration(0.16, 3600.0) == pytest.approx(0.16)
    assert probability_of_iteration(0.05, 63.2) == pytest.approx(0.0009, rel=0.01)
    with pytest.raises(LocalProtocolError):
        probability_of_iteration(1.0, 60.0)
