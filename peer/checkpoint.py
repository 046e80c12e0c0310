"""Own stage to disk and back: `round-00000120/` with `state.safetensors` and `meta.json`.

Invariant: a folder with its final name is whole. It is written under another name, flushed to the disk, then
renamed; what is read back is checked against its hash. Newest means saved last, not the highest round: a peer
that moved to another stage, or began anew, may stand at a lower round than an older checkpoint of it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from protocols.errors import GossamerError, describe_errors
from protocols.run_spec import RunSpec

logger = logging.getLogger(__name__)

TENSORS_NAME = "state.safetensors"
META_NAME = "meta.json"
FOLDER_PREFIX = "round-"
META_BYTES_MAX = 1 << 20


class CheckpointError(GossamerError):
    """A checkpoint could not be written; the earlier ones are untouched and training can go on."""


class CheckpointMeta(BaseModel):
    """What a stage's tensors are: enough to go on with them, and to export them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    spec: RunSpec
    stage: int = Field(ge=0)
    round: int = Field(ge=0)  # inner steps taken
    outer_step: int = Field(ge=0)
    counter: int = Field(ge=0)  # data position: the next microbatch of this originator
    schema_hash: str  # of the stage's parameters
    runtime: dict[str, Any] = {}  # what the compute side adds; JSON values only

    @property
    def run_id(self) -> str:
        return self.spec.run_id


class _MetaFile(BaseModel):
    """`meta.json`. The spec inside carries the protocol version; a release that speaks another refuses it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal[1] = 1
    run_id: str
    sequence: int = Field(ge=0)  # counts the saves into this folder
    sha256: str  # of the tensor file
    meta: CheckpointMeta


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint on the disk whose tensors nobody has read yet."""

    path: Path
    meta: CheckpointMeta
    sequence: int
    sha256: str

    def read_tensors(self) -> dict[str, Tensor] | None:
        """None, and a warning, when the file is damaged."""
        file = self.path / TENSORS_NAME
        try:
            if _sha256(file) == self.sha256:
                return load_file(file)
            reason = "does not match its hash"
        except (OSError, SafetensorError) as error:
            reason = f"cannot be read: {error}"
        logger.warning("checkpoint %s passed over: %s %s", self.path, TENSORS_NAME, reason)
        return None


def save(folder: Path, tensors: dict[str, Tensor], meta: CheckpointMeta, keep: int = 3) -> Path:
    """Write one checkpoint into `folder` (one peer, one run) and delete all but the `keep` newest.

    Blocks until the bytes are on the disk. CheckpointError when that fails; nothing half-written stays.
    """
    temporary = folder / f"new-{FOLDER_PREFIX}{meta.round:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"new-{FOLDER_PREFIX}*"):  # of a process that was killed while it saved
            shutil.rmtree(leftover)
        present, _ = _scan(folder)
        _refuse_other_run(folder, present, meta.run_id)
        sequence = present[0].sequence + 1 if present else 0
        temporary.mkdir()
        _write(temporary, tensors, meta, sequence)
        target = _free_name(folder, meta.round)
        temporary.rename(target)
        _flush_to_disk(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"no checkpoint of round {meta.round} in {folder}: {reason}; "
            f"free space or mend the folder's permissions"
        ) from error
    for stored in present[max(keep, 1) - 1 :]:
        shutil.rmtree(stored.path, ignore_errors=True)
    return target


def load_latest(
    folder: Path, *, run_id: str, stage: int | None = None
) -> tuple[dict[str, Tensor], CheckpointMeta] | None:
    """The newest whole checkpoint of `run_id` (and of `stage`); None when there is none.

    Incomplete, damaged and foreign ones are passed over with a warning that names them.
    """
    for stored in list_checkpoints(folder):
        if stored.meta.run_id != run_id:
            logger.warning("checkpoint %s passed over: it belongs to run %s", stored.path, stored.meta.run_id)
        elif stage in (None, stored.meta.stage):
            tensors = stored.read_tensors()
            if tensors is not None:
                return tensors, stored.meta
    return None


def list_checkpoints(folder: Path) -> list[StoredCheckpoint]:
    """Newest first; a warning for each folder that is no whole checkpoint of this release."""
    found, refused = _scan(folder)
    for path, reason in refused:
        logger.warning("checkpoint %s passed over: %s %s", path, META_NAME, reason)
    return found


def _scan(folder: Path) -> tuple[list[StoredCheckpoint], list[tuple[Path, str]]]:
    found: list[StoredCheckpoint] = []
    refused: list[tuple[Path, str]] = []
    for path in sorted(folder.glob(f"{FOLDER_PREFIX}*")):
        header = _read_header(path / META_NAME)
        if isinstance(header, str):
            refused.append((path, header))
        else:
            found.append(StoredCheckpoint(path, header.meta, header.sequence, header.sha256))
    return sorted(found, key=lambda stored: stored.sequence, reverse=True), refused


def _read_header(file: Path) -> _MetaFile | str:
    """The parsed file, or what is wrong with it."""
    try:
        with file.open("rb") as stream:
            return _MetaFile.model_validate_json(stream.read(META_BYTES_MAX))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValidationError as error:
        return f"is not ours: {describe_errors(error)}"


def _refuse_other_run(folder: Path, present: Sequence[StoredCheckpoint], run_id: str) -> None:
    """Keeping the newest few would delete the other run's checkpoints."""
    for stored in present:
        if stored.meta.run_id != run_id:
            raise CheckpointError(
                f"{folder} holds checkpoints of run {stored.meta.run_id}; "
                f"give run {run_id} a folder of its own"
            )


def _free_name(folder: Path, round: int) -> Path:
    """`round-00000120`; with `-2` and so on when that round was saved before: no whole one is touched."""
    name = f"{FOLDER_PREFIX}{round:08d}"
    names = chain([name], (f"{name}-{i}" for i in count(2)))
    return next(folder / free for free in names if not (folder / free).exists())


def _write(folder: Path, tensors: dict[str, Tensor], meta: CheckpointMeta, sequence: int) -> None:
    file = folder / TENSORS_NAME
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, file, metadata={"format": "pt", "run_id": meta.run_id, "stage": str(meta.stage)})
    header = _MetaFile(run_id=meta.run_id, sequence=sequence, sha256=_sha256(file), meta=meta)
    (folder / META_NAME).write_text(header.model_dump_json(indent=2) + "\n")
    for path in (file, folder / META_NAME, folder):
        _flush_to_disk(path)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
