"""F9: four peers on one CUDA card against plain torch in one process: 178 M parameters, bf16. Recorded, no bar.

Without a card it says so and ends well. For a machine without network: on another one with the same Python (3.10 to
3.12) and platform, in the repository's root,

    python -m pip wheel --wheel-dir wheels .

and carry `wheels` and the checkout over. There:

    python -m venv --system-site-packages .venv                        # keeps a torch that knows the card
    .venv/bin/python -m pip install --no-index --find-links wheels gossamer
    .venv/bin/python -m benchmarks gpu --quick                         # under 3 minutes

A torch >= 2.6 that is there already is used as it is; then its wheel need not be carried. The text is built in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import torch

from benchmarks.bars import Report
from benchmarks.baselines import plain, swarm
from benchmarks.workload import tokens_per_round
from protocols.run_spec import ModelSpec, RunSpec

ROUNDS_WARM_UP = 2
PEAK_SIDE = 8192  # a square product of this size runs at what a card can really do
PEAK_REPEATS = 20


def run(*, quick: bool) -> Report:
    if not torch.cuda.is_available():
        return Report(skipped="torch sees no CUDA card on this machine")
    seconds = 15.0 if quick else 60.0
    spec = gpu_spec()
    peak = matmul_flops_per_s()
    # the swarm first: until a process of ours has a model on the card, the peers have all of its memory
    rates = {
        name: tokens_per_s(spec, contender.train(spec, "cuda"), seconds)
        for name, contender in (("swarm of 4 peers", swarm), ("plain torch", plain))
    }
    facts = [
        ("card", f"{torch.cuda.get_device_name()}, bf16 product {peak / 1e12:.0f} TFLOP/s"),
        ("parameters", f"{num_parameters(spec.model) / 1e6:.0f} M"),
    ]
    facts += [
        (name, f"{rate:.0f} tokens/s, {rate * flops_per_token(spec) / peak:.1%} of that product's rate")
        for name, rate in rates.items()
    ]
    facts.append(("swarm / plain", f"{rates['swarm of 4 peers'] / rates['plain torch']:.2f}"))
    return Report(facts=tuple(facts))


def gpu_spec() -> RunSpec:
    """18 layers of width 768: 3 on the first stage beside embedding and head, 5 on each of the others."""
    model = ModelSpec(
        vocab_size=32_768, hidden_size=768, intermediate_size=2048, num_hidden_layers=18,
        num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=1024,
    )  # fmt: skip
    return RunSpec.model_validate(
        {
            "name": "benchmark-gpu", "seed": 1, "num_stages": 4, "first_stage_layers": 3, "model": model,
            "optimizer": {"dtype": "bfloat16", "lr": 6e-4},
            "rounds": {"rows": 4, "seq_len": 1024, "microbatches": 8, "window": 6, "slots": 6,
                       "eval_every": 0, "total_rounds": 100_000},
            "data": {"corpus": "moby-dick", "tokenizer": "bpe4096"},
        }
    )  # fmt: skip


def tokens_per_s(spec: RunSpec, losses: Iterator[float], seconds: float) -> float:
    """Wall-clock rate of whole rounds after a warm-up: on a card of one's own, wall time is what counts."""
    with closing(losses):  # type: ignore[type-var]  # a generator
        for _ in range(ROUNDS_WARM_UP):
            next(losses)
        rounds, start_s = 0, time.perf_counter()
        while time.perf_counter() - start_s < seconds:
            next(losses)
            rounds += 1
        return rounds * tokens_per_round(spec) / (time.perf_counter() - start_s)


def num_parameters(model: ModelSpec) -> int:
    return num_matrix_parameters(model) + model.vocab_size * model.hidden_size + norms(model)


def num_matrix_parameters(model: ModelSpec) -> int:
    """Those that every token is multiplied with: all but embedding and norms."""
    width, kv_width = model.hidden_size, model.num_key_value_heads * model.head_dim
    layer = 2 * width * (width + kv_width) + 3 * width * model.intermediate_size
    return model.num_hidden_layers * layer + width * model.vocab_size


def norms(model: ModelSpec) -> int:
    return (2 * model.num_hidden_layers + 1) * model.hidden_size


def flops_per_token(spec: RunSpec) -> float:
    """Forward and backward: 6 a parameter, and causal attention's 6 L D a layer (half of 12, since half is masked)."""
    attention = 6 * spec.model.num_hidden_layers * spec.rounds.seq_len * spec.model.hidden_size
    return 6 * num_matrix_parameters(spec.model) + attention


def matmul_flops_per_s() -> float:
    left, right = (torch.randn(PEAK_SIDE, PEAK_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for repeats in (3, PEAK_REPEATS):  # warm-up, then what counts
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(repeats):
            left @ right
        torch.cuda.synchronize()
    return PEAK_REPEATS * 2 * PEAK_SIDE**3 / (time.perf_counter() - start_s)
