"""What is done about a lost stage: rules that others published, and our ladder (a shadow, else mix and refit).

Every rule begins with Adam's state lost. CheckFree and CheckFree+ are as published, two things apart: the weights of
the mix are smoothed gradient norms before clipping, and Adam's warm-up of 30 steps is everybody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from torch import Tensor

from benchmarks.recovery_trainer import Trainer
from peer.compute.refit import Refit, refit
from peer.model.stage import build_stage, renumbered
from protocols.checkfree import mix, twin
from protocols.shadows import holder_stages, shadowed_stages

RANDOM_SEED_SHIFT = 7_919  # another draw than the run's own first weights


class Rule(str, Enum):
    """How a lost stage comes back."""

    RANDOM = "random"
    COPY = "copy of a neighbour"
    UNIFORM = "uniform mix"
    CHECKFREE = "CheckFree"
    CHECKFREE_PLUS = "CheckFree+"
    REFIT = "mix + refit"


class Rung(str, Enum):
    """Which step of the ladder brought a stage back."""

    SHADOW = "shadow"
    MIX_REFIT = "mix + refit"
    EDGE_REFIT = "copy + refit"
    PAIR_REFIT = "pair + refit"


def rebuild(trainer: Trainer, stage: int, rule: Rule) -> None:
    """By `rule`, from the neighbours as they are in memory: of two that fall together the later reads a rebuilt one."""
    match rule:
        case Rule.RANDOM:
            other = trainer.spec.model_copy(update={"seed": trainer.spec.seed + RANDOM_SEED_SHIFT})
            trainer.set_weights(stage, dict(build_stage(other, stage).named_parameters()))
        case Rule.COPY:
            trainer.set_weights(stage, _copy(trainer, stage))
        case Rule.UNIFORM:
            trainer.set_weights(stage, _mixed(trainer, stage, by_norms=False))
        case Rule.CHECKFREE | Rule.CHECKFREE_PLUS:  # they differ in how the run was trained
            trainer.set_weights(stage, _mixed(trainer, stage, by_norms=True), boosted=True)
        case Rule.REFIT:
            trainer.set_weights(stage, _mixed(trainer, stage, by_norms=True))
            fit(trainer, stage, stage)


def _has_two_neighbours(trainer: Trainer, stage: int) -> bool:
    """Of its own shape."""
    return 1 < stage < trainer.spec.num_stages - 1


def _mixed(trainer: Trainer, stage: int, *, by_norms: bool) -> dict[str, Tensor]:
    """Of both neighbours; at the edge a copy: CheckFree+'s answer, and what CheckFree's code does for want of one."""
    if not _has_two_neighbours(trainer, stage):
        return _copy(trainer, stage)
    left, right = _as(trainer, stage - 1, stage), _as(trainer, stage + 1, stage)
    norms = (trainer.norms[stage - 1], trainer.norms[stage + 1]) if by_norms else (1.0, 1.0)
    return mix(left, right, *norms)


def _copy(trainer: Trainer, stage: int) -> dict[str, Tensor]:
    """Of the stage before; at the edges of the twin."""
    inner = _has_two_neighbours(trainer, stage)
    source = stage - 1 if inner else twin(stage, trainer.spec.num_stages)
    assert source is not None, "an edge has a twin"
    return _as(trainer, source, stage)


def _as(trainer: Trainer, source: int, target: int) -> dict[str, Tensor]:
    """Copies of the weights of `source` under the names of `target`."""
    flat = trainer.flats[source]
    named = {name: weight.clone() for name, weight in flat.by_name(flat.weights).items()}
    return renumbered(trainer.spec, named, source, target)


def fit(trainer: Trainer, first: int, last: int) -> Refit:
    """Boundary refit of stages `first` to `last` together; a pair takes twice the steps of one."""
    stages = range(first, last + 1)
    outcome = refit(
        [trainer.middle[stage] for stage in stages],
        trainer.boundaries_of(first, last),
        steps=len(stages) * trainer.size.refit_steps,
        lr=trainer.spec.optimizer.lr,
    )
    for stage in stages:
        trainer.restart_adam(stage)
    return outcome


def rebuild_pair(trainer: Trainer, first: int) -> Refit:
    """Stages `first` and `first + 1`, fitted together from copies of the outer neighbours."""
    spec, second = trainer.spec, first + 1
    left = first - 1 if first > 1 else second + 1
    right = second + 1 if second < spec.num_stages - 1 else first - 1
    copies = {first: _as(trainer, left, first), second: _as(trainer, right, second)}
    for stage, weights in copies.items():
        trainer.set_weights(stage, weights)
    return fit(trainer, first, second)


class ExactEnds:
    """CheckFree+: embedding, final norm and head, which other peers keep bit for bit after every round."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.keep()

    def keep(self) -> None:
        self._weights = self._trainer.flats[0].weights.clone()

    def restore(self) -> None:
        self._trainer.set_weights(0, self._weights)


@dataclass(frozen=True, slots=True)
class Shadow:
    """A copy of a stage's weights at the end of `round`, and the stages whose peers have it; nobody writes to it."""

    weights: Tensor  # flat fp32
    round: int
    holders: frozenset[int]


class Ladder:
    """Shadows in a ring, and what is done where a shadow went down with its last holder."""

    def __init__(self, trainer: Trainer, shadows: Mapping[int, Shadow] | None = None) -> None:
        """`shadows`: what the holders have already, by the stage that is held."""
        self._trainer = trainer
        self.shadows: dict[int, Shadow] = dict(shadows or {})

    def refresh(self) -> None:
        """After a round: copies of all stages but the first, when they are due."""
        trainer = self._trainer
        if trainer.round % trainer.size.shadow_every == 0:
            for stage in trainer.middle:
                holders = frozenset(holder_stages(stage, trainer.spec))
                self.shadows[stage] = Shadow(trainer.flats[stage].weights.clone(), trainer.round, holders)

    def rebuild(self, lost: Sequence[int]) -> list[Rung]:
        """Stages of which no replica is left, in ascending order, all lost in one round."""
        for holder in lost:
            for stage in shadowed_stages(holder, self._trainer.spec):
                self._forget(stage, holder)
        rungs: list[Rung] = []
        without: list[int] = []
        for stage in lost:
            shadow = self.shadows.get(stage)
            if shadow is None:
                without.append(stage)
            else:
                self._trainer.set_weights(stage, shadow.weights)
                rungs.append(Rung.SHADOW)
        return rungs + self._rebuild_without_shadow(without)

    def _forget(self, stage: int, holder: int) -> None:
        shadow = self.shadows.pop(stage, None)
        if shadow is not None and (others := shadow.holders - {holder}):
            self.shadows[stage] = replace(shadow, holders=others)

    def _rebuild_without_shadow(self, stages: Sequence[int]) -> list[Rung]:
        rungs: list[Rung] = []
        done: set[int] = set()
        for stage in stages:
            if stage in done:
                continue
            if stage + 1 in stages:
                rebuild_pair(self._trainer, stage)
                done.add(stage + 1)
                rungs += [Rung.PAIR_REFIT, Rung.PAIR_REFIT]
                continue
            rebuild(self._trainer, stage, Rule.REFIT)
            inner = _has_two_neighbours(self._trainer, stage)
            rungs.append(Rung.MIX_REFIT if inner else Rung.EDGE_REFIT)
        return rungs
