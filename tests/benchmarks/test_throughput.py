"""Ratios and costs, worked out by hand; the samples themselves are `make bench`."""

from __future__ import annotations

import pytest

from benchmarks.baselines.__main__ import NAMES, Sample
from benchmarks.throughput import RATIOS_MIN, Turn, hop_cpu_ms, ratio


def a_sample(contender: str, tokens_per_cpu_s: float) -> Sample:
    return Sample(
        contender=contender,
        model="micro",
        rounds=1,
        tokens=8192,
        cpu_s=8192 / tokens_per_cpu_s,
        wall_s=1.0,
        loss=8.0,
    )


def a_turn(**rates: float) -> Turn:
    return {name: a_sample(name, rate) for name, rate in rates.items()}


def test_ratio_is_the_median_of_turns() -> None:
    """The machine was at half speed in the second turn, and the swarm alone was disturbed in the third."""
    turns = [a_turn(swarm=900, plain=1000), a_turn(swarm=450, plain=500), a_turn(swarm=300, plain=1000)]
    assert ratio(turns, "plain") == pytest.approx(0.9)


def test_hop_cost_is_what_is_not_arithmetic() -> None:
    """1,024 tokens: 1.024 s of CPU plain and 1.124 s in the swarm, over 10 crossings."""
    turns = [a_turn(plain=1000, swarm=1024 / 1.124)]
    assert hop_cpu_ms(turns, "micro") == pytest.approx(10.0)


def test_every_bar_has_its_contender() -> None:
    """The table and the bars name the same baselines."""
    assert set(RATIOS_MIN) < set(NAMES)
