"""Crucible's study (Templar, September 2026, by its published description), and on until it breaks (A9).

8 replicas, each a pipeline of 4 stages; 1 % a replica and global step, an inner stage of it is away for 6 steps. What
passes a missing stage by: activations forward, gradients back. Against it: the whole replica idles as long. A global
step is one round here (an average after each step), so a replica is an eighth of the rows, and what it computes is
what a replica of its own would.

With more stages a replica fails more often: the rate of one stage is what stays. Further than published, any number
of a replica's inner stages may be away at once.

Runs are compared in pairs: first weights, text and its order are the same, and outages the one difference. The rate
falls to a tenth by a cosine: at a constant one the end of a run is as much chance as cause. What chance is left is
measured by a second draw of outages for every seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from benchmarks.bars import Bar
from benchmarks.recovery_base import last_validations
from benchmarks.recovery_findings import Findings, spread
from benchmarks.recovery_sizes import Size
from benchmarks.recovery_trainer import Trainer

REPLICAS = 8
SEEDS_AT_DEPTH = {4: 3, 16: 2}  # at most
REPLICA_RATE = 0.01  # a global step, at PUBLISHED_DEPTH stages
PUBLISHED_DEPTH = 4
OUTAGE_ROUNDS = 6
MULTIPLES = (8, 64)  # of the published rate
DRAWS = (0, 1)  # of outages, for one run without them
NONE, SKIP, DROP = "no outage", "skip the stage", "drop the replica"


class Outages:
    """Which stages are away from which replica, round by round; the same for every policy."""

    def __init__(self, depth: int, multiple: float, seed: int, draw: int = 0) -> None:
        self.inner = range(2, depth)
        rate = REPLICA_RATE * multiple * depth / PUBLISHED_DEPTH
        self._stage_rate = min(1.0, rate / len(self.inner))
        self._draws = random.Random(f"{seed}/{depth}/{multiple}/outages/{draw}")
        self._until = {(stage, replica): 0 for stage in self.inner for replica in range(REPLICAS)}
        self.num_missing = 0  # of replica-rounds of inner stages
        self.num_degraded = 0  # replica-rounds with a stage away

    def away(self, round_: int) -> dict[int, set[int]]:
        """Stage to replicas without it, in this round; to be asked once a round."""
        missing: dict[int, set[int]] = {}
        for (stage, replica), end in self._until.items():
            if round_ >= end and self._draws.random() < self._stage_rate:
                end = self._until[stage, replica] = round_ + OUTAGE_ROUNDS
            if round_ < end:
                missing.setdefault(stage, set()).add(replica)
        self.num_missing += sum(map(len, missing.values()))
        self.num_degraded += len(set().union(*missing.values()))
        return missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run."""

    loss: float  # smoothed, all stages
    degraded_share: float  # of replica-rounds
    missing_share: float  # of an inner stage's replica-rounds


def outcome(size: Size, seed: int, depth: int, multiple: float, policy: str, draw: int = 0) -> Outcome:
    """Train from nothing; `depth` stages beside embedding and head."""
    trainer = Trainer(size, size.spec(seed, num_stages=depth + 1, is_outage_study=True))
    outages = Outages(depth, multiple, seed, draw)
    looks = last_validations(size.crucible_rounds, size.validate_every)
    losses: list[float] = []
    for round_ in range(size.crucible_rounds):
        away = {} if policy == NONE else outages.away(round_)
        if policy == DROP:
            train_without(trainer, rows_of(set().union(*away.values()), size.rows))
        else:
            trainer.train({stage: rows_of(replicas, size.rows) for stage, replicas in away.items()})
        if round_ + 1 in looks:
            losses.append(trainer.validate())
    total = REPLICAS * size.crucible_rounds
    print(f"seed {seed}, {depth} stages, {multiple} x the rate, {policy}: {fmean(losses):.4f}", flush=True)
    return Outcome(
        loss=fmean(losses),
        degraded_share=outages.num_degraded / total,
        missing_share=outages.num_missing / (total * len(outages.inner)),
    )


def rows_of(replicas: set[int], rows: int) -> Tensor:
    """[B]: which rows belong to these replicas; each has as many."""
    return torch.tensor([row * REPLICAS // rows in replicas for row in range(rows)])


def train_without(trainer: Trainer, dropped_B: Tensor) -> None:
    """A round in which some replicas do nothing."""
    if not bool(dropped_B.all()):
        tokens_BL, targets_BL = trainer.batch()
        trainer.accumulate(tokens_BL[~dropped_B], targets_BL[~dropped_B], trainer.order, {})
    trainer.step()


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Everything about one depth: each list has a value a seed."""

    none: list[Outcome]
    skip: list[list[Outcome]]  # one a draw of outages
    drop: list[Outcome]
    further: dict[int, tuple[Outcome, Outcome]]  # multiple of the rate: skip, drop; one seed, one draw

    def skip_ratios(self) -> list[list[float]]:
        """Loss / that of the same seed's run without an outage."""
        return [[o.loss / base.loss for o in some] for some, base in zip(self.skip, self.none, strict=True)]

    def drop_ratios(self) -> list[float]:
        return [o.loss / base.loss for o, base in zip(self.drop, self.none, strict=True)]

    def published(self) -> tuple[float, float]:
        """Mean ratios at the published rate: skip, drop."""
        return fmean(map(fmean, self.skip_ratios())), fmean(self.drop_ratios())


def study(size: Size, depth: int, *, further: bool) -> Depth:
    """The published rate with every seed; higher ones with the first."""
    seeds = size.seeds[: SEEDS_AT_DEPTH[depth]]
    none = [outcome(size, seed, depth, 1, NONE) for seed in seeds]
    skip = [[outcome(size, seed, depth, 1, SKIP, draw) for draw in DRAWS] for seed in seeds]
    drop = [outcome(size, seed, depth, 1, DROP) for seed in seeds]
    first = seeds[0]
    beyond = {
        multiple: (outcome(size, first, depth, multiple, SKIP), outcome(size, first, depth, multiple, DROP))
        for multiple in (MULTIPLES if further else ())
    }
    return Depth(none=none, skip=skip, drop=drop, further=beyond)


def noise(pairs: Sequence[Sequence[float]]) -> float:
    """Standard deviation of one run by its draw of outages alone, from two draws a seed."""
    return math.sqrt(fmean((first - second) ** 2 / 2 for first, second in pairs))


def findings(found: dict[int, Depth]) -> Findings:
    """A9."""
    bars: list[Bar] = []
    facts: list[tuple[str, str]] = []
    for depth, one in found.items():
        bases = [o.loss for o in one.none]
        skip, drop = one.skip_ratios(), one.drop_ratios()
        mean_skip, mean_drop = one.published()
        bars += [
            Bar(id=f"A9a.{depth}", value=mean_skip, op="<=", limit=1.005,
                what=f"{depth} stages, 8 replicas, published rate: loss with skips / without an outage"),
            Bar(id=f"A9b.{depth}", value=mean_skip / mean_drop, op="<=", limit=1.0,
                what=f"{depth} stages: loss with skips / with the replica dropped"),
        ]  # fmt: skip
        degraded = fmean(o.degraded_share for some in one.skip for o in some)
        facts += [
            (f"{depth} stages: replica-rounds with a stage away", f"{degraded:.1%}"),
            (f"{depth} stages: loss without an outage", spread(bases)),
            (f"{depth} stages: loss with skips / without an outage", spread(list(map(fmean, skip)))),
            (f"{depth} stages: loss, replica dropped / without an outage", spread(drop)),
            (f"{depth} stages: of this, noise (two draws of outages a seed, std of one run)", f"{noise(skip):.4f}"),
        ]  # fmt: skip
        facts += [
            (f"{depth} stages, {multiple} x the rate ({skipping.degraded_share:.0%} degraded,"
             f" {skipping.missing_share:.0%} of inner stages away)",
             f"skip {skipping.loss / bases[0]:.4f}, drop {dropping.loss / bases[0]:.4f} x the loss without an outage")
            for multiple, (skipping, dropping) in one.further.items()
        ]  # fmt: skip
    return Findings(bars=tuple(bars), facts=tuple(facts))
