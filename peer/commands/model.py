"""`gossamer export`, `generate` and `eval`: from checkpoints to a model folder, and what that says and knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peer.commands.local import AsJson, RuntimeDir
from peer.config import resolve

if TYPE_CHECKING:  # torch comes with it: too slow for a help text
    from peer.evaluate import Choice, Row

CHOICE_COLUMNS = ("perplexity", "cost", "share", "stages")
ROW_COLUMNS = ("share", "choices", "best", "cost", "mean", "worst", "best_stages")

ModelFolder = Annotated[Path, typer.Argument(help="An exported model folder.", metavar="MODEL")]


def register(app: typer.Typer) -> None:
    app.command()(export)
    app.command()(generate)
    app.command("eval")(evaluate)


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
    folder: ModelFolder,
    prompt: Annotated[str, typer.Argument(help="How the text begins.")] = "",
    tokens: Annotated[int, typer.Option(min=1, max=100_000, help="How many at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, max=10.0, help="0: always the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among so many; 0: all.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    stages: Annotated[
        str | None, typer.Option(help="Run only these, in this order, such as 0,1,3; all if left out.")
    ] = None,
) -> None:
    """Sample text from an exported model."""
    from peer.generate import generate as sample
    from peer.partial import parse_stages

    text = sample(
        folder,
        prompt,
        max_new_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stages=None if stages is None else parse_stages(stages),
    )
    typer.echo(text)


def evaluate(
    folder: ModelFolder,
    data: Annotated[
        str | None, typer.Option(help="Text file, folder or built-in name; the run's text if left out.")
    ] = None,
    drop_stages: Annotated[
        list[str] | None,
        typer.Option(help="Leave these out, such as 2,3; repeatable. A table of all choices if left out."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Held-out tokens to read, about.")] = 32_768,
    as_json: AsJson = False,
) -> None:
    """Perplexity on held-out text, and what it costs to run only some of the stages."""
    from peer.evaluate import evaluate, held_out, legal_choices, open_export, table
    from peer.partial import parse_stages, without

    model, spec = open_export(folder)
    orders = [tuple(range(spec.num_stages))]
    if drop_stages:
        orders += [without(spec, parse_stages(text)) for text in drop_stages]
    else:
        for num_stages in range(spec.num_stages - 1, 1, -1):
            orders += legal_choices(spec, num_stages)
    batches = held_out(spec, data, tokens, resolve({}).config.cache_dir)
    num_tokens = len(batches) * spec.tokens_per_microbatch
    found = evaluate(model, spec, orders, batches)
    shown = {
        "num_tokens": num_tokens,
        "choices": [_choice(found[0], choice) for choice in found],
        "table": [_row(found[0], row) for row in table(found)],
    }
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
        return
    typer.echo(f"{folder}: {spec.num_stages} stages, {num_tokens:,} held-out tokens")
    if drop_stages:
        _show(CHOICE_COLUMNS, shown["choices"])
    else:
        _show(ROW_COLUMNS, shown["table"])


def _choice(whole: Choice, choice: Choice) -> dict[str, Any]:
    """`cost`: by which share the whole model's perplexity grows."""
    return {
        "stages": choice.stages,
        "share": len(choice.stages) / len(whole.stages),
        "loss_nats": choice.loss,
        "perplexity": choice.perplexity,
        "cost": choice.perplexity / whole.perplexity - 1,
    }


def _row(whole: Choice, row: Row) -> dict[str, Any]:
    """Perplexities of all choices of one number of stages; `cost` is that of the best."""
    return {
        "share": row.num_stages / len(whole.stages),
        "choices": row.num_choices,
        "best": row.best.perplexity,
        "mean": row.mean_perplexity,
        "worst": row.worst.perplexity,
        "cost": row.best.perplexity / whole.perplexity - 1,
        "best_stages": row.best.stages,
    }


def _show(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """A table for a terminal; the last column is as wide as it likes."""
    for row in (dict(zip(columns, columns, strict=True)), *rows):
        *cells, last = [_cell(name, row[name]) for name in columns]
        typer.echo("  ".join([*(f"{cell:>10}" for cell in cells), last]))


def _cell(column: str, value: Any) -> str:
    if isinstance(value, str):
        return value.replace("_", " ")
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return format(value, {"share": ".0%", "cost": "+.1%", "choices": "d"}.get(column, ".5g"))
