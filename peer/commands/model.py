"""`gossamer export`, `average`, `generate` and `eval`: from replicas to a model, and what it says and knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peer.commands.local import AsJson, RuntimeDir
from peer.commands.options import ConfigFile
from peer.config import HostConfig, resolve
from peer.progress import short_number
from protocols.errors import ConfigError

if TYPE_CHECKING:  # torch comes with it: too slow for a help text
    from peer.collect import Progress, StageWeights
    from peer.evaluate import Batch, Choice, Row
    from protocols.run_spec import RunSpec

CHOICE_COLUMNS = ("perplexity", "cost", "share", "stages")
ROW_COLUMNS = ("share", "choices", "best", "cost", "mean", "worst", "best_stages")
STAGE_COLUMNS = ("stage", "replicas", "rounds", "spread", "bytes", "from")
SHOW_EVERY_S = 2.0  # of one donor

Run = Annotated[str | None, typer.Option(help="Of a live swarm: the run's id, or its file.", metavar="RUN")]
InitialPeers = Annotated[
    list[str] | None, typer.Option(help="Addresses of peers of that swarm.", metavar="ADDRESS...")
]
ModelFolder = Annotated[Path, typer.Argument(help="An exported model folder.", metavar="MODEL")]


def register(app: typer.Typer) -> None:
    app.command()(export)
    app.command()(average)
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
    run: Run = None,
    initial_peers: InitialPeers = None,
    take: Annotated[
        str | None,
        typer.Option(
            help="With --run: average of all replicas; best, the one of each stage with the most rounds; or a "
            "peer's name or id, for its stage.  [average]"
        ),
    ] = None,
    runtime_dir: RuntimeDir = None,
) -> None:
    """Put the weights of all stages together into one model folder.

    From checkpoints the newest; with --run and --initial-peers from the replicas that serve now.
    """
    if run is None and (take or initial_peers):
        raise ConfigError("--take and --initial-peers go with --run, the swarm to take the weights from")
    if run is not None:
        if checkpoints or live:
            raise ConfigError("--run takes weights from a swarm, not from checkpoints: drop one of them")
        _export_from_swarm(target, _host(run, initial_peers, None), take or "average")
        return
    from peer.export import export_from_checkpoints

    folders = list(checkpoints or ()) + (_written_now(runtime_dir) if live else [])
    if not folders:
        folders = [path for path in resolve({}).config.checkpoint_dir.glob("*") if path.is_dir()]
    typer.echo(f"exported to {export_from_checkpoints(folders, target)}")


def _written_now(runtime_dir: Path | None) -> list[Path]:
    """Checkpoint folders of this machine's peers, each with a fresh checkpoint."""
    from peer.control_client import choose_peers, connect
    from peer.pointers import default_runtime_dir

    folders = []
    for pointer in choose_peers(runtime_dir or default_runtime_dir()):
        with connect(pointer.socket_path) as client:
            if client.status().stage is not None:
                folders.append(client.checkpoint().parent)
    return folders


# ---- from a live swarm ---------------------------------------------------------------------------


def average(
    run: Run = None,
    initial_peers: InitialPeers = None,
    eval_: Annotated[
        int, typer.Option("--eval", min=0, help="Held-out microbatches to try the mean and one replica on.")
    ] = 0,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Fetch all replicas of a live swarm and show how far they are from their mean."""
    from peer.commands.serve import load_spec
    from peer.evaluate import held_out

    host = _host(run, initial_peers, config)
    spec = load_spec(str(host.run), host)
    batches = held_out(spec, None, eval_ * spec.tokens_per_microbatch, host.cache_dir) if eval_ else []
    stages = _collect(spec, host, "average", keep_single=bool(batches))
    shown: dict[str, Any] = {"run": spec.run_id, "stages": [_stage(stage) for stage in stages]}
    if batches:
        singles = {name: one for stage in stages for name, one in (stage.single or {}).items()}
        shown["eval"] = {
            "microbatches": len(batches),
            "average_loss_nats": _loss(spec, _whole(stages), batches),
            "single_loss_nats": _loss(spec, singles, batches),
        }
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
        return
    typer.echo(
        f"{spec.run_id}: {sum(len(stage.came) for stage in stages)} replicas of {spec.num_stages} stages"
    )
    _show(STAGE_COLUMNS, [_stage_in_words(stage) for stage in stages])
    if batches:
        typer.echo(
            "loss on {microbatches} held-out microbatches: {average_loss_nats:.4f} of the mean, "
            "{single_loss_nats:.4f} of the newest replica of each stage".format(**shown["eval"])
        )


def _export_from_swarm(target: Path, host: HostConfig, take: str) -> None:
    from peer.commands.serve import load_spec
    from peer.export import write_hf_folder
    from peer.tokens import tokenizer_path

    spec = load_spec(str(host.run), host)
    tokenizer_file = tokenizer_path(spec.data.tokenizer)
    stages = _collect(spec, host, take)
    facts = {
        "rounds": max(one.round for stage in stages for one in stage.came),
        **{f"weights of stage {stage.stage}": _origin(stage) for stage in stages},
    }
    _show(STAGE_COLUMNS, [_stage_in_words(stage) for stage in stages])
    folder = write_hf_folder(target, spec, _whole(stages), tokenizer_file=tokenizer_file, facts=facts)
    typer.echo(f"exported to {folder}")


def _host(run: str | None, initial_peers: list[str] | None, config: Path | None) -> HostConfig:
    flags = {"run": run, "initial_peers": initial_peers}
    host = resolve({name: value for name, value in flags.items() if value}, file=config).config
    if host.run is None or not host.initial_peers:
        raise ConfigError(
            "which swarm? Give --run RUN and --initial-peers ADDRESS (a peer of it prints its own)"
        )
    return host


def _collect(
    spec: RunSpec, host: HostConfig, take: str, *, keep_single: bool = False
) -> tuple[StageWeights, ...]:
    import asyncio

    from peer.collect import collect

    return asyncio.run(collect(spec, host, take, _Reporter(), keep_single=keep_single))


class _Reporter:
    """Progress on stderr: a line when a donor is done or fails, and every few seconds between."""

    def __init__(self) -> None:
        self._shown_s: dict[str, float] = {}

    def __call__(self, now: Progress) -> None:
        from dht.identity import friendly_name

        who = f"stage {now.stage} from {friendly_name(now.donor)}"
        if now.problem:
            typer.echo(f"{who}: {now.problem}", err=True)
        elif now.share == 1 or now.seconds - self._shown_s.get(now.donor, 0.0) >= SHOW_EVERY_S:
            self._shown_s[now.donor] = now.seconds
            rate = short_number(now.num_bytes / max(now.seconds, 1e-3))
            typer.echo(f"{who}: {now.share:.0%}, {short_number(now.num_bytes)}B at {rate}B/s", err=True)


def _whole(stages: Sequence[StageWeights]) -> dict[str, Any]:
    return {name: one for stage in stages for name, one in stage.weights.items()}


def _loss(spec: RunSpec, weights: Mapping[str, Any], batches: Sequence[Batch]) -> float:
    import torch

    from peer.evaluate import evaluate
    from peer.model.llama import Llama

    with torch.device("meta"):
        model = Llama(spec.model)
    model.load_state_dict(weights, assign=True)
    (choice,) = evaluate(model.eval(), spec, [tuple(range(spec.num_stages))], batches)
    return choice.loss


def _origin(stage: StageWeights) -> str:
    """For the model card."""
    names = ", ".join(f"{one.name} at round {one.round}" for one in stage.came)
    return f"mean of {names}" if len(stage.came) > 1 else names


def _stage(stage: StageWeights) -> dict[str, Any]:
    """`spread`: the replicas' rms distance from their mean, as a share of the rms of the mean's weights."""
    return {
        "stage": stage.stage,
        "replicas": [{"name": one.name, **asdict(one)} for one in stage.came],
        "failed": dict(stage.failed),
        "spread": stage.spread,
        "bytes": sum(one.num_bytes for one in stage.came),
    }


def _stage_in_words(stage: StageWeights) -> dict[str, Any]:
    rounds = sorted({one.round for one in stage.came})
    return {
        "stage": str(stage.stage),
        "replicas": str(len(stage.came)),
        "rounds": "-".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))),
        "spread": stage.spread,
        "bytes": short_number(sum(one.num_bytes for one in stage.came)),
        "from": ", ".join(one.name for one in stage.came),
    }


# ---- what an exported model says and knows --------------------------------------------------------


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
