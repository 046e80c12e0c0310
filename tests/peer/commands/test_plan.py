"""`gossamer plan` as a person meets it: for a file, and for the swarm of a peer on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dht.identity import Identity, friendly_name
from peer.cli import main
from peer.commands.plan import PIPE_COLUMNS
from peer.plan_file import published_matrix, published_plan
from peer.run_file import write_run_file
from peer.status import PeerStatus
from protocols.coordinates import Coordinate
from protocols.planning.round_model import RoundModel
from protocols.run_spec import preset
from protocols.swarm import PeerInfo, PeerState
from tests.peer.test_control import ADaemon, talk

SETTING = "geo-distributed"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(published_matrix(SETTING).model_dump_json())
    return path


@pytest.fixture
def arrangement(tmp_path: Path) -> Path:
    known = published_plan(published_matrix(SETTING))
    assert known is not None
    path = tmp_path / "arrangement.json"
    path.write_text(json.dumps(known.arrangement))
    return path


def test_json_has_all_that_another_simulator_needs(
    capsys: pytest.CaptureFixture[str], costs: Path, arrangement: Path
):
    code, out, _ = run(capsys, str(costs), "--arrangement", str(arrangement), "--json")
    shown = json.loads(out)
    assert code == 0
    known = json.loads(arrangement.read_text())
    assert {int(peer): stage for peer, stage in shown["stage_of"].items()} == {
        peer: stage for stage, peers in enumerate(known) for peer in peers
    }
    paths = [tuple(one["path"]) for one in shown["microbatches"]]
    assert [one["originator"] for one in shown["microbatches"]] == [path[0] for path in paths]
    instance = published_matrix(SETTING).instance(tuple(map(tuple, known)))
    assert RoundModel(instance).simulate(paths).makespan_s == pytest.approx(shown["makespan_s"])
    assert shown["lower_bound_s"] < shown["makespan_s"] <= 0.93 * 71.593
    assert 0 < shown["idle_share"] < 1
    assert [one["name"] for one in shown["compared"]] == [
        "full pipeline",
        "published coarse plan",
        "this plan",
    ]
    assert shown["compared"][0]["makespan_s"] == pytest.approx(215.0, abs=0.05)


def test_the_table_has_every_originators_way_and_the_picture_is_written(
    capsys: pytest.CaptureFixture[str], costs: Path, tmp_path: Path
):
    picture = tmp_path / "round.png"
    code, out, err = run(capsys, str(costs), "--picture", str(picture))
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "geo-distributed: 20 peers, 6 stages, 30 microbatches through 4 stages each"
    assert any(line.startswith("full pipeline") and "215.02 s" in line for line in lines)
    assert any(line.startswith("published coarse plan") and "71.59 s" in line for line in lines)
    assert sum(" > " in line for line in lines) >= 5
    assert max(map(len, lines)) <= PIPE_COLUMNS
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_more_slots_for_originators_shorten_the_round(
    capsys: pytest.CaptureFixture[str], costs: Path, arrangement: Path
):
    given = (str(costs), "--arrangement", str(arrangement), "--json")
    lengths = [
        json.loads(run(capsys, *given, *more)[1])["makespan_s"]
        for more in ((), ("--origin-slots", "6"), ("--slots", "6"))
    ]
    assert lengths[1] <= 0.92 * lengths[0]
    assert lengths[2] < lengths[1]


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"stage_sizes": [10, 2, 2, 2, 2, 2], "stage_visits_max_per_wave": None}, (), "slots cannot be kept"),
        ({"stage_sizes": [8, 0, 3, 3, 3, 3]}, (), "stage 1 has no peer"),
        ({"stage_visits_max_per_wave": 5}, (), "8 too few"),
        ({}, ("--slots", "0"), "slots is 0"),
        ({}, ("--origin-slots", "-1"), "originator slots is -1"),
        ({}, ("--picture", "round.gif"), "names no format"),
        ({}, ("--arrangement", "nowhere.json"), "nowhere.json cannot be read"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_message(
    capsys: pytest.CaptureFixture[str],
    costs: Path,
    change: dict[str, Any],
    arguments: tuple[str, ...],
    message: str,
):
    costs.write_text(json.dumps(json.loads(costs.read_text()) | change))
    code, out, err = run(capsys, str(costs), *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [("--slots", "3"), ("--origin-slots", "6"), ("--arrangement", "a.json")]
)
def test_options_of_a_file_are_not_taken_for_a_swarm(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
):
    code, _, err = run(capsys, *arguments)
    assert (code, "go with a FILE" in err) == (2, True)


SPEC = preset("pico")


def serving(number: int, stage: int) -> PeerInfo:
    return PeerInfo(
        peer=f"12D3peer{number:02d}",
        stage=stage,
        state=PeerState.SERVING,
        slots=6,
        forward_s=0.05,
        backward_s=0.1,
        coordinate=Coordinate(0.02 * (number % 2), 0.0, 0.001, 0.1),
    )


def a_status(*peers: PeerInfo, **changes: Any) -> PeerStatus:
    fields: dict[str, Any] = {"run_id": SPEC.run_id, "stage": 0, "state": PeerState.SERVING, **changes}
    return PeerStatus(peer="12D3peer00", name="calm-otter", peers=peers, **fields)


def planned(
    capsys: pytest.CaptureFixture[str], folder: Path, status: PeerStatus, *more: str
) -> tuple[int, str, str]:
    """The command beside a running peer with this status; its run file is at hand."""
    run_file = folder / "run.json"
    if not run_file.exists():
        write_run_file(run_file, SPEC, Identity.load_or_create(folder / "owner.key"))
    arguments = ["--run", str(run_file), "--runtime-dir", str(folder / "run"), *more]
    code = talk(ADaemon(now=status), folder / "run", lambda: main(["plan", *arguments]))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


EVERYBODY = tuple(serving(number, number % SPEC.num_stages) for number in range(2 * SPEC.num_stages))


def test_the_swarm_of_a_running_peer_is_planned_as_its_originators_plan_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    joiner = PeerInfo(peer="12D3newcomer", stage=None, state=PeerState.JOINING)
    code, out, _ = planned(capsys, tmp_path, a_status(*EVERYBODY, joiner), "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["stage_of"] == {info.peer: info.stage for info in EVERYBODY}
    assert len(shown["microbatches"]) == 2 * SPEC.rounds.microbatches
    assert {len(one["path"]) for one in shown["microbatches"]} == {SPEC.path_stages}
    assert [one["name"] for one in shown["compared"]] == ["full pipeline", "this plan"]
    _, table, _ = planned(capsys, tmp_path, a_status(*EVERYBODY, joiner))
    assert table.startswith(f"{SPEC.run_id}: {len(EVERYBODY)} peers")
    assert friendly_name(EVERYBODY[0].peer) in table


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (a_status(*EVERYBODY[1:2]), "nobody serves the first stage"),
        (a_status(*EVERYBODY[:1]), "no legal plan"),
        (a_status(*EVERYBODY, run_id="other-0123456789abcdef"), "is of run other-0123456789abcdef"),
        (a_status(stage=None), "only introduce others"),
    ],
)
def test_a_swarm_that_cannot_be_planned_says_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, status: PeerStatus, message: str
):
    code, out, err = planned(capsys, tmp_path, status)
    assert (code, out) == (2, "")
    assert message in err
