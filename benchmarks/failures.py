"""Failures as CheckFree draws them: whole stages, at seeded moments (arXiv 2506.15461, section 5; code at 8d7d547).

Two processes, which the paper does not tell apart. The throughput runs draw once an iteration for the whole pipeline
(`published_schedule`: the three published lists, bit for bit); the convergence runs draw for every middle stage apart
(`stage_losses`). Stage 0 never fails in either.

Both stand on Python's Mersenne Twister, whose `random()` and `randint()` are the same in every version that we support.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import NamedTuple

from protocols.errors import LocalProtocolError

ITERATIONS = 500
CHECKPOINT_EVERY, CHECKPOINT_REMAINDER = 100, 1  # nothing fails while a checkpoint is written
MOMENT_SEED, STAGE_SEED_A_PERCENT = 33, 5
CONVERGENCE_SEED = 42


class StageLoss(NamedTuple):
    """All replicas of `stage` die before `round`."""

    round: int
    stage: int


def published_schedule(percent_an_hour: int, probability: float, *, num_stages: int = 7) -> list[StageLoss]:
    """The throughput runs: at most one loss an iteration, each middle stage as likely as another.

    `probability` is of a loss anywhere in an iteration. The rate in percent an hour is no more than a seed here.
    """
    moments, stages = random.Random(MOMENT_SEED), random.Random(STAGE_SEED_A_PERCENT * percent_an_hour)
    losses: list[StageLoss] = []
    for iteration in range(ITERATIONS):
        if iteration % CHECKPOINT_EVERY == CHECKPOINT_REMAINDER:
            continue  # and nothing is drawn
        if moments.random() < probability:
            losses.append(StageLoss(iteration, stages.randint(1, num_stages - 1)))
    return losses


def stage_losses(
    probability: float, rounds: range, stages: Collection[int], *, seed: int = CONVERGENCE_SEED
) -> list[StageLoss]:
    """The convergence runs: each of `stages` fails in each round by itself; neighbours may fall together."""
    draws = random.Random(seed)
    return [StageLoss(round_, stage) for round_ in rounds for stage in stages if draws.random() < probability]


def probability_of_iteration(probability_of_hour: float, iteration_s: float) -> float:
    """Of a loss within an iteration of so many seconds, where losses have no memory."""
    if not 0 <= probability_of_hour < 1 or iteration_s < 0:
        raise LocalProtocolError(f"probability {probability_of_hour} an hour, {iteration_s} s an iteration")
    return 1 - (1 - probability_of_hour) ** (iteration_s / 3600)
