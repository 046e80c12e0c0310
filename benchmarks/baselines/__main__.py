"""`python -m benchmarks.baselines NAME --model micro --seconds 20`: measure one contender, alone in its process tree.

Prints one JSON object, and the rate on standard error. `--seconds` are CPU seconds of the whole tree; whole rounds
are measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import import_module

import psutil
import torch

from benchmarks.cpu import tree_cpu_s
from benchmarks.workload import benchmark_spec, tokens_per_round

NAMES = ("swarm", "plain", "pipelining", "moe", "moe_half")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one measurement gave. `wall_s` is for the curious: it depends on the machine's other load."""

    contender: str
    model: str
    rounds: int
    tokens: int
    cpu_s: float
    wall_s: float
    loss: float

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / self.cpu_s


def measure(contender: str, model: str, *, warm_up: int, seconds: float) -> Sample:
    """Train `warm_up` rounds, then whole rounds until they took `seconds` of CPU time."""
    torch.set_num_threads(1)
    spec = benchmark_spec(model)
    me = psutil.Process()
    # the swarm's process tree lies below a launcher whose looking on is no part of the training
    include_self = contender != "swarm"
    with closing(import_module(f"benchmarks.baselines.{contender}").train(spec)) as losses:
        for _ in range(warm_up):
            next(losses)
        start_cpu_s, start_wall_s = tree_cpu_s(me, include_self=include_self), time.perf_counter()
        rounds, loss, cpu_s = 0, float("nan"), 0.0
        while cpu_s < seconds:
            loss = next(losses)
            rounds += 1
            cpu_s = tree_cpu_s(me, include_self=include_self) - start_cpu_s
        wall_s = time.perf_counter() - start_wall_s
    tokens = rounds * tokens_per_round(spec)
    return Sample(
        contender=contender, model=model, rounds=rounds, tokens=tokens, cpu_s=cpu_s, wall_s=wall_s, loss=loss
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.baselines")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--model", choices=("micro", "nano"), default="micro")
    parser.add_argument("--warm-up", type=int, default=2, metavar="ROUNDS")
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds to measure (default 20)")
    options = parser.parse_args()
    sample = measure(options.name, options.model, warm_up=options.warm_up, seconds=options.seconds)
    print(json.dumps(asdict(sample)))
    print(f"{sample.tokens_per_cpu_s:.0f} tokens per CPU second", file=sys.stderr)


if __name__ == "__main__":
    main()
