"""Perplexity of an exported model on held-out text, whole and with stages left out.

Residual layers make a skipped stage the identity, so any choice of stages is a model: SkipPipe's partial inference
(arXiv 2502.19913).

Shape suffixes: B rows, L tokens, D model width.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from peer.data import TokenData, load_data
from peer.generate import load_model
from peer.model.llama import Llama
from peer.partial import read_run
from protocols.run_spec import RunSpec
from protocols.stage_order import legal_orders

CHOICES_MAX = 64  # tried for one number of stages; where more are legal, drawn from them
EXPONENT_MAX = 700.0  # a float ends at e^709
Batch = tuple[Tensor, Tensor]  # tokens and targets, [B, L]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Some stages, in the order in which they run, and the loss then (nats a token)."""

    stages: tuple[int, ...]
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, EXPONENT_MAX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All choices of one number of stages that were tried."""

    num_stages: int
    num_choices: int
    best: Choice
    worst: Choice
    mean_perplexity: float


def open_export(folder: Path) -> tuple[Llama, RunSpec]:
    """An exported model, and the run that it is from, with the tokenizer of the folder."""
    model, sizes = load_model(folder)
    spec = read_run(folder, sizes)
    data = spec.data.model_copy(update={"tokenizer": str(folder / "tokenizer.json")})
    return model, spec.model_copy(update={"data": data})


def held_out(spec: RunSpec, corpus: str | None, num_tokens: int, cache_folder: Path) -> list[Batch]:
    """Batches of about so many tokens of the held-out part of `corpus` (None: the run's), no window of it twice."""
    if corpus is not None:
        data = spec.data.model_copy(update={"corpus": corpus, "corpus_sha256": ""})
        spec = spec.model_copy(update={"data": data})
    return batches(load_data(spec, cache_folder), spec, num_tokens)


def batches(data: TokenData, spec: RunSpec, num_tokens: int) -> list[Batch]:
    """Validation batches in the run's sizes."""
    size = spec.rounds
    num_batches = max(1, min(num_tokens, len(data.validation)) // spec.tokens_per_microbatch)
    return [data.validation_batch(index, size.rows, size.seq_len) for index in range(num_batches)]


@torch.inference_mode()
def evaluate(
    model: Llama, spec: RunSpec, orders: Collection[tuple[int, ...]], batches: Iterable[Batch]
) -> list[Choice]:
    """Mean loss of each order of stages, in the sequence given.

    Orders that begin alike share that part of the work; no more than one activation a stage is held.
    """
    losses: dict[tuple[int, ...], list[float]] = {order: [] for order in orders}
    for tokens_BL, targets_BL in batches:
        # after 0, 1, 2, ... stages of the order before this one
        reached_BLD = [model.model.embed_tokens(tokens_BL)]
        before: tuple[int, ...] = ()
        for order in sorted(losses):
            num_shared = _num_shared(before, order)
            del reached_BLD[num_shared + 1 :]
            for stage in order[num_shared:]:
                reached_BLD.append(model.model(reached_BLD[-1], spec.layer_range(stage)))
            logits_BLV = model.head(reached_BLD[-1])
            losses[order].append(float(F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())))
            before = order
    return [Choice(stages=order, loss=fmean(found)) for order, found in losses.items()]


def _num_shared(left: Sequence[int], right: Sequence[int]) -> int:
    """How far both begin alike."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return sum(1 for _ in alike)


def legal_choices(spec: RunSpec, num_stages: int) -> list[tuple[int, ...]]:
    """Stages that a path of this length may run, in the model's order; of many, CHOICES_MAX drawn at random."""
    orders = legal_orders(spec.num_stages, num_stages, swaps_max=0, skip_width_max=spec.paths.skip_width_max)
    if len(orders) <= CHOICES_MAX:
        return list(orders)
    return sorted(random.Random(num_stages).sample(orders, CHOICES_MAX))


def table(choices: Sequence[Choice]) -> list[Row]:
    """A row for each number of stages, the whole model first."""
    rows = []
    for num_stages in sorted({len(choice.stages) for choice in choices}, reverse=True):
        alike = sorted((c for c in choices if len(c.stages) == num_stages), key=lambda c: (c.loss, c.stages))
        mean = fmean(choice.perplexity for choice in alike)
        rows.append(
            Row(num_stages=num_stages, num_choices=len(alike), best=alike[0], worst=alike[-1], mean_perplexity=mean)
        )  # fmt: skip
    return rows
