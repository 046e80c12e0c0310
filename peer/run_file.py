"""The run file: a RunSpec that its owner has signed, which is what people send each other to join a run.

Invariant: what `read_run_file` returns hashes to the run id in the file and bears the owner's signature. The
signature says who made the run; that all peers of it agree follows from the hash alone (`protocols.run_spec`).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from dht.identity import Identity, verify
from peer.config import write_text
from protocols.errors import ConfigError, GossamerError, describe_errors
from protocols.run_spec import PROTOCOL_VERSION, RunSpec, preset

RUN_FILE_BYTES_MAX = 64 << 10
SIGNED_PREFIX = b"gossamer run file\n"  # so that a signature for another purpose never fits


class RunRefused(GossamerError):
    """The file is sound, but this release may not take part in it."""


class RunFile(BaseModel):
    """The file's fields. `spec` is the text of the RunSpec as an object; `signature` is over its canonical text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    owner: str
    signature: str
    spec: dict[str, Any]


def make_run_file(spec: RunSpec, owner: Identity) -> str:
    """The text of a run file, signed by `owner`."""
    signature = owner.sign(SIGNED_PREFIX + spec.to_json().encode())
    file = RunFile(
        run_id=spec.run_id,
        owner=owner.peer_id,
        signature=base64.b64encode(signature).decode(),
        spec=spec.model_dump(mode="json"),
    )
    return json.dumps(file.model_dump(), indent=2) + "\n"


def write_run_file(path: Path, spec: RunSpec, owner: Identity) -> None:
    if path.exists():
        raise ConfigError(f"{path} exists already: choose another name, so that no run is lost")
    write_text(path, make_run_file(spec, owner))


def read_run_file(path: Path) -> RunSpec:
    """ConfigError when it is damaged or tampered with; RunRefused when it needs another release."""
    try:
        with path.open("rb") as file:
            content = file.read(RUN_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"run file {path} cannot be read ({error.strerror}): `gossamer run new` makes one, "
            "or ask the run's owner for it"
        ) from None
    if len(content) > RUN_FILE_BYTES_MAX:
        raise ConfigError(f"{path} is too big for a run file (over {RUN_FILE_BYTES_MAX >> 10} KiB)")
    return parse_run_file(content, where=str(path))


def parse_run_file(content: bytes, *, where: str) -> RunSpec:
    try:
        file = RunFile.model_validate_json(content)
    except ValidationError as error:
        raise ConfigError(f"{where} is no run file: {describe_errors(error)}") from None
    version = file.spec.get("protocol_version")
    if version != PROTOCOL_VERSION:
        raise RunRefused(
            f"{where}: the run speaks protocol {version}, this release {PROTOCOL_VERSION}: "
            "install the release that the run's owner uses (`gossamer version` shows yours)"
        )
    spec = RunSpec.from_json(json.dumps(file.spec), where=where)
    if spec.run_id != file.run_id:
        raise ConfigError(
            f"{where}: the spec hashes to {spec.run_id}, but the file says {file.run_id}: it was edited by hand; "
            "`gossamer run new` makes a new run"
        )
    if not _is_signed(spec, file):
        raise ConfigError(
            f"{where}: the signature is not that of owner {file.owner}: get the file anew from them"
        )
    return spec


def _is_signed(spec: RunSpec, file: RunFile) -> bool:
    try:
        signature = base64.b64decode(file.signature, validate=True)
    except binascii.Error:
        return False
    return verify(file.owner, SIGNED_PREFIX + spec.to_json().encode(), signature)


def parse_changes(settings: Iterable[str]) -> dict[str, Any]:
    """`rounds.rows=4` and `seed=7` to the nested fields that `protocols.run_spec.preset` takes."""
    changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {setting!r}: write it as section.field=value, such as rounds.rows=4")
        *sections, field = name.strip().split(".")
        place = changes
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {setting!r}: {section} was set as a whole before")
        try:
            place[field] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"--set {setting!r}: the value cannot be understood") from None
    return changes


def make_spec(model: str, name: str, changes: dict[str, Any]) -> RunSpec:
    """A preset with `changes`, and the hashes of the text and tokenizer that this machine has for it."""
    from peer.data import fingerprint  # imports torch

    draft = preset(model, name, **changes)
    corpus_sha256, tokenizer_sha256 = fingerprint(draft.data.corpus, draft.data.tokenizer)
    data = draft.data.model_copy(
        update={"corpus_sha256": corpus_sha256, "tokenizer_sha256": tokenizer_sha256}
    )
    return draft.model_copy(update={"data": data})
