"""F3: tokens per CPU second of a swarm against plain torch, torch's pipelining and a chain of hivemind experts.

Each sample is a fresh process tree of one contender; CPU seconds are summed over all of it, libp2p daemons included.
The contenders take turns, so that a machine's slow minutes hit all of them, and a ratio is the median of the ratios
of turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

from benchmarks.bars import Bar, Report
from benchmarks.baselines.__main__ import NAMES, Sample
from benchmarks.workload import benchmark_spec

RATIOS_MIN = {"plain": 0.85, "pipelining": 1.0, "moe": 2.0}  # swarm / baseline, bar F3
SAMPLE_LIMIT_S = 900.0

Turn = dict[str, Sample]


def run(*, quick: bool) -> Report:
    """`micro` decides; `nano`, with a quarter of the arithmetic per byte on the wire, is reported beside it."""
    turns, seconds = (1, 15.0) if quick else (3, 30.0)
    micro = take_turns("micro", turns, seconds)
    nano = take_turns("nano", turns, seconds / 2)
    bars = tuple(
        Bar(
            id=f"F3-{baseline}", value=ratio(micro, baseline), op=">=", limit=limit,
            what=f"tokens per CPU second, micro, swarm / {baseline}",
        )
        for baseline, limit in RATIOS_MIN.items()
    )  # fmt: skip
    return Report(bars=bars, facts=(*_facts("micro", micro), *_facts("nano", nano)))


def take_turns(model: str, turns: int, seconds: float) -> list[Turn]:
    return [{name: sample(name, model, seconds) for name in NAMES} for _ in range(turns)]


def sample(contender: str, model: str, seconds: float) -> Sample:
    """One contender in a process tree of its own; what it says on standard error is shown only if it fails."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.baselines",
        contender,
        "--model",
        model,
        "--seconds",
        str(seconds),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=SAMPLE_LIMIT_S, check=False)
    if finished.returncode:
        raise RuntimeError(
            f"{contender} on {model} ended with code {finished.returncode}:\n{finished.stderr[-4000:]}"
        )
    taken = Sample(**json.loads(finished.stdout.splitlines()[-1]))
    print(f"{model} {contender}: {taken.tokens_per_cpu_s:.0f} tokens per CPU second", flush=True)
    return taken


def ratio(turns: Sequence[Turn], baseline: str) -> float:
    """Swarm over `baseline`."""
    return median(turn["swarm"].tokens_per_cpu_s / turn[baseline].tokens_per_cpu_s for turn in turns)


def hop_cpu_ms(turns: Sequence[Turn], model: str) -> float:
    """What a border crossing adds to plain torch: everything that is not arithmetic, spread over the 2 K crossings of a
    microbatch."""
    spec = benchmark_spec(model)
    extra_s_per_token = median(
        1 / turn["swarm"].tokens_per_cpu_s - 1 / turn["plain"].tokens_per_cpu_s for turn in turns
    )
    return 1e3 * extra_s_per_token * spec.tokens_per_microbatch / (2 * spec.path_stages)


def _facts(model: str, turns: Sequence[Turn]) -> list[tuple[str, str]]:
    facts = [
        (f"{model}, {name}, tokens per CPU second", _spread([turn[name].tokens_per_cpu_s for turn in turns]))
        for name in NAMES
    ]
    facts += [(f"{model}, swarm / {baseline}", f"{ratio(turns, baseline):.2f}") for baseline in NAMES[1:]]
    facts.append((f"{model}, CPU ms that one hop adds, all processes", f"{hop_cpu_ms(turns, model):.1f}"))
    return facts


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"
