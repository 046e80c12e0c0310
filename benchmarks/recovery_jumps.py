"""One loss, many remedies: the jump of the loss right after it, and the rounds until training is where it was.

All remedies start from the same state and see the same text (A3, A5). And what a model that was trained with skips
loses when a stage goes (A13).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from benchmarks.bars import Bar
from benchmarks.recovery_base import Base, mean_bypass
from benchmarks.recovery_findings import Findings, ratio, spread
from benchmarks.recovery_rules import Rule, rebuild, rebuild_pair
from benchmarks.recovery_sizes import INNER, PAIRS, Size
from benchmarks.recovery_trainer import Trainer, training_skips

BYPASS, SHADOW = "bypass", "shadow"
FOLLOWED = (Rule.CHECKFREE.value, Rule.REFIT.value, SHADOW)  # whose way back is measured too
LOOK_EVERY = 5  # rounds
SHARES = (1 / 8, 1 / 2)  # `skip_train_share`: that of the bar, and more


@dataclass(slots=True)
class Jumps:
    """Of one seed: means over the inner stages."""

    jump: dict[str, float] = field(default_factory=dict)
    rounds_back: dict[str, float] = field(default_factory=dict)


def jumps(base: Base) -> Jumps:
    """Every inner stage lost in turn, every remedy."""
    jump: dict[str, list[float]] = defaultdict(list)
    back: dict[str, list[float]] = defaultdict(list)
    for stage in INNER:
        jump[BYPASS].append(base.restored().validate({stage}) - base.loss)
        for name, remedy in remedies(base, stage).items():
            trainer = base.restored()
            remedy()
            jump[name].append(trainer.validate() - base.loss)
            if name in FOLLOWED:
                back[name].append(rounds_back(trainer, base.loss, trainer.size.tail_rounds))
    return Jumps(
        jump={name: fmean(found) for name, found in jump.items()},
        rounds_back={name: fmean(found) for name, found in back.items()},
    )


def remedies(base: Base, stage: int) -> dict[str, Callable[[], object]]:
    """By name, each to be called on the restored trainer."""
    trainer = base.trainer
    found: dict[str, Callable[[], object]] = {
        rule.value: lambda rule=rule: rebuild(trainer, stage, rule)
        for rule in (Rule.RANDOM, Rule.COPY, Rule.UNIFORM, Rule.CHECKFREE, Rule.REFIT)
    }
    found[SHADOW] = lambda: base.ladder().rebuild([stage])
    return found


def rounds_back(trainer: Trainer, loss: float, rounds_max: int) -> int:
    """Rounds until the validation loss is no more than `loss`; `rounds_max` where it never was."""
    for rounds in range(0, rounds_max, LOOK_EVERY):
        if trainer.validate() <= loss:
            return rounds
        for _ in range(LOOK_EVERY):
            trainer.train()
    return rounds_max


def jump_findings(size: Size, found: list[Jumps]) -> Findings:
    """A3. Ratios of means over seeds and stages: one seed's damage may be too small to divide by."""
    jump = {name: [one.jump[name] for one in found] for name in found[0].jump}
    back = {name: [one.rounds_back[name] for one in found] for name in FOLLOWED}
    whole, whole_back = fmean(jump[Rule.CHECKFREE.value]), fmean(back[Rule.CHECKFREE.value])
    age = size.base_rounds % size.shadow_every
    bars = (
        Bar(id="A3a", value=ratio(fmean(jump[SHADOW]), whole), op="<=", limit=0.1,
            what=f"jump with a shadow {age} rounds old / CheckFree's, mean over the inner stages"),
        Bar(id="A3b", value=ratio(fmean(jump[Rule.REFIT.value]), whole), op="<=", limit=0.30,
            what="jump with mix + refit / CheckFree's"),
        Bar(id="A3c", value=ratio(fmean(back[SHADOW]), whole_back), op="<=", limit=0.6,
            what="rounds back to the loss before, shadow / CheckFree"),
        Bar(id="A3d", value=ratio(fmean(back[Rule.REFIT.value]), whole_back), op="<=", limit=0.6,
            what="rounds back to the loss before, mix + refit / CheckFree"),
    )  # fmt: skip
    facts = [
        (f"one inner stage lost, {name}: jump, nats a token", spread(values)) for name, values in jump.items()
    ]
    facts += [
        (f"one inner stage lost, {name}: rounds back", spread(values, 1)) for name, values in back.items()
    ]
    return Findings(bars=bars, facts=tuple(facts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Of one seed: means over the pairs."""

    bypass: float
    refit: float
    rounds_back: float
    num_back: int


def pairs(base: Base) -> Pairs:
    """Two stages in a row without a replica and without shadows; CheckFree has no answer."""
    bypass: list[float] = []
    fitted: list[float] = []
    back: list[int] = []
    rounds_max = 2 * base.trainer.size.tail_rounds
    for first, second in PAIRS:
        bypass.append(base.restored().validate({first, second}) - base.loss)
        trainer = base.restored()
        rebuild_pair(trainer, first)
        fitted.append(trainer.validate() - base.loss)
        back.append(rounds_back(trainer, base.loss, rounds_max))
    return Pairs(
        bypass=fmean(bypass),
        refit=fmean(fitted),
        rounds_back=fmean(back),
        num_back=sum(rounds < rounds_max for rounds in back),
    )


def pair_findings(found: list[Pairs]) -> Findings:
    """A5."""
    share = sum(one.num_back for one in found) / (len(PAIRS) * len(found))
    value = ratio(fmean(one.refit for one in found), fmean(one.bypass for one in found))
    bars = (
        Bar(id="A5a", value=value, op="<=", limit=0.25, what="adjacent pair lost: jump after a joint refit / bypass"),
        Bar(id="A5b", value=share, op=">=", limit=1.0, what="of these, back at the loss before, without rollback"),
    )  # fmt: skip
    facts = (
        ("adjacent pair lost, bypass: jump, nats a token", spread([one.bypass for one in found])),
        ("adjacent pair lost, joint refit: jump, nats a token", spread([one.refit for one in found])),
        ("adjacent pair lost, joint refit: rounds back", spread([one.rounds_back for one in found], 1)),
    )
    return Findings(bars=bars, facts=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model trained with skips, against the plain one of the same seed."""

    loss_ratio: float  # all stages
    jump: float  # mean bypass of an inner stage
    plain_jump: float


def prepared(base: Base, share: float) -> Prepared:
    """From the base's state on, as long as churn lasts, `share` of the rows skip one inner stage each."""
    trainer, spec = base.restored(), base.trainer.spec
    for _ in range(trainer.size.churn_rounds):
        trainer.train(training_skips(spec, trainer.round, share, INNER))
    loss = trainer.validate()
    return Prepared(
        loss_ratio=loss / base.curve[trainer.round],
        jump=mean_bypass(trainer, loss),
        plain_jump=base.end_jump,
    )


def prepared_findings(found: dict[float, list[Prepared]]) -> Findings:
    """A13; the second share is a fact."""
    facts = [
        ("trained plainly: bypass jump, nats a token", spread([one.plain_jump for one in found[SHARES[0]]]))
    ]
    jumps, losses = dict[float, float](), dict[float, float]()
    for share, some in found.items():
        name = f"trained with {share:.3g} of the rows skipping"
        jumps[share] = ratio(fmean(one.jump for one in some), fmean(one.plain_jump for one in some))
        losses[share] = fmean(one.loss_ratio for one in some)
        facts += [
            (f"{name}: bypass jump, nats a token", spread([one.jump for one in some])),
            (f"{name}: bypass jump / plain", f"{jumps[share]:.3f}"),
            (f"{name}: loss of all stages / plain", spread([one.loss_ratio for one in some])),
        ]
    bars = (
        Bar(id="A13a", value=jumps[SHARES[0]], op="<=", limit=0.6,
            what="bypass jump, trained with 1/8 of the rows skipping one inner stage / without"),
        Bar(id="A13b", value=losses[SHARES[0]], op="<=", limit=1.01,
            what="loss of all stages, trained so / without"),
    )  # fmt: skip
    return Findings(bars=bars, facts=tuple(facts))
