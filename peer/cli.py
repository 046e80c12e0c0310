"""The `gossamer` command: which verbs there are, and what an error looks like.

Exit codes: 0 done, 1 failed, 2 wrong flag, file or address, 3 the swarm cannot be reached, 4 refused by it or by this
release, 130 interrupted. An expected error is one message on stderr (what, where, what to do); a traceback is a bug.
A verb's module is imported when the verb is typed, so that `status` answers before torch could be loaded.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from protocols.errors import ConfigError, GossamerError

EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 3, 4, 130

VERBS = {
    "join": "serve",
    "bootstrap": "serve",
    "run": "runs",
    "up": "swarm",
    "demo": "swarm",
    "simulate": "swarm",
    "plan": "plan",
    "status": "local",
    "peers": "local",
    "pause": "local",
    "resume": "local",
    "leave": "local",
    "checkpoint": "local",
    "healthcheck": "local",
    "export": "model",
    "average": "model",
    "generate": "model",
    "eval": "model",
    "identity": "machine",
    "config": "machine",
    "doctor": "machine",
    "version": "machine",
}
"""Verb to its module in `peer.commands`, in the order of the help."""

LIST_OPTIONS = ("--initial-peers", "--host-maddrs", "--announce-maddrs")


def build_app(verb: str | None = None) -> typer.Typer:
    """The application with all verbs, or with those of one verb's module."""
    app = typer.Typer(
        name="gossamer",
        help="Train one language model together over machines that nobody controls as a whole.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    chosen = [VERBS[verb]] if verb in VERBS else VERBS.values()
    for name in dict.fromkeys(chosen):
        importlib.import_module(f"peer.commands.{name}").register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from peer.commands.machine import show_version

        show_version(as_json=False)
        raise typer.Exit()


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show versions and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Without a verb there is nothing to do: the help is shown."""


def normalise(arguments: Sequence[str]) -> list[str]:
    """`--initial_peers A B` as this ecosystem writes it, to `--initial-peers A --initial-peers B`."""
    normal: list[str] = []
    open_list: str | None = None
    for position, argument in enumerate(arguments):
        if argument == "--":
            return normal + list(arguments[position:])
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = name.replace("_", "-")
            open_list = name if name in LIST_OPTIONS and not equals else None
            if open_list is None:
                normal.append(name + equals + value)
        elif argument.startswith("-") or open_list is None:
            open_list = None
            normal.append(argument)
        else:
            normal += [open_list, argument]
    return normal


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; the exit code."""
    given = normalise(sys.argv[1:] if arguments is None else arguments)
    verb = next((argument for argument in given if not argument.startswith("-")), None)
    try:
        build_app(verb)(given, prog_name="gossamer")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `gossamer peers | head`
        sys.stderr.close()
        return EXIT_FAILED
    except (GossamerError, OSError) as error:
        print(f"gossamer: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


def exit_code(error: Exception) -> int:
    """By the error's class; looked up by name where importing the class would cost seconds."""
    kind = type(error).__name__
    if kind == "CannotReachSwarm":
        return EXIT_UNREACHABLE
    if kind == "RunRefused":
        return EXIT_REFUSED
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
