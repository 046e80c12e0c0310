"""Training under a stream of losses: each remedy along the same draws, against the run without a loss (A4, A8).

Rates are the published ones of the 500M model; draws are those of its convergence simulator, with a seed of our own.
Wall time is modelled: the published seconds of an iteration and of a rebuild, over rounds that are really trained.
A lost round of a rollback counts; our refit stalls the run for as long as its steps take on one stage.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from benchmarks.failures import CONVERGENCE_SEED, StageLoss, stage_losses
from benchmarks.recovery_base import SMOOTHED, Base
from benchmarks.recovery_rules import ExactEnds, Ladder, Rule, Rung, rebuild
from benchmarks.recovery_trainer import Trainer
from protocols.checkfree import is_swapped, swapped_order

RATES: dict[str, Any] = json.loads(
    (Path(__file__).with_name("data") / "checkfree_rates.json").read_text("utf-8")
)
PROBABILITIES: dict[str, float] = RATES["per_stage_per_iteration_probability_500M"]
ITERATION_S: float = RATES["iteration_s_500M"]["checkfree"]
CHECKPOINT_ITERATION_S: float = RATES["iteration_s_500M"]["checkpoint"]
REDUNDANT_ITERATION_S: float = RATES["iteration_s_500M"]["redundant"]
REBUILD_S: float = RATES["recovery_s_per_stage"]


class Remedy(Protocol):
    """What a run does, round by round. `round_s` is modelled, as are the seconds that `repair` returns."""

    round_s: float

    def repair(self, lost: Sequence[int]) -> float: ...
    def train(self) -> None: ...


class Rebuilding:
    """By one rule, for good."""

    def __init__(self, trainer: Trainer, rule: Rule) -> None:
        self.round_s = ITERATION_S
        self._trainer = trainer
        self._rule = rule
        self._ends = ExactEnds(trainer) if rule is Rule.CHECKFREE_PLUS else None

    def repair(self, lost: Sequence[int]) -> float:
        for stage in lost:
            if stage == 0 and self._ends is not None:
                self._ends.restore()
            else:
                rebuild(self._trainer, stage, self._rule)
        return REBUILD_S * len(lost)

    def train(self) -> None:
        if self._ends is None:
            self._trainer.train()
        else:
            train_swapped(self._trainer)
            self._ends.keep()


def train_swapped(trainer: Trainer) -> None:
    """CheckFree+: a round of two microbatches, one of them swapped."""
    tokens_BL, targets_BL = trainer.batch()
    rows = trainer.spec.rounds.rows // 2
    swapped = swapped_order(trainer.spec.num_stages)
    for microbatch, (tokens, targets) in enumerate(
        zip(tokens_BL.split(rows), targets_BL.split(rows), strict=True)
    ):
        trainer.accumulate(tokens, targets, swapped if is_swapped(microbatch) else trainer.order, {})
    trainer.step()


class RollingBack:
    """All stages go back to the last checkpoint, and read the same text again."""

    def __init__(self, trainer: Trainer) -> None:
        self.round_s = CHECKPOINT_ITERATION_S
        self._trainer = trainer
        self._checkpoint = trainer.snapshot()

    def repair(self, lost: Sequence[int]) -> float:
        self._trainer.restore(self._checkpoint)
        return REBUILD_S * len(lost)

    def train(self) -> None:
        self._trainer.train()
        if self._trainer.round % self._trainer.size.checkpoint_every == 0:
            self._checkpoint = self._trainer.snapshot()


class Climbing:
    """Our ladder."""

    def __init__(self, trainer: Trainer, ladder: Ladder) -> None:
        self.round_s = ITERATION_S
        self.rungs: Counter[Rung] = Counter()
        self._trainer = trainer
        self._ladder = ladder

    def repair(self, lost: Sequence[int]) -> float:
        rungs = self._ladder.rebuild(lost)
        self.rungs.update(rungs)
        num_fitted = sum(rung is not Rung.SHADOW for rung in rungs)
        fit_s = self._trainer.size.refit_steps * ITERATION_S / len(self._trainer.middle)
        return REBUILD_S * len(lost) + fit_s * num_fitted

    def train(self) -> None:
        self._trainer.train()
        self._ladder.refresh()


@dataclass(frozen=True, slots=True)
class Point:
    """A validation on the way; `rounds` are those trained, the repeated ones included."""

    rounds: int
    loss: float
    modelled_s: float


@dataclass(slots=True)
class Course:
    """One run under losses."""

    points: list[Point] = field(default_factory=list)
    num_losses: int = 0

    @property
    def last(self) -> float:
        """Mean of the last validations."""
        some = self.points[-SMOOTHED:]
        return sum(point.loss for point in some) / len(some)

    @property
    def rounds(self) -> int:
        return self.points[-1].rounds


def course(
    trainer: Trainer,
    remedy: Remedy,
    losses: Sequence[StageLoss],
    *,
    rounds: int,
    looks: Collection[int],
    target: float | None = None,
) -> Course:
    """Train `rounds` rounds; a `StageLoss.round` counts from the start. Ends early at the smoothed loss `target`."""
    lost = {
        moment: [loss.stage for loss in some] for moment, some in groupby(losses, lambda loss: loss.round)
    }
    found, modelled_s = Course(), 0.0
    for moment in range(rounds):
        if moment in lost:
            modelled_s += remedy.repair(lost[moment])
            found.num_losses += len(lost[moment])
        remedy.train()
        modelled_s += remedy.round_s
        if moment + 1 in looks:
            found.points.append(Point(moment + 1, trainer.validate(), modelled_s))
            if target is not None and len(found.points) >= SMOOTHED and found.last <= target:
                break
    return found


def draws(probability: float, rounds: int, stages: Sequence[int], seed: int) -> list[StageLoss]:
    """The published process with a seed of this run's."""
    return stage_losses(probability, range(rounds), stages, seed=CONVERGENCE_SEED + seed)


def without_adjacent(losses: Sequence[StageLoss]) -> list[StageLoss]:
    """Of two neighbours that fall together the first alone: CheckFree could do nothing about both."""
    kept: list[StageLoss] = []
    for loss in losses:
        if not kept or kept[-1].round != loss.round or loss.stage - kept[-1].stage > 1:
            kept.append(loss)
    return kept


def branch(base: Base, name: str, trainer: Trainer) -> Remedy:
    """The remedies of A4, on the base's state."""
    match name:
        case "ladder":
            return Climbing(trainer, base.ladder())
        case "checkpoint":
            return RollingBack(trainer)
        case _:
            return Rebuilding(trainer, Rule(name))
