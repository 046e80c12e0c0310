"""Who averages with whom: a matching of a stage's replicas that everybody computes alone from the same set.

    random      one shuffle a (run, stage, fragment, outer step); the second pair round moves on by one on that circle
    hypercube   one-peer exponential: places that differ in bit 0, then 1, 2, ... meet, if their number is a power of
                two; else every even place of a circle meets the odd one 1, 3, 7, ... places on, in turn

Any log2 N consecutive rounds of a hypercube give everybody the exact mean of a power of two; of the other numbers,
after k rounds from the first, an even place holds the mean of the 2^k places from its own on, as good but not exact.
Randomised pairs: NoLoCo (arXiv 2506.10911), section 3.2; the exponential graph: arXiv 2110.13363.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

from protocols.run_spec import PairSchedule
from protocols.swarm import PeerId


def partners(
    replicas: Iterable[PeerId],
    *,
    outer_step: int,
    stage: int,
    fragment: int,
    pair_round: int,
    rounds: int,
    seed: int,
    schedule: PairSchedule,
) -> dict[PeerId, PeerId]:
    """Partner by replica; who sits out is not in it.

    `pair_round` counts from 0 within an outer step of `rounds` of them. In the second nobody meets its partner of the
    first again; so two replicas, which are equal by then, have no second round, and three have none in a hypercube.
    """
    names = f"{seed}/{stage}/{fragment}"
    if schedule is PairSchedule.RANDOM:
        circle = _shuffled(replicas, f"{names}/{outer_step}")
        pairs = _neighbours(circle, pair_round)
    else:
        circle = _shuffled(replicas, names)
        if len(circle) % 2:
            circle.pop(outer_step % len(circle))  # in turn, and alike in both rounds
        pairs = _exponential(circle, outer_step * rounds + pair_round)
    if pair_round and len(circle) == 2:
        return {}
    return {me: other for pair in pairs for me, other in (pair, pair[::-1])}


def _shuffled(replicas: Iterable[PeerId], name: str) -> list[PeerId]:
    ordered = sorted(set(replicas))
    random.Random(hashlib.sha256(name.encode()).digest()).shuffle(ordered)
    return ordered


def _neighbours(circle: list[PeerId], shift: int) -> list[tuple[PeerId, PeerId]]:
    """Places 0 and 1, 2 and 3, ... after turning the circle by `shift`; the odd one sits out."""
    turned = circle[shift:] + circle[:shift]
    return list(zip(turned[::2], turned[1::2], strict=False))


def _exponential(circle: list[PeerId], turn: int) -> list[tuple[PeerId, PeerId]]:
    """Of an even circle: each turn a perfect matching."""
    size = len(circle)
    if size < 2:
        return []
    bit = 1 << turn % (size.bit_length() - 1)
    if size & (size - 1) == 0:
        return [(circle[place], circle[place ^ bit]) for place in range(size) if not place & bit]
    return [(circle[place], circle[(place + 2 * bit - 1) % size]) for place in range(0, size, 2)]
