"""F2: the main job itself, nine processes, two kills and a newcomer, on the real text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from peer.config import HostConfig
from peer.data import load_data
from peer.demo import RATIO_MAX, TOTAL_ROUNDS, make_spec, run_demo

ROUNDS = TOTAL_ROUNDS  # all of them: after 100, losses fall so steeply that two equal runs differ by 5 %


def unigram_loss(train: np.ndarray, validation: np.ndarray, vocab_size: int) -> float:
    """Nats a token of token frequencies alone, one added to each count."""
    counts_V = np.bincount(train, minlength=vocab_size) + 1
    return float(-np.log(counts_V / counts_V.sum())[validation].mean())


@pytest.mark.timeout(600)
def test_the_demo_learns_and_its_kills_cost_next_to_nothing(tmp_path: Path):
    """The loss falls below that of token frequencies and of a bigram model, with kills within 3 % of without."""
    run_demo(tmp_path, ROUNDS)
    summary = json.loads((tmp_path / "summary.json").read_text())
    spec = make_spec(ROUNDS)
    data = load_data(spec, HostConfig().cache_dir)
    yardstick = unigram_loss(data.train, data.validation, data.vocab_size)
    with_kills, undisturbed = summary["runs"]["with kills"], summary["runs"]["undisturbed"]
    assert undisturbed["validation_loss"] < yardstick
    assert with_kills["validation_loss"] < yardstick
    assert with_kills["validation_loss"] < summary["bigram_loss"]
    assert summary["ratio"] <= RATIO_MAX
    assert len(with_kills["events"]) == 3
    assert all(event["seconds"] is not None for event in with_kills["events"]), with_kills["events"]
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(summary["sample"]) > 100
