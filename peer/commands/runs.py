"""`gossamer run new` and `gossamer run show`: the file that says what all peers of a run agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from peer.config import resolve
from protocols.run_spec import PRESET_NAMES


def register(app: typer.Typer) -> None:
    run = typer.Typer(help="Make and read run files.", no_args_is_help=True, rich_markup_mode=None)
    run.command("new")(new)
    run.command("show")(show)
    app.add_typer(run, name="run")


def new(
    out: Annotated[Path, typer.Option(help="File to write; must not exist.")],
    model: Annotated[str, typer.Option(help=f"Size: {', '.join(PRESET_NAMES)}.")] = "nano",
    name: Annotated[str, typer.Option(help="First part of the run's id: a-z, 0-9 and . _ -")] = "demo",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field, such as rounds.rows=4; repeatable.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Holds the owner's identity, which signs the run.")
    ] = None,
) -> None:
    """Write a new run file, signed with this machine's identity."""
    from dht.identity import Identity
    from peer.run_file import make_spec, parse_changes, write_run_file

    config = resolve({"data_dir": data_dir} if data_dir else {}).config
    spec = make_spec(model, name, parse_changes(settings or ()))
    write_run_file(out, spec, Identity.load_or_create(config.identity_file))
    typer.echo(f"run {spec.run_id} in {out}: {spec.num_stages} stages, {spec.rounds.total_rounds} rounds")
    typer.echo(f"start it here:  gossamer join --run {out} --new-swarm --stage 0")
    typer.echo(f"all on one machine:  gossamer up --run {out}")


def show(file: Annotated[Path, typer.Argument(help="A run file.")]) -> None:
    """Check a run file and print what it says."""
    from peer.run_file import read_run_file

    spec = read_run_file(file)
    typer.echo(json.dumps({"run_id": spec.run_id, **spec.model_dump(mode="json")}, indent=2))
