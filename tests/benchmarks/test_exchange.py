"""The arithmetic of the exchange benchmark, on steps made by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks.exchange import OUTER_STEPS, Averaged, spread_ratio


def met(outer_step: int, apart: float, *, with_partner: bool = True) -> Averaged:
    """One pair round; outer step n is at second n."""
    return Averaged(
        at_s=float(outer_step),
        peer="p",
        outer_step=outer_step,
        with_partner=with_partner,
        apart=apart,
        waited_s=0.0,
    )


def test_the_spread_after_a_kill_is_that_of_the_sixth_outer_step_over_the_last_calm_ones():
    """A start-up long ago, steps alone and the first steps after the kill do not count."""
    calm = [met(step, 0.1 if step < 10 else 1.0) for step in range(20)]
    shaken = [met(20 + step, 9.0 if step < OUTER_STEPS else 1.5) for step in range(OUTER_STEPS + 3)]
    alone = [met(20 + OUTER_STEPS, 0.0, with_partner=False)]
    assert spread_ratio([*calm, *alone, *shaken], [19.5]) == pytest.approx(1.5)


def test_without_a_step_after_the_kill_there_is_no_ratio():
    assert math.isnan(spread_ratio([met(1, 1.0)], [1.5]))
