"""The failure-free run of a seed: where every study branches off, and what it is compared with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from benchmarks.recovery_rules import Ladder, Shadow
from benchmarks.recovery_sizes import INNER, Size
from benchmarks.recovery_trainer import State, Trainer

SMOOTHED = 3  # validations whose mean is "the loss" of a moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """`state` is that after `size.base_rounds`, `shadows` what was copied last before it."""

    trainer: Trainer
    state: State
    shadows: Mapping[int, Shadow]
    loss: float  # of `state`
    curve: dict[int, float]  # of the run without a loss, round to validation loss
    target: float  # its smoothed loss after `size.target_rounds`
    churn_end: float  # its smoothed loss after `size.churn_rounds` more than `state` has
    end_jump: float  # of its loss then, without one inner stage; mean over these

    def restored(self) -> Trainer:
        """The one trainer, as it was then: only one study may use it at a time."""
        self.trainer.restore(self.state)
        return self.trainer

    def ladder(self) -> Ladder:
        return Ladder(self.trainer, self.shadows)


def last_validations(rounds: int, every: int) -> set[int]:
    """After which rounds to validate for the smoothed loss of the last one."""
    return {rounds - every * back for back in range(SMOOTHED)}


def smoothed(curve: dict[int, float], rounds: int, every: int) -> float:
    found = [curve[moment] for moment in last_validations(rounds, every)]
    return sum(found) / len(found)


def mean_bypass(trainer: Trainer, loss: float) -> float:
    """What passing one inner stage by adds to `loss`, that of all stages; mean over these."""
    return fmean(trainer.validate({stage}) for stage in INNER) - loss


def failure_free(size: Size, seed: int) -> Base:
    """Train from nothing to the end of the longest study."""
    began_s = time.process_time()
    trainer = Trainer(size, size.spec(seed))
    ladder = Ladder(trainer)
    curve: dict[int, float] = {}
    state: State | None = None
    end_jump: float | None = None
    shadows: Mapping[int, Shadow] = {}
    churn_end, every = size.base_rounds + size.churn_rounds, size.validate_every
    rounds = max(churn_end, size.target_rounds)
    wanted = (
        last_validations(churn_end, every) | last_validations(size.target_rounds, every) | {size.base_rounds}
    )
    for _ in range(rounds):
        trainer.train()
        ladder.refresh()
        if trainer.round in wanted or trainer.round % (2 * every) == 0:
            curve[trainer.round] = trainer.validate()
        if trainer.round == size.base_rounds:
            state, shadows = trainer.snapshot(), dict(ladder.shadows)
        if trainer.round == churn_end:
            end_jump = mean_bypass(trainer, curve[churn_end])
    assert state is not None, "the base is a part of the run"
    assert end_jump is not None, "and so is its end"
    print(f"seed {seed}: failure-free {curve[size.base_rounds]:.4f} after {size.base_rounds} rounds,"
          f" {time.process_time() - began_s:.0f} CPU s", flush=True)  # fmt: skip
    return Base(
        trainer=trainer,
        state=state,
        shadows=shadows,
        loss=curve[size.base_rounds],
        curve=curve,
        target=smoothed(curve, size.target_rounds, every),
        churn_end=smoothed(curve, churn_end, every),
        end_jump=end_jump,
    )
