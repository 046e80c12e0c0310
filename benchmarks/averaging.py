"""N7, N8 and the codecs: how well pairs that average keep up with replicas that all step together.

Replicas of a tiny LLaMa learn from real text in one process (`benchmarks.averaging_team`), all ways from the same
first weights, with the same tokens in the same order. Each family has its own inner rate, the best of the two or three
that were tried at seed 1, which is not reported: a coarse scan, no optimum. 10 inner steps between averagings unless
a name says otherwise; DiLoCo as the NoLoCo paper ran it has 20, and heavy ball 0.3 (arXiv 2506.10911, section 4).
Perplexities are compared seed by seed, of the mean loss of the single replicas; the averaged model and the best replica
are told, too. Rows with one loss are one seed.

Bytes are those that a replica sends in a round and weight, so that ways of different intervals compare.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.averaging_pipeline import boundary_loss, routed, staged_spec
from benchmarks.averaging_plots import draw
from benchmarks.averaging_team import DENSE_BYTES, ROWS, SEQ_LEN, Outcome, Replica, Team, Way, team_spec
from benchmarks.bars import Bar, Report
from protocols.run_spec import Codec, OuterMode, OuterSpec, PairSchedule

PICTURE = Path(__file__).with_name("averaging.png")
COMPACT_FRAGMENTS = 12  # with int8's scales, 1/48 of fp32

PUBLISHED = OuterSpec(mode=OuterMode.PAPER, alpha=0.5, beta=0.7, gamma=0.7)


def proposing(
    *,
    alpha: float = 0.0,
    beta: float = 1.0,
    rounds: int = 1,
    codec: Codec = Codec.RAW,
    schedule: PairSchedule = PairSchedule.RANDOM,
    fragments: int = 1,
    inner_steps: int = 10,
) -> OuterSpec:
    return OuterSpec(
        mode=OuterMode.PROPOSE, alpha=alpha, beta=beta, rounds=rounds, codec=codec, schedule=schedule,
        fragments=fragments, inner_steps=inner_steps,
    )  # fmt: skip


# Proposals without momentum are the fast weights: plain gossip. At seed 1 and 300 rounds alpha 0.3, beta 0.7 did worse
# with 10 inner steps and a little better with 20; alpha 0.5 and more did far worse with 10. One setting
# was 0.47 nats apart on two seeds, so that one seed orders little.
DILOCO = OuterSpec(mode=OuterMode.PAPER, inner_steps=20, alpha=0.3, beta=0.7, gamma=0.7)
OURS = "propose, every 5, 2 rounds"
WAYS = {
    "data parallel": Way(outer=None),
    "DiLoCo as published": Way(outer=DILOCO, is_group_of_all=True, learning_rate=4e-3),
    "DiLoCo, Nesterov": Way(outer=proposing(alpha=0.9, beta=0.7), is_group_of_all=True, learning_rate=6e-3),
    "NoLoCo as published": Way(outer=PUBLISHED, learning_rate=2e-3),
    OURS: Way(outer=proposing(inner_steps=5, rounds=2)),
    "propose": Way(outer=proposing()),
    "propose, every 2": Way(outer=proposing(inner_steps=2)),
    "propose, hypercube": Way(outer=proposing(schedule=PairSchedule.HYPERCUBE)),
    "propose, int8": Way(outer=proposing(codec=Codec.INT8)),
    "propose, int8, every 50": Way(outer=proposing(codec=Codec.INT8, inner_steps=50)),
    "propose, int8 fragments": Way(outer=proposing(codec=Codec.INT8, fragments=COMPACT_FRAGMENTS)),
    "propose, int8 fragments, top-k": Way(
        outer=proposing(codec=Codec.INT8, fragments=2 * COMPACT_FRAGMENTS), has_changes=True
    ),
    "propose, 1 hostile": Way(outer=proposing(), is_one_hostile=True),
}
AT_ALL_SEEDS = tuple(WAYS)[:5]  # what N7 compares; the others at the first seed alone
OTHER_SIZES = ("data parallel", OURS)
COMPACT = ("propose, int8 fragments", "propose, int8 fragments, top-k")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is run."""

    rounds: int
    seeds: tuple[int, ...]
    replicas: int
    other_replicas: tuple[int, ...]
    held_out_batches: int  # of 4,096 tokens
    curve_points: int
    routed_replicas: int


FULL = Size(
    rounds=600, seeds=(2, 3, 4), replicas=8, other_replicas=(4, 16), held_out_batches=4, curve_points=6,
    routed_replicas=4,
)  # fmt: skip
QUICK = Size(
    rounds=100,
    seeds=(2,),
    replicas=8,
    other_replicas=(),
    held_out_batches=1,
    curve_points=5,
    routed_replicas=2,
)
Found = Mapping[str, Sequence[Outcome]]


def run(*, quick: bool) -> Report:
    torch.set_num_threads(1)
    size = QUICK if quick else FULL
    found = {
        name: [trained(name, seed, size.replicas, size) for seed in size.seeds[: _num_seeds(name)]]
        for name in WAYS
    }  # fmt: skip
    boundaries = {
        codec: [boundary_loss(staged_spec(seed, size.rounds, codec), size.held_out_batches) for seed in size.seeds]
        for codec in (Codec.RAW, Codec.INT8)
    }  # fmt: skip
    facts = [*_rows(found), _trend(found), *_other_sizes(size), *_routing(size)]
    facts += [(f"boundary tensors {c.value}: validation loss", _seeds(v)) for c, v in boundaries.items()]
    if not quick:
        spec = team_spec(size.seeds[0], size.rounds)
        draw(
            PICTURE, {name: outcomes[0] for name, outcomes in found.items()},
            round_tokens=size.replicas * ROWS * SEQ_LEN, num_weights=Replica(spec).flat.size,
        )  # fmt: skip
        facts.append(("picture", f"[{PICTURE.name}]({PICTURE.name})"))
    return Report(bars=_bars(found, boundaries), facts=tuple(facts))


def trained(name: str, seed: int, replicas: int, size: Size) -> Outcome:
    began_s = time.process_time()
    team = Team(
        team_spec(seed, size.rounds, WAYS[name].learning_rate), replicas, WAYS[name],
        held_out_batches=size.held_out_batches, curve_points=size.curve_points,
    )  # fmt: skip
    outcome = team.run()
    print(
        f"N {replicas}, seed {seed}, {name}: single {outcome.single:.4f}, averaged {outcome.averaged:.4f}, "
        f"{time.process_time() - began_s:.0f} CPU s",
        flush=True,
    )
    return outcome


def perplexity_ratio(found: Found, name: str, base: str) -> float:
    """Mean over the seeds that both have seen: a pair shares text and first weights."""
    pairs = zip(found[name], found[base], strict=False)  # the seeds come in the same order
    return fmean(math.exp(one.single - other.single) for one, other in pairs)


def _trend(found: Found) -> tuple[str, str]:
    """Is the rest of the gap a matter of time? Perplexities on the way."""
    rounds = [round_number for round_number, _ in found[OURS][0].curve]
    ours, base = (
        [fmean(outcome.curve[at][1] for outcome in found[name]) for at in range(len(rounds))]
        for name in (OURS, "data parallel")
    )
    told = (
        f"{math.exp(one - other):.3f} ({number})"
        for number, one, other in zip(rounds, ours, base, strict=True)
    )
    return f"{OURS}: perplexity / data parallel, on the way (round)", ", ".join(told)


def _num_seeds(name: str) -> int | None:
    return None if name in AT_ALL_SEEDS else 1


def loss_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    return fmean(one / other for one, other in zip(values, base, strict=True))


def _bars(found: Found, boundaries: Mapping[Codec, Sequence[float]]) -> tuple[Bar, ...]:
    """Of the compact ways the one that loses least; it and the hostile one at one seed."""
    raw = [one.single for one in found["propose"]]
    compact = min(COMPACT, key=lambda name: loss_ratio([one.single for one in found[name]], raw))
    dense_bytes = DENSE_BYTES / proposing().inner_steps  # of a weight in a round
    saving = found[compact][0].round_bytes / dense_bytes
    return (
        Bar(id="N7a", value=perplexity_ratio(found, OURS, "data parallel"), op="<=", limit=1.10,
            what=f"perplexity of a replica, {OURS} / data parallel"),
        Bar(id="N7b", value=perplexity_ratio(found, OURS, "DiLoCo as published"), op="<=", limit=1.0,
            what=f"perplexity of a replica, {OURS} / DiLoCo as published"),
        Bar(id="N7c", value=perplexity_ratio(found, OURS, "DiLoCo, Nesterov"), op="<=", limit=1.02,
            what=f"stretch: perplexity of a replica, {OURS} / DiLoCo, Nesterov"),
        Bar(id="N7d", value=perplexity_ratio(found, OURS, "data parallel"), op="<=", limit=1.05,
            what=f"stretch: perplexity of a replica, {OURS} / data parallel"),
        Bar(id="N8", value=perplexity_ratio(found, "propose, 1 hostile", "propose"), op="<=", limit=1.5,
            what="perplexity of an honest replica, 1 of 8 hostile / none"),
        Bar(id="C-boundary", value=loss_ratio(boundaries[Codec.INT8], boundaries[Codec.RAW]), op="<=", limit=1.005,
            what="validation loss, boundary tensors int8 / raw"),
        Bar(id="C-outer-bytes", value=saving, op="<=", limit=1 / 40,
            what=f"bytes of the averaging, {compact} / dense fp32"),
        Bar(id="C-outer-loss", value=loss_ratio([one.single for one in found[compact]], raw), op="<=", limit=1.005,
            what=f"validation loss of a replica, {compact} / propose, raw"),
    )  # fmt: skip


def _rows(found: Found) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, outcomes in found.items():
        ratio = perplexity_ratio(found, name, "data parallel")
        averaged, best = fmean(one.averaged for one in outcomes), fmean(one.best for one in outcomes)
        spread, sent = (fmean(v) for v in zip(*((o.spread, o.round_bytes) for o in outcomes), strict=True))
        told = (
            f"{_seeds([one.single for one in outcomes])}, averaged {averaged:.4f}, best {best:.4f}; perplexity "
            f"{ratio:.3f} of data parallel; spread {spread:.2g}; {sent:.3g} bytes a weight and round"
        )
        rows.append((f"{name}, rate {WAYS[name].learning_rate:g}: loss of a replica", told))
    return rows


def _other_sizes(size: Size) -> list[tuple[str, str]]:
    """Other numbers of replicas, each with as many tokens a replica; one seed."""
    rows: list[tuple[str, str]] = []
    for replicas in size.other_replicas:
        found = {name: [trained(name, size.seeds[0], replicas, size)] for name in OTHER_SIZES}
        rows += [(f"N {replicas}, {name}", text) for name, text in _rows(found)]
    return rows


def _routing(size: Size) -> list[tuple[str, str]]:
    """Without averaging: do paths that change partners hold replicas together?"""
    spec = staged_spec(size.seeds[0], size.rounds)
    fixed, mixed = (
        routed(spec, size.routed_replicas, is_random=is_random, held_out_batches=size.held_out_batches)
        for is_random in (False, True)
    )
    return [
        ("not averaged, own columns: loss, spread", f"{fixed.single:.4f}, {fixed.spread:.3g}"),
        ("not averaged, random paths: loss, spread", f"{mixed.single:.4f}, {mixed.spread:.3g}"),
        ("spread, random paths / own columns", f"{mixed.spread / fixed.spread:.3f}"),
    ]


def _seeds(values: Sequence[float]) -> str:
    told = ", ".join(f"{value:.4f}" for value in values)
    return told if len(values) == 1 else f"{fmean(values):.4f} ({told})"
