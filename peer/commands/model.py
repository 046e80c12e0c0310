"""`gossamer export` and `gossamer generate`: from checkpoints to a model folder, and from that to text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peer.commands.local import RuntimeDir
from peer.config import resolve


def register(app: typer.Typer) -> None:
    app.command()(export)
    app.command()(generate)


def export(
    target: Annotated[Path, typer.Argument(help="Folder to write, for Hugging Face transformers.")],
    checkpoints: Annotated[
        list[Path] | None, typer.Argument(help="Checkpoint folders of peers; together one of each stage.")
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="First let the peers of this machine write checkpoints, and use those."),
    ] = False,
    runtime_dir: RuntimeDir = None,
) -> None:
    """Put the newest weights of all stages together into one model folder."""
    from peer.control_client import choose_peers, connect
    from peer.export import export_from_checkpoints
    from peer.pointers import default_runtime_dir

    folders = list(checkpoints or ())
    if live:
        for pointer in choose_peers(runtime_dir or default_runtime_dir()):
            with connect(pointer.socket_path) as client:
                if client.status().stage is not None:
                    folders.append(client.checkpoint().parent)
    if not folders:
        folders = [path for path in resolve({}).config.checkpoint_dir.glob("*") if path.is_dir()]
    typer.echo(f"exported to {export_from_checkpoints(folders, target)}")


def generate(
    folder: Annotated[Path, typer.Argument(help="An exported model folder.")],
    prompt: Annotated[str, typer.Argument(help="How the text begins.")] = "",
    tokens: Annotated[int, typer.Option(min=1, max=100_000, help="How many at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, max=10.0, help="0: always the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among so many; 0: all.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
) -> None:
    """Sample text from an exported model."""
    from peer.generate import generate as sample

    text = sample(folder, prompt, max_new_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    typer.echo(text)
