"""The command line as a person meets it: spelling of flags, exit codes, one message instead of a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dht.identity import Identity
from peer.cli import VERBS, build_app, main, normalise
from peer.config import HostConfig
from peer.first_screen import bootstrap_screen, first_screen, memory_mib
from peer.launch import parse_layout
from peer.run_file import write_run_file
from peer.status import PeerStatus
from protocols.errors import ConfigError
from protocols.run_spec import preset
from protocols.swarm import PeerState


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--initial_peers A B --stage 1", "--initial-peers A --initial-peers B --stage 1"),
        ("--initial-peers A --initial-peers B", "--initial-peers A --initial-peers B"),
        (
            "--initial_peers=A --host_maddrs X Y -c f",
            "--initial-peers=A --host-maddrs X --host-maddrs Y -c f",
        ),
        ("--data_dir=a_b/c_d word", "--data-dir=a_b/c_d word"),
        ("--set rounds.total_rounds=3", "--set rounds.total_rounds=3"),
        ("x -- --initial_peers A B", "x -- --initial_peers A B"),
    ],
)
def test_both_spellings_and_space_separated_lists_are_understood(typed: str, meant: str):
    """Commands are pasted from guides of this ecosystem, where flags have underscores and lists have spaces."""
    assert normalise(typed.split()) == meant.split()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["joyn"], 2, "No such command 'joyn'"),
        (["join", "--sage", "1"], 2, "No such option: --sage"),
        (["join"], 2, "gossamer: join which run?"),
        (["join", "--run", "x.json"], 2, "gossamer: join through whom?"),
        (["join", "--run", "x.json", "--new_swarm"], 2, "run file x.json cannot be read"),
        (["join", "--run", "x-0", "--new_swarm"], 2, "is no file here"),
        (["join", "--run", "x.json", "--stage", "first"], 2, "neither the number of a stage nor auto"),
        (["join", "-c", "nowhere.yaml"], 2, "nowhere.yaml cannot be read"),
        (["run", "new", "--model", "mega", "--out", "x.json"], 2, "model 'mega' is unknown"),
        (["run", "new", "--set", "rounds=1", "--out", "x.json"], 2, "rounds"),
        (["run", "new", "--set", "data.corpus=gone.txt", "--out", "x.json"], 2, "gone.txt"),
        (["up", "--run", "x.json"], 2, "run file x.json cannot be read"),
        (["demo", "--rounds", "3"], 2, "take at least 20"),
        (["status"], 2, "no peer is running on this machine"),
        (["leave", "calm-otter"], 2, "no peer is running on this machine"),
        (["healthcheck"], 1, ""),
        (["export", "model"], 2, "no checkpoint"),
        (["generate", "nothing"], 2, "not an exported model"),
        (["identity", "show"], 2, "no identity at"),
    ],
)
def test_bad_input_ends_with_its_code_and_one_message(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
):
    monkeypatch.chdir(tmp_path)
    for name in ("DATA", "RUNTIME"):
        monkeypatch.setenv(f"GOSSAMER_{name}_DIR", str(tmp_path / name))
    found, out, err = run(capsys, *arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []  # nothing half-written


def test_a_run_of_another_protocol_is_refused_with_code_4(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "run.json"
    write_run_file(path, preset("pico"), Identity.load_or_create(tmp_path / "owner.key"))
    content = json.loads(path.read_text())
    content["spec"]["protocol_version"] = 3
    path.write_text(json.dumps(content))
    code, _, err = run(capsys, "join", "--run", str(path), "--new-swarm")
    assert code == 4
    assert "install the release" in err


def test_run_new_makes_what_run_show_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GOSSAMER_DATA_DIR", str(tmp_path / "data"))
    path = tmp_path / "run.json"
    code, out, _ = run(capsys, "run", "new", "--model", "pico", "--out", str(path), "--set", "seed=9")
    assert code == 0
    assert f"gossamer up --run {path}" in out
    code, out, _ = run(capsys, "run", "show", str(path))
    shown = json.loads(out)
    assert (code, shown["seed"], shown["run_id"]) == (0, 9, shown["name"] + "-" + shown["run_id"][-16:])
    assert run(capsys, "run", "new", "--model", "pico", "--out", str(path))[0] == 2  # never overwritten
    code, out, _ = run(capsys, "identity", "show", "--json")
    assert json.loads(out)["peer"].startswith("12D3")  # run new made the owner's key


def test_config_show_tells_where_each_value_comes_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "my.yaml"
    file.write_text("checkpoints_kept: 9\n")
    monkeypatch.setenv("GOSSAMER_DEVICE", "cpu")
    code, out, _ = run(
        capsys, "config", "show", "-c", str(file), "--initial_peers", "A", "B", "--no-auto-nat"
    )
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert code == 0
    assert lines["checkpoints_kept"] == f"9 file {file}"
    assert lines["device"] == '"cpu" environment'
    assert lines["initial_peers"] == '["A", "B"] flag'
    assert lines["auto_nat"] == "false flag"
    assert lines["port"] == "null default"


def test_version_names_all_that_matters_in_a_bug_report(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "version", "--json")
    assert code == 0
    assert set(json.loads(out)) >= {"gossamer", "protocol", "python", "torch", "hivemind", "p2pd"}
    assert run(capsys, "--version")[0] == 0


def test_every_verb_has_help_and_the_help_has_every_verb(capsys: pytest.CaptureFixture[str]):
    _, listed, _ = run(capsys, "--help")
    for verb in VERBS:
        assert f"\n  {verb} " in listed
        code, out, _ = run(capsys, verb, "--help")
        assert code == 0
        assert "Usage: gossamer" in out


def test_each_verb_is_found_with_only_its_module_loaded():
    for verb in VERBS:
        app = build_app(verb)
        names = {
            command.name or command.callback.__name__
            for command in app.registered_commands
            if command.callback
        }
        assert verb in names | {group.name for group in app.registered_groups}


def test_status_loads_neither_torch_nor_hivemind(tmp_path: Path):
    """`watch gossamer status` must not cost a core, and health checks run each 15 s."""
    script = (
        "import sys\nfrom peer.cli import main\ncode = main(['healthcheck'])\n"
        "sys.exit(code + 10 * any(name in sys.modules for name in ('torch', 'hivemind', 'matplotlib', 'rich.live')))"
    )
    environ = {
        "GOSSAMER_RUNTIME_DIR": str(tmp_path),
        "PATH": "/bin",
        "PYTHONPATH": ":".join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr


def a_status(**fields: Any) -> PeerStatus:
    fields = {"stage": None, "state": PeerState.JOINING, "run_id": "demo-0011223344556677", **fields}
    addresses = ("/ip4/192.168.1.4/tcp/31337/p2p/12D3x", "/ip4/127.0.0.1/tcp/31337/p2p/12D3x")
    return PeerStatus(peer="12D3x", name="calm-otter", addresses=addresses, **fields)


def test_the_first_screen_has_the_line_to_paste_elsewhere_and_labels_loopback():
    """A join line with 127.0.0.1 was the first thing that users of others pasted on a second machine."""
    screen = first_screen(a_status(), HostConfig(stage=2, metrics_addr="127.0.0.1:9090"), preset("nano"))
    lines = [line.strip() for line in screen.splitlines()]
    assert lines[-1] == (
        "gossamer join --run demo-0011223344556677 --initial-peers /ip4/192.168.1.4/tcp/31337/p2p/12D3x"
    )
    assert "/ip4/127.0.0.1/tcp/31337/p2p/12D3x  (this machine only)" in lines
    assert "peer       calm-otter  12D3x" in lines
    assert "stage      2 of stages 0 to 4" in lines
    assert "metrics    http://127.0.0.1:9090/metrics" in lines
    assert "auto" in first_screen(a_status(), HostConfig(), preset("nano"))


def test_a_bootstrap_peer_does_not_pretend_to_have_a_stage():
    screen = bootstrap_screen(a_status(state=PeerState.SERVING))
    assert "none: introduces peers" in screen
    assert "gossamer join --run demo-0011223344556677 --initial-peers /ip4/192.168.1.4" in screen


def test_the_memory_plan_is_that_of_the_largest_stage_until_one_is_chosen():
    spec = preset("micro")
    assert memory_mib(spec, None) == max(memory_mib(spec, stage) for stage in range(5))
    assert memory_mib(spec, 0) > memory_mib(spec, 1)


def test_layouts_are_read_and_a_wrong_one_is_named():
    assert parse_layout("0:2, 1:3,2") == {0: 2, 1: 3, 2: 1}
    with pytest.raises(ConfigError, match="STAGE:NUMBER"):
        parse_layout("0=2")
