"""P8: what skips in training cost a model, and how much of it can be left out afterwards.

A tiny LLaMa of 8 stages, one layer each, learns from the same text in the same order and from the same first weights in
three ways, at equal tokens. Two of them skip a quarter of all stage runs: evenly, 6 of the 8 stages on every path as
SkipPipe has it (arXiv 2502.19913: skip ratio 1 - 6/8), or early, with paths that grow from 3 stages to all 8, because a
model that has learnt little has no use for depth yet. Paths are legal ones, drawn so that the stages after the first
run equally often, over the StageRuntimes of the product, chained in this process.

The bars are measured on the early way, which changes `paths.path_stages` at three rounds; the even way is told
beside it. The lengths were found with seeds 0 and 1, so others are measured here.

All this is early in training: about 4.05 nats a token, where a bigram model has 3.85. With more tokens (600 rounds, a
model of 4 stages) depth counts for more, and skips were seen to cost 2 to 4 % of the loss.

Half a model: which 4 stages is chosen on one part of the held-out text, and what they cost is measured on the rest.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from benchmarks.bars import Bar, Report
from benchmarks.chain import train_along, whole_model
from peer.compute.stage_runtime import StageRuntime
from peer.config import HostConfig
from peer.data import load_data
from peer.evaluate import Batch, batches, evaluate, legal_choices
from peer.model.llama import Llama
from protocols.messages import WorkKey
from protocols.run_spec import RunSpec, preset
from protocols.stage_order import legal_orders

STAGES, HALF = 8, 4
WHOLE = tuple(range(STAGES))
WAYS = {"all": (8,), "even": (6,), "early": (3, 4, 7, 8, 8)}
"""How to train: the stages that a path runs, in equal parts of the run."""

ROUNDS, ROUNDS_QUICK = 400, 100
SEEDS, SEEDS_QUICK = (2, 3, 4), (2,)
CHOOSE_TOKENS, REPORT_TOKENS = 16_384, 49_152  # of held-out text
T_95 = {3: 4.303}  # Student's t for the 95 % interval of a mean of so many
ORIGINATOR = "benchmark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One model: its loss, and which half of its stages is best and what it costs."""

    loss: float  # nats a token, all stages
    half: tuple[int, ...]
    half_ratio: float  # perplexity with that half / with all
    skipped_share: float  # of stage runs in training


def run(*, quick: bool) -> Report:
    torch.set_num_threads(1)
    found: dict[str, list[Trained]] = {way: [] for way in WAYS}
    for seed in SEEDS_QUICK if quick else SEEDS:
        spec = skipping_spec(seed, ROUNDS_QUICK if quick else ROUNDS)
        for way in WAYS:
            found[way].append(trained(spec, way))
    bars = (
        Bar(id="P8a", value=fmean(loss_ratios(found, "early")), op="<=", limit=1.01,
            what="validation loss, a quarter skipped (early) / nothing skipped"),
        Bar(id="P8b", value=fmean(one.half_ratio for one in found["early"]), op="<=", limit=1.07,
            what="perplexity of that model, half of its stages / all"),
    )  # fmt: skip
    return Report(bars=bars, facts=_facts(found))


def _facts(found: dict[str, list[Trained]]) -> tuple[tuple[str, str], ...]:
    rows: list[tuple[str, str]] = []
    for way, seeds in found.items():
        named = f"{way} ({seeds[0].skipped_share:.0%} skipped)"
        rows.append((f"{named}: validation loss, nats a token", _spread([one.loss for one in seeds])))
        if way != "all":
            rows.append((f"{named}: loss / loss without skips", _spread(loss_ratios(found, way))))
        halves = ", ".join("".join(map(str, one.half)) for one in seeds)
        rows.append((f"{named}: perplexity, half / all", _spread([one.half_ratio for one in seeds])))
        rows.append((f"{named}: stages of that half", halves))
    return tuple(rows)


def _spread(values: Sequence[float]) -> str:
    """Mean, its 95 % interval, and every seed."""
    seeds = ", ".join(f"{value:.4f}" for value in values)
    if len(values) == 1:
        return seeds
    margin = T_95[len(values)] * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):.4f} +- {margin:.4f} ({seeds})"


def loss_ratios(found: dict[str, list[Trained]], way: str) -> list[float]:
    """Seed by seed: a pair shares text and first weights."""
    return [skipping.loss / whole.loss for skipping, whole in zip(found[way], found["all"], strict=True)]


def skipping_spec(seed: int, rounds: int) -> RunSpec:
    """pico's width, one layer a stage; small microbatches, so that the paths of a round differ."""
    fields = preset("pico", name="skipping", seed=seed).model_dump()
    fields |= {"num_stages": STAGES, "first_stage_layers": 1}
    fields["model"] |= {"num_hidden_layers": STAGES}
    fields["rounds"] |= {"rows": 8, "seq_len": 64, "microbatches": 2, "total_rounds": rounds}
    fields["optimizer"] |= {"lr": 5e-3, "warmup_rounds": 60}
    return RunSpec.model_validate(fields)


def trained(spec: RunSpec, way: str) -> Trained:
    """Train, judge, and tell."""
    began_s = time.process_time()
    data = load_data(spec, HostConfig().cache_dir)
    chain, paths = Chain(spec), Paths(spec)
    size = spec.rounds
    for round_number in range(size.total_rounds):
        length = WAYS[way][round_number * len(WAYS[way]) // size.total_rounds]
        for counter in range(size.microbatches):
            tokens_BL, targets_BL = data.sample(
                spec.seed, round_number, ORIGINATOR, counter, size.rows, size.seq_len
            )
            chain.train(tokens_BL, targets_BL, paths.draw(length))
        chain.step(round_number)
    held_out = batches(data, spec, CHOOSE_TOKENS + REPORT_TOKENS)
    num_choosing = CHOOSE_TOKENS // spec.tokens_per_microbatch
    outcome = judged(
        chain.model(), spec, held_out[:num_choosing], held_out[num_choosing:], paths.skipped_share
    )
    print(f"seed {spec.seed}, {way}: loss {outcome.loss:.4f}, half {outcome.half_ratio:.4f},"
          f" {time.process_time() - began_s:.0f} CPU s", flush=True)  # fmt: skip
    return outcome


def judged(
    model: Llama, spec: RunSpec, choosing: Sequence[Batch], reporting: Sequence[Batch], skipped_share: float
) -> Trained:
    """Two texts: the best of many choices looks better than it is on the text that it was chosen by."""
    best = min(
        evaluate(model, spec, legal_choices(spec, HALF), choosing), key=lambda choice: choice.loss
    ).stages
    whole, half = evaluate(model, spec, [WHOLE, best], reporting)
    ratio = half.perplexity / whole.perplexity
    return Trained(loss=whole.loss, half=best, half_ratio=ratio, skipped_share=skipped_share)


class Paths:
    """Equal visits: of the legal orders of a length, one of those whose stages have run least."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._random = random.Random(spec.seed)
        self._visits = [0] * spec.num_stages

    def draw(self, length: int) -> tuple[int, ...]:
        orders = legal_orders(
            self._spec.num_stages, length, swaps_max=0, skip_width_max=self._spec.paths.skip_width_max
        )
        visits = {order: sum(self._visits[stage] for stage in order[1:]) for order in orders}
        fewest = min(visits.values())
        order = self._random.choice([order for order in orders if visits[order] == fewest])
        for stage in order:
            self._visits[stage] += 1
        return order

    @property
    def skipped_share(self) -> float:
        """Of the stage runs that there would have been without skips."""
        return 1 - sum(self._visits) / (self._visits[0] * self._spec.num_stages)


class Chain:
    """One replica of each stage, in this process."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._stages = [StageRuntime(spec, stage) for stage in range(spec.num_stages)]
        self._counter = 0

    def train(self, tokens_BL: Tensor, targets_BL: Tensor, order: Sequence[int]) -> float:
        """One microbatch there and back; the loss."""
        self._counter += 1
        key = WorkKey(ORIGINATOR, self._counter, 1)
        return train_along([self._stages[stage] for stage in order], key, (tokens_BL, targets_BL))

    def step(self, round_number: int) -> None:
        for runtime in self._stages:
            runtime.inner_step(round_number)

    def model(self) -> Llama:
        """A copy of what the stages hold."""
        return whole_model(self._spec, self._stages)
