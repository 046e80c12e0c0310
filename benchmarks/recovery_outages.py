"""Crucible's study (Templar, September 2026, by its published description), and on until it breaks (A9).

8 replicas, each a pipeline of 4 stages; 1 % a replica and global step, an inner stage of it is away for 6 steps. What
passes a missing stage by: activations forward, gradients back. Against it: the whole replica idles as long. A global
step is one round here (an average after each step), so a replica is an eighth of the rows, and what it computes is
what a replica of its own would.

With more stages a replica fails more often: the rate of one stage is what stays. Further than published, any number
of a replica's inner stages may be away at once.
"""

from __future__ import annotations

import random
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
DEPTHS = (4, 16)
REPLICA_RATE = 0.01  # a global step, at PUBLISHED_DEPTH stages
PUBLISHED_DEPTH = 4
OUTAGE_ROUNDS = 6
MULTIPLES = (4, 16, 64)  # of the published rate
NONE, SKIP, DROP = "no outage", "skip the stage", "drop the replica"


class Outages:
    """Which stages are away from which replica, round by round; the same for every policy."""

    def __init__(self, depth: int, multiple: float, seed: int) -> None:
        self.inner = range(2, depth)
        rate = REPLICA_RATE * multiple * depth / PUBLISHED_DEPTH
        self._stage_rate = min(1.0, rate / len(self.inner))
        self._draws = random.Random(f"{seed}/{depth}/{multiple}/outages")
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


def outcome(size: Size, seed: int, depth: int, multiple: float, policy: str) -> Outcome:
    """Train from nothing; `depth` stages beside embedding and head."""
    trainer = Trainer(size, size.spec(seed, num_stages=depth + 1))
    outages = Outages(depth, multiple, seed)
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
    skip: list[Outcome]
    drop: list[Outcome]
    further: dict[int, tuple[Outcome, Outcome]]  # multiple of the rate: skip, drop; one seed


def study(size: Size, depth: int, *, further: bool) -> Depth:
    """The published rate with every seed; higher ones with the first."""
    runs = {
        policy: [outcome(size, seed, depth, 1, policy) for seed in size.seeds]
        for policy in (NONE, SKIP, DROP)
    }
    first = size.seeds[0]
    beyond = {
        multiple: (outcome(size, first, depth, multiple, SKIP), outcome(size, first, depth, multiple, DROP))
        for multiple in (MULTIPLES if further else ())
    }
    return Depth(none=runs[NONE], skip=runs[SKIP], drop=runs[DROP], further=beyond)


def findings(found: dict[int, Depth]) -> Findings:
    """A9."""
    bars: list[Bar] = []
    facts: list[tuple[str, str]] = []
    for depth, one in found.items():
        skip = [s.loss / n.loss for s, n in zip(one.skip, one.none, strict=True)]
        drop = [d.loss / n.loss for d, n in zip(one.drop, one.none, strict=True)]
        bars += [
            Bar(id=f"A9a.{depth}", value=fmean(skip), op="<=", limit=1.005,
                what=f"{depth} stages, 8 replicas, published rate: loss with skips / without an outage"),
            Bar(id=f"A9b.{depth}", value=fmean(skip) / fmean(drop), op="<=", limit=1.0,
                what=f"{depth} stages: loss with skips / with the replica dropped"),
        ]  # fmt: skip
        degraded = fmean(s.degraded_share for s in one.skip)
        facts += [
            (f"{depth} stages: replica-rounds with a stage away", f"{degraded:.1%}"),
            (f"{depth} stages: loss without an outage", spread([n.loss for n in one.none])),
            (f"{depth} stages: loss with skips / without an outage", spread(skip)),
            (f"{depth} stages: loss, replica dropped / without an outage", spread(drop)),
        ]
        for multiple, (skipping, dropping) in one.further.items():
            base = one.none[0].loss
            facts.append(
                (f"{depth} stages, {multiple} x the rate ({skipping.degraded_share:.0%} degraded,"
                 f" {skipping.missing_share:.0%} of inner stages away)",
                 f"skip {skipping.loss / base:.4f}, drop {dropping.loss / base:.4f} x the loss without an outage")
            )  # fmt: skip
    return Findings(bars=tuple(bars), facts=tuple(facts))
