"""Run files: what a run's owner hands out, and what a volunteer's machine checks before it believes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dht.identity import Identity
from peer.run_file import RunRefused, make_run_file, make_spec, parse_changes, read_run_file, write_run_file
from protocols.errors import ConfigError
from protocols.run_spec import RunSpec, preset


@pytest.fixture
def owner(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "owner.key")


def edited(owner: Identity, **changes: object) -> str:
    return json.dumps({**json.loads(make_run_file(preset("pico"), owner)), **changes})


def read(folder: Path, text: str) -> RunSpec:
    path = folder / "run.json"
    path.write_text(text)
    return read_run_file(path)


def test_what_the_owner_wrote_is_what_a_volunteer_reads(tmp_path: Path, owner: Identity):
    spec = preset("nano", "spring", rounds=dict(rows=4), seed=7)
    write_run_file(tmp_path / "run.json", spec, owner)
    assert read_run_file(tmp_path / "run.json") == spec


def test_an_existing_run_is_never_overwritten(tmp_path: Path, owner: Identity):
    write_run_file(tmp_path / "run.json", preset("pico"), owner)
    with pytest.raises(ConfigError, match="exists already"):
        write_run_file(tmp_path / "run.json", preset("nano"), owner)
    assert read_run_file(tmp_path / "run.json") == preset("pico")


def test_a_spec_edited_by_hand_is_refused(tmp_path: Path, owner: Identity):
    """Raising the learning rate in one's own copy would put that peer in a run of its own, silently."""
    with pytest.raises(ConfigError, match="edited by hand"):
        read(tmp_path, edited(owner, spec=preset("pico", seed=1).model_dump(mode="json")))


def test_a_stranger_cannot_sign_in_the_owners_name(tmp_path: Path, owner: Identity):
    stranger = Identity.load_or_create(tmp_path / "stranger.key")
    forged = json.loads(make_run_file(preset("pico"), stranger))["signature"]
    with pytest.raises(ConfigError, match="signature is not that of owner"):
        read(tmp_path, edited(owner, signature=forged))
    with pytest.raises(ConfigError, match="signature is not that of owner"):
        read(tmp_path, edited(owner, signature="!!"))


def test_a_run_of_another_protocol_is_refused_with_the_remedy(tmp_path: Path, owner: Identity):
    spec = {**preset("pico").model_dump(mode="json"), "protocol_version": 99}
    with pytest.raises(RunRefused, match="protocol 99, this release 2: install"):
        read(tmp_path, edited(owner, spec=spec))


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", '{"spec": {}, "x": 1}', "\x00\xff"])
def test_anything_else_is_no_run_file(tmp_path: Path, text: str):
    with pytest.raises(ConfigError, match="is no run file"):
        read(tmp_path, text)


def test_a_missing_and_an_enormous_file_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"gone.json cannot be read .No such file"):
        read_run_file(tmp_path / "gone.json")
    with pytest.raises(ConfigError, match="too big"):
        read(tmp_path, " " * (65 << 10))


def test_settings_become_nested_changes():
    assert parse_changes(["rounds.rows=4", "seed=7", "outer.mode=propose", "rounds.window=2"]) == {
        "rounds": {"rows": 4, "window": 2},
        "seed": 7,
        "outer": {"mode": "propose"},
    }


@pytest.mark.parametrize("settings", [["rows"], ["=4"], ["rounds=3", "rounds.rows=4"], ["rounds.rows=[1"]])
def test_a_setting_that_cannot_be_understood_is_named(settings: list[str]):
    with pytest.raises(ConfigError, match="--set"):
        parse_changes(settings)


def test_a_new_spec_names_its_text_by_hash_and_refuses_unknown_fields():
    spec = make_spec("pico", "spring", parse_changes(["rounds.rows=4"]))
    assert spec.rounds.rows == 4
    assert len(spec.data.corpus_sha256) == len(spec.data.tokenizer_sha256) == 64
    with pytest.raises(ConfigError, match=r"rounds.rowz"):
        make_spec("pico", "spring", parse_changes(["rounds.rowz=4"]))
