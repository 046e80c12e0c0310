"""What all contenders train."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch

from benchmarks.baselines import plain
from benchmarks.gpu import flops_per_token, gpu_spec, num_parameters
from benchmarks.workload import RoundOptimizer, benchmark_spec, training_rounds
from peer.model.llama import Llama
from protocols.run_spec import RunSpec, preset


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """The smallest model on the shortest text, its tokens in a throw-away cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return preset("pico", data={"corpus": "moby-dick"}, rounds={"rows": 4, "microbatches": 3}, seed=5)


@pytest.mark.parametrize("model", ["micro", "nano"])
def test_microbatches_hold_1024_tokens(model: str) -> None:
    """Bar F3 says so; and 1F1B wants no fewer microbatches than stages."""
    spec = benchmark_spec(model)
    assert spec.tokens_per_microbatch == 1024
    assert spec.rounds.microbatches >= spec.num_stages == 5


def test_all_see_the_same_text_in_the_same_order(spec: RunSpec) -> None:
    """Two contenders, in two processes, one after the other."""
    for one, other in itertools.islice(zip(training_rounds(spec), training_rounds(spec), strict=True), 2):
        assert len(one) == spec.rounds.microbatches
        for batch, same in zip(one, other, strict=True):
            assert torch.equal(batch.tokens_BL, same.tokens_BL)
            assert torch.equal(batch.tokens_BL[:, 1:], batch.targets_BL[:, :-1])


def test_round_step_divides_clips_and_zeroes() -> None:
    """Gradients of 4 rows add up to (30, 40); their mean has norm 12.5 and is clipped to 1."""
    weight = torch.nn.Parameter(torch.zeros(1, 2))
    weight.grad = torch.tensor([[30.0, 40.0]])
    by_hand = copy.deepcopy(weight)
    by_hand.grad = torch.tensor([[0.6, 0.8]])
    settings = preset("pico").optimizer
    RoundOptimizer(settings, [weight], rows=4).step()
    RoundOptimizer(settings, [by_hand], rows=1).step()
    torch.testing.assert_close(weight, by_hand)
    assert weight.grad is None


def test_plain_training_learns(spec: RunSpec) -> None:
    """The yardstick must be a real training, not a loop that burns CPU."""
    losses = list(itertools.islice(plain.train(spec), 12))
    assert losses[0] == pytest.approx(6.93, abs=0.1)  # uniform over 1,024 tokens
    assert losses[-1] < losses[0] - 0.3


def test_gpu_model_has_178_million_parameters() -> None:
    """Bar F9 names the size; the arithmetic per token must count the same model."""
    spec = gpu_spec()
    with torch.device("meta"):
        model = Llama(spec.model)
    assert num_parameters(spec.model) == sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters(spec.model) / 1e6 == pytest.approx(178, abs=0.5)
    assert spec.num_stages == 4
    in_matrices = sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name
    )
    assert flops_per_token(spec) == 6 * in_matrices + 6 * 18 * 1024 * 768
