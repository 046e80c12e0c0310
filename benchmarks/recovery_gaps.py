"""What churn costs: the gap at equal rounds (A4), and the rounds to an equal loss (A8)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from benchmarks.bars import Bar
from benchmarks.recovery_base import Base, last_validations
from benchmarks.recovery_churn import (
    PROBABILITIES,
    RATES,
    Climbing,
    Course,
    Rebuilding,
    Remedy,
    RollingBack,
    branch,
    course,
    draws,
    without_adjacent,
)
from benchmarks.recovery_findings import Findings, ratio, spread
from benchmarks.recovery_rules import Ladder, Rule
from benchmarks.recovery_sizes import INNER, MIDDLE
from benchmarks.recovery_trainer import Trainer

LADDER, CHECKPOINT = "ladder", "checkpoint"
BRANCHES = (Rule.CHECKFREE.value, LADDER, CHECKPOINT)
CHURN_RATES = {"1x": PROBABILITIES["16"], "2x": 2 * PROBABILITIES["16"]}
TARGET_LIMITS = {"5": 1.05, "10": 1.10, "16": 1.15}  # an hour, in percent: rounds / failure-free
PATIENCE = 1.5  # times the failure-free rounds; longer we do not wait for a loss
WORST = "16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Of one seed and rate: final loss - failure-free, by remedy."""

    gap: dict[str, float]
    num_losses: int


def gaps(base: Base, probability: float) -> Gaps:
    """From the base's state on, inner stages lost in the same rounds under each remedy."""
    size, seed = base.trainer.size, base.trainer.spec.seed
    losses = without_adjacent(draws(probability, size.churn_rounds, INNER, seed))
    looks = last_validations(size.churn_rounds, size.validate_every)
    gap: dict[str, float] = {}
    for name in BRANCHES:
        trainer = base.restored()
        found = course(trainer, branch(base, name, trainer), losses, rounds=size.churn_rounds, looks=looks)
        gap[name] = found.last - base.churn_end
    return Gaps(gap=gap, num_losses=len(losses))


def gap_findings(found: dict[str, list[Gaps]]) -> Findings:
    """A4, each rate by itself."""
    bars: list[Bar] = []
    facts: list[tuple[str, str]] = []
    for rate, seeds in found.items():
        mean = {name: fmean(one.gap[name] for one in seeds) for name in BRANCHES}
        for letter, name, limit in (("a", Rule.CHECKFREE.value, 0.25), ("b", CHECKPOINT, 0.5)):
            bars.append(
                Bar(id=f"A4{letter}.{rate}", value=ratio(mean[LADDER], mean[name]), op="<=", limit=limit,
                    what=f"final loss gap of the ladder / of {name}, {rate} the 16 % rate")
            )  # fmt: skip
        counts = ", ".join(str(one.num_losses) for one in seeds)
        facts.append((f"churn, {rate} the 16 % rate: stages lost", counts))
        facts += [
            (f"churn, {rate}: gap of {name}, nats a token", spread([one.gap[name] for one in seeds]))
            for name in BRANCHES
        ]
    return Findings(bars=tuple(bars), facts=tuple(facts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A run to the target, and what it took."""

    rounds_ratio: float  # rounds / failure-free rounds
    course: Course
    rungs: str


def to_target(base: Base, percent: str) -> Reached:
    """The ladder from nothing, every middle stage may be lost, edges and neighbours included."""
    trainer = Trainer(base.trainer.size, base.trainer.spec)
    remedy = Climbing(trainer, Ladder(trainer))
    found = _to_target(base, trainer, remedy, percent)
    rungs = ", ".join(f"{num} {rung.value}" for rung, num in sorted(remedy.rungs.items()))
    return Reached(
        rounds_ratio=found.rounds / base.trainer.size.target_rounds, course=found, rungs=rungs or "none"
    )


def _to_target(base: Base, trainer: Trainer, remedy: Remedy, percent: str) -> Course:
    size = trainer.size
    rounds, every = int(PATIENCE * size.target_rounds), size.validate_every
    early, late = range(5 * every, size.target_rounds * 4 // 5, 5 * every), range(0, rounds + 1, every)
    looks = {*early, *(moment for moment in late if moment >= size.target_rounds * 4 // 5)}
    losses = draws(PROBABILITIES[percent], rounds, MIDDLE, base.trainer.spec.seed)
    return course(trainer, remedy, losses, rounds=rounds, looks=looks, target=base.target)


def target_findings(found: dict[str, list[Reached]]) -> Findings:
    """A8."""
    published = RATES["iterations_to_loss_2.85_over_failure_free"]["checkfree_plus"]
    bars = tuple(
        Bar(id=f"A8.{percent}", value=fmean(one.rounds_ratio for one in seeds), op="<=", limit=TARGET_LIMITS[percent],
            what=f"rounds to the target loss, ladder at {percent} % an hour / failure-free (CheckFree+, published:"
                 f" {published[percent]})")
        for percent, seeds in found.items()
    )  # fmt: skip
    facts: list[tuple[str, str]] = []
    for percent, seeds in found.items():
        facts.append(
            (
                f"to the target at {percent} %: rounds / failure-free",
                spread([one.rounds_ratio for one in seeds]),
            )
        )
        facts.append((f"to the target at {percent} %: rungs taken", "; ".join(one.rungs for one in seeds)))
    return Findings(bars=bars, facts=tuple(facts))


def others(base: Base) -> dict[str, Course]:
    """Other remedies to the same target at 16 % an hour, one seed: for the table and the picture."""
    found: dict[str, Course] = {}
    for name in (Rule.CHECKFREE.value, Rule.CHECKFREE_PLUS.value, CHECKPOINT):
        trainer = Trainer(base.trainer.size, base.trainer.spec)
        remedy: Remedy = RollingBack(trainer) if name == CHECKPOINT else Rebuilding(trainer, Rule(name))
        found[name] = _to_target(base, trainer, remedy, WORST)
    return found


def other_facts(base: Base, found: dict[str, Course]) -> tuple[tuple[str, str], ...]:
    """Rounds and modelled hours to the target, each over the failure-free run's; or where they stood at the end."""
    rounds, rows = base.trainer.size.target_rounds, []
    for name, one in found.items():
        took = f"{one.rounds / rounds:.2f} x rounds"
        if one.last > base.target:
            took = f"not in {one.rounds / rounds:.2f} x rounds: {one.last - base.target:+.3f} nats"
        rows.append((f"to the target at 16 %, seed 0, {name} ({one.num_losses} lost)", took))
    return tuple(rows)
