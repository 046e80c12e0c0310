"""`gossamer export --run` and `gossamer average` as a person meets them; what comes from a swarm is in tests/live."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import peer.collect
from dht.identity import Identity, friendly_name
from dht.node import CannotReachSwarm
from peer.cli import main
from peer.collect import Came, Progress, StageWeights
from peer.config import HostConfig
from peer.generate import load_model
from peer.model.stage import build_stage
from peer.replicas import StageMissing
from peer.run_file import write_run_file
from protocols.run_spec import RunSpec, preset

SPEC = preset("pico")
SOMEWHERE = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


@pytest.fixture
def live(tmp_path: Path) -> list[str]:
    path = tmp_path / "run.json"
    write_run_file(path, SPEC, Identity.load_or_create(tmp_path / "owner.key"))
    return ["--run", str(path), "--initial-peers", SOMEWHERE]


def a_stage(stage: int) -> StageWeights:
    """Two replicas of each, one of them a round behind; the first weights of the run, and their negatives."""
    weights = {name: weight.detach() for name, weight in build_stage(SPEC, stage).state_dict().items()}
    came = tuple(
        Came(peer=f"p{stage}{number}", round=300 - number, outer_step=3, num_bytes=2_000_000, seconds=0.5)
        for number in range(2)
    )
    return StageWeights(
        stage=stage,
        weights=weights,
        spread=0.0125,
        came=came,
        failed={f"p{stage}9": "was silent for 60 s"} if stage == 1 else {},
        single={name: -weight for name, weight in weights.items()},
    )


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the swarm, of which two replicas of each stage answer."""
    takes: list[str] = []

    async def collect(spec: RunSpec, host: HostConfig, take: str, report: Any, **options: Any) -> Any:
        assert (spec, host.initial_peers) == (SPEC, (SOMEWHERE,))
        takes.append(take)
        for num_bytes, share, seconds in ((1e6, 0.2, 1.0), (3e6, 0.6, 2.5), (4e6, 0.8, 3.0), (5e6, 1.0, 4.0)):
            report(Progress(stage=0, donor="p00", num_bytes=int(num_bytes), share=share, seconds=seconds))
        report(Progress(stage=1, donor="p19", problem="was silent for 60 s"))
        return tuple(a_stage(stage) for stage in range(SPEC.num_stages))

    monkeypatch.setattr(peer.collect, "collect", collect)
    return takes


def test_export_from_a_swarm_names_every_replica_in_the_card(
    live: list[str], taken: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["export", str(tmp_path / "model"), *live]) == 0
    captured = capsys.readouterr()
    assert taken == ["average"]
    card = (tmp_path / "model" / "README.md").read_text()
    mean_of = f"mean of {friendly_name('p20')} at round 300, {friendly_name('p21')} at round 299"
    assert f"| weights of stage 2 | {mean_of} |" in card
    assert "| rounds | 300 |" in card
    model, _ = load_model(tmp_path / "model")
    assert torch.equal(model.lm_head.weight, a_stage(0).weights["lm_head.weight"])
    assert captured.out.splitlines()[-1] == f"exported to {tmp_path / 'model'}"
    assert captured.out.splitlines()[1].split()[:5] == ["0", "2", "299-300", "0.0125", "4"]
    name = friendly_name("p00")
    assert captured.err.splitlines() == [
        f"stage 0 from {name}: 60%, 3 MB at 1.2 MB/s",
        f"stage 0 from {name}: 100%, 5 MB at 1.25 MB/s",
        f"stage 1 from {friendly_name('p19')}: was silent for 60 s",
    ]


def test_average_shows_spread_and_both_losses(
    live: list[str], taken: list[str], capsys: pytest.CaptureFixture[str]
):
    """The mean and the single replicas are different models, so that it matters which is which."""
    assert main(["average", *live, "--eval", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (taken, shown["run"]) == (["average"], SPEC.run_id)
    assert [stage["spread"] for stage in shown["stages"]] == [0.0125] * 3
    assert shown["stages"][1]["failed"] == {"p19": "was silent for 60 s"}
    assert shown["stages"][2]["bytes"] == 4_000_000
    assert shown["stages"][2]["replicas"][1] == {
        "name": friendly_name("p21"),
        "peer": "p21",
        "round": 299,
        "outer_step": 3,
        "num_bytes": 2_000_000,
        "seconds": 0.5,
    }
    losses = shown["eval"]["average_loss_nats"], shown["eval"]["single_loss_nats"]
    assert losses[0] == pytest.approx(6.93, abs=0.1)  # ln 1024: nothing is learned yet
    assert losses[0] != losses[1]
    assert main(["average", *live, "--eval", "1"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0] == f"{SPEC.run_id}: 6 replicas of 3 stages"
    assert len(table) == 6
    assert table[-1].startswith(
        f"loss on 1 held-out microbatches: {losses[0]:.4f} of the mean, {losses[1]:.4f}"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "model", "--take", "best"], "go with --run"),
        (["export", "model", "--initial-peers", SOMEWHERE], "go with --run"),
        (["export", "model", "folder", "--run", "x-0"], "drop one of them"),
        (["export", "model", "--live", "--run", "x-0"], "drop one of them"),
        (["export", "model", "--run", "x-0"], "which swarm?"),
        (["average", "--run", "x-0"], "which swarm?"),
        (["average", "--initial-peers", SOMEWHERE], "which swarm?"),
        (["average", "--run", "x.json", "--initial-peers", SOMEWHERE], "x.json cannot be read"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"), [(StageMissing("no live replica of stage 1"), 1), (CannotReachSwarm("nobody"), 3)]
)
@pytest.mark.parametrize("verb", ["export", "average"])
def test_a_swarm_that_has_no_whole_model_costs_no_file(
    live: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    verb: str,
):
    async def collect(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(peer.collect, "collect", collect)
    before = sorted(tmp_path.iterdir())
    assert main([verb, *([str(tmp_path / "model")] if verb == "export" else []), *live]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"gossamer: {error}\n")
    assert sorted(tmp_path.iterdir()) == before
