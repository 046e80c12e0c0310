"""What is done about a lost stage: rules that others published, and our ladder (a shadow, else mix and refit).

Every rule begins with Adam's state lost. CheckFree and CheckFree+ are as published, two things apart: the weights of
the mix are smoothed gradient norms before clipping, and Adam's warm-up of 30 steps is everybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from torch import Tensor

from benchmarks.recovery_trainer import Trainer
from peer.compute.refit import Refit, refit
from peer.compute.shadow import (
    Restored,
    ShadowHolder,
    ShadowOwner,
    ShadowUpdate,
    is_due,
    shadowed_stage,
)
from peer.model.stage import build_stage, renumbered
from protocols.checkfree import mix, twin
from protocols.run_spec import Codec

SHADOW_CODEC = Codec.BF16
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
        flat = trainer.flats[0]
        self._trainer = trainer
        self._owner = ShadowOwner(0, flat.schema, Codec.RAW)
        self._holder = ShadowHolder(0, flat.schema, flat.size, bytes_max=4 * flat.size)
        self.keep()

    def keep(self) -> None:
        weights = self._trainer.flats[0].weights
        self._holder.take(self._owner.whole(weights, round_=self._trainer.round, outer_step=0))

    def restore(self) -> None:
        restored = self._holder.restore()
        assert restored is not None, "kept from the start"
        self._trainer.set_weights(0, restored.weights)


class Ladder:
    """Shadows in a ring, and what is done where a shadow went down with its holder."""

    def __init__(self, trainer: Trainer, updates: Sequence[ShadowUpdate] = ()) -> None:
        """`updates`: what the holders have already."""
        self._trainer = trainer
        self.last_sent = tuple(updates)
        self._owners: dict[int, ShadowOwner] = {}
        self._holders: dict[int, ShadowHolder] = {}  # by the stage that is held
        for stage in trainer.middle:
            flat = trainer.flats[stage]
            self._owners[stage] = ShadowOwner(stage, flat.schema, SHADOW_CODEC)
            self._holders[stage] = ShadowHolder(stage, flat.schema, flat.size, bytes_max=4 * flat.size)
        for update in updates:
            self._holders[update.stage].take(update)

    def refresh(self) -> None:
        """After a round: whole copies, when they are due."""
        if not is_due(self._trainer.round, self._trainer.size.shadow_every):
            return
        self.last_sent = tuple(
            owner.whole(self._trainer.flats[stage].weights, round_=self._trainer.round, outer_step=0)
            for stage, owner in self._owners.items()
        )
        for update in self.last_sent:
            self._holders[update.stage].take(update)

    def shadow(self, stage: int) -> Restored | None:
        return self._holders[stage].restore()

    def rebuild(self, lost: Sequence[int]) -> list[Rung]:
        """Stages of which no replica is left, in ascending order, all lost in one round."""
        for stage in lost:
            held = shadowed_stage(stage, self._trainer.spec.num_stages)
            if held in self._holders:
                self._holders[held].forget()
        rungs: list[Rung] = []
        without: list[int] = []
        for stage in lost:
            restored = self.shadow(stage)
            if restored is None:
                without.append(stage)
            else:
                self._trainer.set_weights(stage, restored.weights)
                rungs.append(Rung.SHADOW)
        return rungs + self._rebuild_without_shadow(without)

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
