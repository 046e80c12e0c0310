"""A part of F4: the whole is `python -m benchmarks simulator`."""

from __future__ import annotations

from benchmarks.simulator import KILLS, LAYOUT, MICROBATCHES, simulate


def test_the_swarm_of_the_bar_loses_and_leaks_nothing_and_repeats_itself() -> None:
    """20 peers, 200 microbatches, three kills; the same seed without encoding and checks tells the same story."""
    outcome = simulate(0)
    assert (sum(LAYOUT.values()), KILLS) == (20, 3)
    assert outcome.finished >= MICROBATCHES
    assert outcome.is_clean
    assert simulate(0, thorough=False).digest == outcome.digest
    assert simulate(1).digest != outcome.digest
