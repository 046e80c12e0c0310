"""Random numbers for the search: the same on every machine and with every release of the numerics library.

SplitMix64, counted rather than chained, so that a whole block is one vectorised expression. (Steele, Lea, Flood: Fast
splittable pseudorandom number generators, 2014; the constants are theirs.)
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (numpy's stubs leave the types of reductions, .T and .copy() open)

from __future__ import annotations

import math

import numpy as np

from protocols.planning.instance import Floats

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


class Draws:
    """A seeded stream of numbers that are evenly spread over [0, 1)."""

    def __init__(self, seed: int) -> None:
        self._state = (seed * 0xD1342543DE82EF95 + 1) & _MASK

    def uniform(self, *shape: int) -> Floats:
        count = math.prod(shape)
        bits = np.uint64(self._state) + _GAMMA * np.arange(
            1, count + 1, dtype=np.uint64
        )  # wraps round, as it should
        self._state = (self._state + int(_GAMMA) * count) & _MASK
        bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
        bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
        bits ^= bits >> np.uint64(31)
        return ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(shape)
