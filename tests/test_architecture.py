"""The rules of the house that a machine can check; raising a cap here is a visible line in a diff."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.readme_tree import ROOT, is_written_by_hand, parts_of_readme, tree

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
MACHINE_METHOD_LINES_MAX = 30  # a decision must fit on a screen with its reasons
PRODUCT = ("protocols", "dht", "peer")
# The tensor maths, and the check of foreign tensors that the transport makes before the core hears of them.
NEEDS_TORCH = {
    "protocols.tensor_codec", "protocols.topk_codec", "protocols.noloco", "protocols.checkfree", "protocols.admission",
}  # fmt: skip
# Each of these runs what the bytes say: https://docs.python.org/3/library/pickle.html, first warning.
MODULES_THAT_RUN_BYTES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS_THAT_RUN_BYTES = {
    "compile", "eval", "exec", "os.popen", "os.system", "torch.hub.load", "torch.load", "yaml.load",
    "yaml.unsafe_load",
}  # fmt: skip
OUTPUT_CALLS = {"print", "echo", "secho", "debug", "info", "warning", "error", "exception", "critical", "log"}
SECRET_WORDS = ("password", "private_bytes", "private_key", "secret")


def sources(*folders: str) -> list[Path]:
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if is_written_by_hand(path)
    )


def parsed(*folders: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node of every file, with the file's place for a message."""
    for path in sources(*folders):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", node


def dotted(node: ast.expr) -> str:
    """`torch.load` for the expression that names it; empty for anything but a chain of names."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_no_file_outgrows_its_cap():
    lengths = {
        path: len(path.read_text("utf-8").splitlines()) for path in sources(*PRODUCT, "benchmarks", "tests")
    }
    assert lengths
    assert {str(path): lines for path, lines in lengths.items() if lines > FILE_LINES_MAX} == {}


def function_lengths(*folders: str) -> dict[str, int]:
    return {
        f"{place} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for place, node in parsed(*folders)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize(
    ("folders", "lines_max"),
    [((*PRODUCT, "benchmarks", "tests"), FUNCTION_LINES_MAX), (("protocols",), MACHINE_METHOD_LINES_MAX)],
)
def test_no_function_outgrows_its_cap(folders, lines_max):
    lengths = function_lengths(*folders)
    assert lengths
    assert {place: lines for place, lines in lengths.items() if lines > lines_max} == {}


def test_imports_point_one_way_and_heavy_modules_stay_where_they_belong():
    """The contracts are in pyproject.toml: layers, pure protocols, torch and hivemind behind their few doors."""
    result = run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    assert result.returncode == 0, result.stdout + result.stderr


def test_decisions_start_without_torch_and_hivemind():
    """The simulator and the command line import the whole core: it must not cost them a tensor library."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sources("protocols")
    } - NEEDS_TORCH
    assert "protocols.swarm" in modules
    program = (
        f"import importlib, sys\nfor name in {sorted(modules)!r}: importlib.import_module(name)\n"
        "print(*sorted({'torch', 'hivemind', 'grpc', 'uvloop'} & set(sys.modules)))"
    )
    result = run(sys.executable, "-c", program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


def test_product_never_runs_bytes_that_it_was_given():
    """A peer's bytes are data: no pickle, no torch.load, no eval, anywhere in what we ship."""
    found = []
    for place, node in parsed(*PRODUCT):
        if isinstance(node, ast.Import):
            found += [place for alias in node.names if alias.name.split(".")[0] in MODULES_THAT_RUN_BYTES]
        elif isinstance(node, ast.ImportFrom):
            found += [place] if (node.module or "").split(".")[0] in MODULES_THAT_RUN_BYTES else []
        elif isinstance(node, ast.Call):
            shell = any(keyword.arg == "shell" for keyword in node.keywords)
            found += [place] if shell or dotted(node.func) in CALLS_THAT_RUN_BYTES else []
    assert found == []


def test_secrets_are_never_printed_or_logged():
    found = [
        place
        for place, node in parsed(*PRODUCT)
        if isinstance(node, ast.Call)
        and dotted(node.func).split(".")[-1] in OUTPUT_CALLS
        and any(word in ast.unparse(argument).lower() for argument in node.args for word in SECRET_WORDS)
    ]
    assert found == []


@pytest.mark.parametrize("folder", PRODUCT)
def test_every_module_says_what_it_is_for(folder):
    """README's tree is made of these sentences."""
    silent = [
        str(path) for path in sources(folder) if not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert silent == []


def test_tree_in_readme_is_the_tree_on_disk():
    """Stale? `make tree`."""
    assert parts_of_readme()[1] == tree()
