"""The contenders of bar F3 train the same model on the same text: their losses agree."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.baselines import plain
from protocols.run_spec import RunSpec, preset

ROUNDS = 3
IN_A_PROCESS_OF_ITS_OWN = """
import itertools, json, sys
from contextlib import closing
from importlib import import_module
import torch
from protocols.run_spec import RunSpec

torch.set_num_threads(1)
contender, spec, rounds = sys.argv[1:]
with closing(import_module(f"benchmarks.baselines.{contender}").train(RunSpec.from_json(spec))) as losses:
    print(json.dumps(list(itertools.islice(losses, int(rounds)))))
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """Three stages on a short text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return preset(
        "pico", name="baselines", data={"corpus": "moby-dick"}, optimizer={"lr": 1e-3},
        rounds={"rows": 4, "microbatches": 3, "eval_every": 0}, seed=5,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)  # each process imports torch first
@pytest.mark.parametrize("contender", ["pipelining", "moe"])
def test_a_baseline_computes_what_plain_torch_computes(contender: str, spec: RunSpec) -> None:
    """A baseline that skipped a stage or a step would be a straw man. AdamW's first steps hide a clipped scale."""
    expected = list(itertools.islice(plain.train(spec), ROUNDS))
    command = [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN, contender, spec.to_json(), str(ROUNDS)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    losses = json.loads(finished.stdout.splitlines()[-1])
    assert losses == pytest.approx(expected, abs=5e-3)
    assert losses[-1] < losses[0]
