"""The generated code is that of the schemas beside it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from protocols.proto.generate import ROOT, generate, schemas


def described(generated: Path) -> bytes:
    """The schema inside a generated module; the rest of it differs between compilers."""
    found = re.search(r"AddSerializedFile\((b'.*')\)\n", generated.read_text())
    assert found is not None
    return ast.literal_eval(found.group(1))


def test_generated_code_says_what_the_schemas_say(tmp_path: Path):
    """Somebody edits a .proto and forgets `make proto`: peers of two builds would not understand each other."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    generate(tmp_path)
    for schema in schemas():
        module = schema.replace(".proto", "_pb2.py")
        assert described(ROOT / module) == described(tmp_path / module), f"{schema}: run `make proto`"


@pytest.mark.parametrize("schema", schemas())
def test_generated_code_runs_on_the_oldest_protobuf_that_we_accept(schema: str):
    """Code of a newer compiler refuses an older runtime; pyproject.toml promises protobuf 5.29."""
    text = (ROOT / schema.replace(".proto", "_pb2.py")).read_text()
    assert "# Protobuf Python Version: 5.29." in text
