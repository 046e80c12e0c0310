"""A model in stages: what int8 boundary tensors cost it, and what random paths between replicas do to their spread.

Both run the StageRuntimes of the product, chained in this process. Of the second nothing is averaged: in every round
each originator's microbatch takes its own column of relays, or relays drawn anew for every stage as a permutation, so
that all have equal work (NoLoCo, arXiv 2506.10911, section 3.1).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from benchmarks.averaging_team import LEARNING_RATE, ROWS, SEQ_LEN
from benchmarks.chain import train_along, whole_model
from benchmarks.skipping import Chain
from peer.compute.stage_runtime import StageRuntime
from peer.config import HostConfig
from peer.data import TokenData, load_data
from peer.evaluate import Batch, evaluate
from peer.model.llama import Llama
from protocols.messages import WorkKey
from protocols.run_spec import Codec, RunSpec, preset


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Replicas that never averaged."""

    single: float  # nats a token, mean over the columns
    spread: float  # root mean square distance of a weight from its replicas' mean


def staged_spec(seed: int, rounds: int, codec: Codec = Codec.BF16) -> RunSpec:
    """pico in its three stages."""
    return preset(
        "pico",
        name="averaging-stages",
        seed=seed,
        rounds={"rows": 2 * ROWS, "seq_len": SEQ_LEN, "microbatches": 1, "total_rounds": rounds},
        optimizer={"lr": LEARNING_RATE, "warmup_rounds": rounds // 10},
        boundary_codec=codec,
    )


def boundary_loss(spec: RunSpec, held_out_batches: int) -> float:
    """Validation loss of one replica a stage whose boundary tensors travelled as `spec.boundary_codec`."""
    data = load_data(spec, HostConfig().cache_dir)
    chain, order, size = Chain(spec), tuple(range(spec.num_stages)), spec.rounds
    for round_number in range(1, size.total_rounds + 1):
        chain.train(*data.sample(spec.seed, round_number, "replica-0", 0, size.rows, size.seq_len), order)
        chain.step(round_number)
    return _loss(chain.model(), spec, _held_out(data, held_out_batches))


def _held_out(data: TokenData, num_batches: int) -> list[Batch]:
    return [data.validation_batch(index, 64, SEQ_LEN) for index in range(num_batches)]


def _loss(model: Llama, spec: RunSpec, held_out: Sequence[Batch]) -> float:
    (whole,) = evaluate(model, spec, [tuple(range(spec.num_stages))], held_out)
    return whole.loss


def routed(spec: RunSpec, count: int, *, is_random: bool, held_out_batches: int) -> Routed:
    """Train `count` replicas of every stage without averaging; judge the columns."""
    data, draws, size = load_data(spec, HostConfig().cache_dir), random.Random(spec.seed), spec.rounds
    columns = [[StageRuntime(spec, stage) for stage in range(spec.num_stages)] for _ in range(count)]
    for round_number in range(1, size.total_rounds + 1):
        relays_of_stage = [list(range(count)) for _ in range(1, spec.num_stages)]
        if is_random:
            for relays in relays_of_stage:
                draws.shuffle(relays)
        for number, column in enumerate(columns):
            batch = data.sample(spec.seed, round_number, f"replica-{number}", 0, size.rows, size.seq_len)
            path = [columns[relays[number]][stage] for stage, relays in enumerate(relays_of_stage, start=1)]
            train_along([column[0], *path], WorkKey(f"replica-{number}", round_number, 1), batch)
        for runtime in (runtime for column in columns for runtime in column):
            runtime.inner_step(round_number)
    held_out = _held_out(data, held_out_batches)
    return Routed(
        single=fmean(_loss(whole_model(spec, column), spec, held_out) for column in columns),
        spread=_spread([torch.cat([runtime.flat.weights for runtime in column]) for column in columns]),
    )


def _spread(weights: Sequence[Tensor]) -> float:
    return float(torch.stack(list(weights)).var(0, unbiased=False).mean().sqrt())
