"""The model of a swarm that runs: asked of its replicas by a reader that is no peer, while one of them is killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dht.identity import Identity, friendly_name
from peer.checkpoint import list_checkpoints
from peer.cli import main
from peer.collect import Progress, collect
from peer.config import HostConfig
from peer.launch import LocalPeer, LocalSwarm
from peer.replicas import BEST, stage_shapes
from peer.run_file import write_run_file
from protocols.run_spec import preset
from tests.live.until import wait_until

ROUNDS = 13  # the last outer step is due at 10: when all are at the end, nobody's weights change any more
SPEC = preset(
    "pico",
    "live",
    rounds=dict(total_rounds=ROUNDS, rows=2, microbatches=6, eval_every=0),
    liveness=dict(heartbeat_s=1.0, record_ttl_s=6.0, view_poll_s=1.0, ping_s=1.0),
)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """Two replicas of stage 1, one of the others; all rounds are over, and the table says so."""
    folder = tmp_path_factory.mktemp("collect")
    with LocalSwarm(SPEC, {0: 1, 1: 2, 2: 1}, folder, {"checkpoint_every": 0}) as swarm:
        wait_until(lambda: is_over(swarm), 90.0, "all are at the last round, and see it of each other")
        yield swarm


def is_over(swarm: LocalSwarm) -> bool:
    statuses = swarm.status()
    seen = [info for status in statuses for info in status.peers]
    return (
        len(seen) == len(swarm.peers) ** 2
        and all(info.round == ROUNDS for info in seen)
        and all(info.outer_step == 1 for info in seen if info.stage == 1)
    )


def held(swarm: LocalSwarm, peer: LocalPeer) -> tuple[dict[str, torch.Tensor], int]:
    """A replica's weights as it writes them to its own disk, and the last round whose step they have seen."""
    assert peer.client is not None
    (stored,) = list_checkpoints(peer.client.checkpoint(swarm.folder / f"held-{peer.label}").parent)[:1]
    tensors = stored.read_tensors()
    assert tensors is not None
    return {name: tensors[name] for name in stage_shapes(SPEC, stored.meta.stage)}, stored.meta.round


def host_of(swarm: LocalSwarm) -> HostConfig:
    (address, *_) = swarm.replicas(0)[0].status.addresses  # type: ignore[union-attr]
    return HostConfig(initial_peers=(address,), use_relay=False)


def of(swarm: LocalSwarm, run: str = SPEC.run_id) -> list[str]:
    return ["--run", run, "--initial-peers", *host_of(swarm).initial_peers]


@pytest.fixture(autouse=True)
def _as_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look at other networks, and the text that they have tokenized already."""
    monkeypatch.setenv("GOSSAMER_USE_RELAY", "false")
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(HostConfig().cache_dir))


@pytest.mark.timeout(200)
def test_the_export_of_a_live_swarm_is_the_mean_of_what_its_replicas_hold(
    swarm: LocalSwarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """By run id alone, from whoever answers; the card says whose weights they are."""
    code = main(["export", str(tmp_path / "model"), *of(swarm), "--take", "average"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    exported = load_file(tmp_path / "model" / "model.safetensors")
    card = (tmp_path / "model" / "README.md").read_text()
    num_compared = 0
    for stage in range(SPEC.num_stages):
        replicas = swarm.replicas(stage)
        states, rounds = zip(*(held(swarm, peer) for peer in replicas), strict=True)
        for name in states[0]:
            mean = torch.stack([state[name].double() for state in states]).mean(0).float()
            assert torch.equal(exported[name], mean), name
            num_compared += 1
        for peer, round_ in zip(replicas, rounds, strict=True):
            assert peer.status is not None
            assert f"{peer.status.name} at round {round_}" in card
            assert f"stage {stage} from {peer.status.name}: 100%" in captured.err
        if stage == 1:
            assert not all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert num_compared == len(exported)


@pytest.mark.timeout(200)
def test_average_tells_spread_and_losses(swarm: LocalSwarm, capsys: pytest.CaptureFixture[str]):
    """Replicas of 13 rounds: apart by a part of their weights, and the mean is no worse a model than chance."""
    assert main(["average", *of(swarm), "--eval", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"] == SPEC.run_id
    assert [len(stage["replicas"]) for stage in shown["stages"]] == [1, 2, 1]
    assert [stage["spread"] > 0 for stage in shown["stages"]] == [False, True, False]
    assert shown["stages"][1]["spread"] < 1
    assert [max(one["round"] for one in stage["replicas"]) for stage in shown["stages"]] == [ROUNDS] * 3
    assert shown["eval"]["microbatches"] == 2
    assert 1 < shown["eval"]["average_loss_nats"] < 7.5  # ln 1024 is 6.93
    assert 1 < shown["eval"]["single_loss_nats"] < 7.5


@pytest.mark.timeout(200)
def test_a_donor_killed_before_its_turn_is_replaced_by_its_sibling(swarm: LocalSwarm):
    """One download at a time, stage 0 first: when its weights come, the first choice of stage 1 gets signal 9."""
    first, second = sorted(swarm.replicas(1), key=lambda peer: peer.status.peer)  # type: ignore[union-attr]
    assert first.status is not None
    expected, _ = held(swarm, second)

    def kill(progress: Progress) -> None:
        if progress.stage == 0 and first.is_alive:
            swarm.kill_peer(first)

    stages = asyncio.run(collect(SPEC, host_of(swarm), BEST, kill, downloads_max=1))
    assert not first.is_alive
    assert list(stages[1].failed) == [first.status.peer]
    assert [one.name for one in stages[1].came] == [friendly_name(second.status.peer)]  # type: ignore[union-attr]
    assert expected.keys() == stages[1].weights.keys()
    assert all(torch.equal(stages[1].weights[name], weight) for name, weight in expected.items())


@pytest.mark.timeout(200)
def test_a_stage_without_a_live_replica_is_named_and_nothing_is_written(
    swarm: LocalSwarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """All its replicas are dead, whether the table knows already or not."""
    for peer in swarm.replicas(1):
        swarm.kill_peer(peer)
    run_file = tmp_path / "run.json"
    write_run_file(run_file, SPEC, Identity.load_or_create(tmp_path / "owner.key"))
    code = main(["export", str(tmp_path / "out" / "model"), *of(swarm, str(run_file))])
    captured = capsys.readouterr()
    assert (code, captured.out) == (1, "")
    assert captured.err.splitlines()[-1].startswith("gossamer: no ")
    assert "replica of stage 1 " in captured.err
    assert not (tmp_path / "out").exists()
