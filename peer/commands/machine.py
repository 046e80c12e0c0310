"""Verbs about this machine: identity, configuration, health, versions."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib import metadata
from typing import Any

import typer

from peer import __version__
from peer.commands.local import AsJson
from peer.commands.options import ConfigFile, host_options
from peer.config import resolve
from protocols.errors import ConfigError

LIBRARIES = ("torch", "hivemind", "grpcio", "protobuf")


def register(app: typer.Typer) -> None:
    for name, text, command in (
        ("identity", "This machine's identity.", show_identity),
        ("config", "This machine's configuration.", show_config),
    ):
        group = typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)
        group.callback()(_group)
        group.command("show")(command)
        app.add_typer(group, name=name)
    app.command()(doctor)
    app.command()(version)


def _group() -> None:
    """A group stays a group with one verb in it."""


@host_options
def show_identity(flags: dict[str, Any], config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Print peer id and name; never makes a key and never shows it."""
    from dht.identity import Identity, friendly_name

    path = resolve(flags, file=config).config.identity_file
    if not path.exists():
        raise ConfigError(f"no identity at {path} yet: the first `gossamer join` makes one")
    peer = Identity.load_or_create(path).peer_id
    shown = {"peer": peer, "name": friendly_name(peer), "file": str(path)}
    typer.echo(
        json.dumps(shown) if as_json else "\n".join(f"{name:<5} {value}" for name, value in shown.items())
    )


@host_options
def show_config(flags: dict[str, Any], config: ConfigFile = None) -> None:
    """Print every option with its value and where that came from."""
    resolved = resolve(flags, file=config)
    for name, value in resolved.config.model_dump(mode="json").items():
        typer.echo(f"{name:<18} {json.dumps(value):<40} {resolved.origins[name]}")


@host_options
def doctor(flags: dict[str, Any], config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Look whether this machine can be a peer; exit 1 when something is missing."""
    from peer.doctor import examine

    findings = []
    for finding in examine(resolve(flags, file=config).config):
        findings.append(finding)
        if not as_json:
            typer.echo(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what:<14}  {finding.detail}")
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


def version(as_json: AsJson = False) -> None:
    """Show the versions of everything that matters in a bug report."""
    show_version(as_json=as_json)


def show_version(*, as_json: bool) -> None:
    from protocols.run_spec import PROTOCOL_VERSION

    versions = {
        "gossamer": __version__,
        "protocol": str(PROTOCOL_VERSION),
        "python": platform.python_version(),
    }
    versions |= {name: metadata.version(name) for name in LIBRARIES}
    versions["p2pd"] = f"as in hivemind {versions['hivemind']}"
    typer.echo(json.dumps(versions) if as_json else "\n".join(f"{k:<10} {v}" for k, v in versions.items()))
