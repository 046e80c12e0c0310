"""Checkpoints: whole or absent, newest by save, and never another run's."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from peer.checkpoint import CheckpointError, CheckpointMeta, list_checkpoints, load_latest, save
from protocols.run_spec import preset

NOBODY = 65534

SPEC = preset("pico")


def a_meta(round_number: int, *, stage: int = 1, spec=SPEC) -> CheckpointMeta:
    return CheckpointMeta(
        spec=spec,
        stage=stage,
        round=round_number,
        outer_step=round_number // 10,
        counter=2 * round_number,
        schema_hash="0123456789abcdef",
        runtime={"adam_step": round_number, "grad_norm": 0.1},
    )


def some_tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "model.layers.0.weight": torch.full((4, 4), value),
        "exp_avg": torch.arange(5.0, dtype=torch.bfloat16),
    }


def latest(folder, **wanted) -> tuple[float, int] | None:
    """(value, round) of the newest."""
    found = load_latest(folder, run_id=SPEC.run_id, **wanted)
    return found and (float(found[0]["model.layers.0.weight"][0, 0]), found[1].round)


def test_what_was_saved_comes_back(tmp_path):
    """Tensors bit for bit with their dtype, and all that is needed to go on."""
    path = save(tmp_path, some_tensors(), a_meta(120))
    assert path == tmp_path / "round-00000120"
    tensors, meta = load_latest(tmp_path, run_id=SPEC.run_id, stage=1)
    assert meta == a_meta(120)
    assert tensors.keys() == some_tensors().keys()
    for name, expected in some_tensors().items():
        assert tensors[name].dtype == expected.dtype
        assert torch.equal(tensors[name], expected)


def test_parameters_and_views_can_be_saved(tmp_path):
    """A runtime hands over live parameters, transposed or cut out of one flat buffer."""
    flat = torch.arange(12.0)
    tensors = {"a": torch.nn.Parameter(flat[:6].view(2, 3)), "b": flat[6:].view(2, 3).T}
    save(tmp_path, tensors, a_meta(1))
    loaded, _ = load_latest(tmp_path, run_id=SPEC.run_id)
    assert torch.equal(loaded["b"], tensors["b"])
    assert torch.equal(loaded["a"], tensors["a"])


def test_only_the_newest_are_kept(tmp_path):
    """A volunteer's disk does not fill up over weeks."""
    for round_number in (10, 20, 30, 40):
        save(tmp_path, some_tensors(round_number), a_meta(round_number), keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["round-00000030", "round-00000040"]


def test_no_checkpoint_is_none(tmp_path):
    """First start; the folder is not even there."""
    assert load_latest(tmp_path / "none", run_id=SPEC.run_id) is None


def test_newest_is_the_last_saved_not_the_highest_round(tmp_path):
    """The peer served stage 1 until round 120, then adopted stage 2, whose donors stood at 118."""
    save(tmp_path, some_tensors(1.0), a_meta(120, stage=1), keep=2)
    save(tmp_path, some_tensors(2.0), a_meta(118, stage=2), keep=2)
    assert latest(tmp_path) == (2.0, 118)
    assert latest(tmp_path, stage=1) == (1.0, 120)
    assert latest(tmp_path, stage=3) is None


def test_saving_a_round_twice_keeps_both_until_the_older_is_due(tmp_path):
    """An export asks for a checkpoint in the round that has just been saved; no whole one is ever overwritten."""
    for value in (1.0, 2.0, 3.0):
        save(tmp_path, some_tensors(value), a_meta(7), keep=2)
    assert latest(tmp_path) == (3.0, 7)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "no tensors", "no meta", "half meta", "folder is a file"]
)
def test_damaged_checkpoint_is_passed_over_by_name(tmp_path, caplog, damage):
    """The machine lost power, the disk a block: the one before serves, and the log says which was refused."""
    save(tmp_path, some_tensors(1.0), a_meta(10))
    path = save(tmp_path, some_tensors(2.0), a_meta(20))
    tensors_file, meta_file = path / "state.safetensors", path / "meta.json"
    content = tensors_file.read_bytes()
    if damage == "flip":
        tensors_file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "truncate":
        tensors_file.write_bytes(content[:-1])
    elif damage == "no tensors":
        tensors_file.unlink()
    elif damage == "no meta":
        meta_file.unlink()
    elif damage == "half meta":
        meta_file.write_bytes(meta_file.read_bytes()[:100])
    else:
        shutil.rmtree(path)
        path.write_text("")
    assert latest(tmp_path) == (1.0, 10)
    assert str(path) in caplog.text
    assert "passed over" in caplog.text


def test_damaged_checkpoint_does_not_stop_the_next_save(tmp_path):
    """A folder without its meta.json stays for a person to look at."""
    (tmp_path / "round-00000010").mkdir()
    save(tmp_path, some_tensors(2.0), a_meta(10))
    assert latest(tmp_path) == (2.0, 10)


def test_checkpoint_of_another_protocol_is_passed_over(tmp_path, caplog):
    """An older release wrote it; the spec inside says so."""
    path = save(tmp_path, some_tensors(), a_meta(10))
    content = json.loads((path / "meta.json").read_text())
    content["meta"]["spec"]["protocol_version"] = 0
    (path / "meta.json").write_text(json.dumps(content))
    assert latest(tmp_path) is None
    assert "protocol_version 0" in caplog.text


def test_other_runs_checkpoints_are_neither_loaded_nor_deleted(tmp_path, caplog):
    """Two runs were pointed at one folder."""
    other = preset("pico", name="other")
    save(tmp_path, some_tensors(), a_meta(10, spec=other))
    assert latest(tmp_path) is None
    assert other.run_id in caplog.text
    with pytest.raises(CheckpointError, match=f"run {other.run_id}.*folder of its own"):
        save(tmp_path, some_tensors(), a_meta(20), keep=1)
    assert len(list_checkpoints(tmp_path)) == 1


def test_leftover_of_a_killed_save_is_swept(tmp_path):
    """kill -9 in the middle of writing; its half has never had the final name."""
    half = tmp_path / "new-round-00000010"
    half.mkdir()
    (half / "state.safetensors").write_bytes(b"half")
    assert latest(tmp_path) is None
    save(tmp_path, some_tensors(), a_meta(20))
    assert [entry.name for entry in tmp_path.iterdir()] == ["round-00000020"]


@pytest.fixture
def file_size_limit():
    """At 64 KiB the kernel refuses further bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_one_message_and_keeps_what_was_there(tmp_path, file_size_limit):
    """Training goes on; the last good checkpoint stays even with keep=1."""
    save(tmp_path, some_tensors(1.0), a_meta(10), keep=1)
    large = some_tensors(2.0) | {"phi": torch.zeros(1 << 15)}
    with pytest.raises(CheckpointError, match=r"round 20 in .*: .*free space"):
        save(tmp_path, large, a_meta(20), keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["round-00000010"]
    assert latest(tmp_path) == (1.0, 10)


def test_folder_that_cannot_be_made_is_one_message(tmp_path):
    """A file stands in its place."""
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoints: .*permissions"):
        save(tmp_path / "checkpoints", some_tensors(), a_meta(1))


@contextmanager
def no_root() -> Iterator[None]:
    """Root may write anywhere, so it is somebody else meanwhile."""
    euid = os.geteuid()
    if euid == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(euid)


def test_folder_without_permission_is_one_message(tmp_path):
    """The volume belongs to another user."""
    tmp_path.chmod(0o500)
    with no_root(), pytest.raises(CheckpointError, match=r"Permission denied.*permissions"):
        save(tmp_path, some_tensors(), a_meta(1))
