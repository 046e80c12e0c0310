"""Random numbers that are the same on every machine: plans of all originators hang on them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protocols.planning.draws import Draws

GAMMA, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def plain(seed: int, count: int) -> list[float]:
    """SplitMix64 in whole numbers, as its authors write it."""
    state, found = (seed * 0xD1342543DE82EF95 + 1) & MASK, []
    for _ in range(count):
        state = (state + GAMMA) & MASK
        mixed = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & MASK
        found.append(((mixed ^ mixed >> 31) >> 11) * 2.0**-53)
    return found


@given(st.integers(0, 1 << 40), st.integers(1, 30), st.integers(1, 30))
def test_blocks_are_the_plain_generator_whatever_their_size(seed: int, first: int, second: int):
    draws = Draws(seed)
    found = np.concatenate((draws.uniform(first), draws.uniform(second)))
    assert found.tolist() == plain(seed, first + second)


def test_they_are_spread_over_0_to_1():
    found = Draws(3).uniform(100, 100)
    assert found.shape == (100, 100)
    assert 0 <= found.min() < found.max() < 1
    assert abs(found.mean() - 0.5) < 0.01
