"""Verbs that make whole swarms: `up` (processes here), `demo` (the main job), `simulate` (no processes at all)."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from protocols.errors import ConfigError

EXIT_INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    app.command()(up)
    app.command()(demo)
    app.command()(simulate)


def up(
    run: Annotated[Path, typer.Option(help="The run file.", envvar="GOSSAMER_RUN")],
    peers: Annotated[
        str | None, typer.Option(help="Peers by stage, such as 0:2,1:2; one of each stage if left out.")
    ] = None,
    events: Annotated[
        str, typer.Option(help="Such as 'kill stage=2 replica=1 at round=40; join at round=100'.")
    ] = "",
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for the peers' logs, identities and checkpoints.")
    ] = None,
    chaos: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="SEED",
            help="Kill, freeze and restart random peers, at moments that the seed draws.",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="With --chaos: train once more undisturbed, and compare losses.")
    ] = False,
) -> None:
    """Train on this machine alone: a local swarm of peers as processes, until the run's last round or Ctrl-C."""
    from peer.follow import follow
    from peer.launch import LocalSwarm, parse_layout
    from peer.progress import ProgressTracker
    from peer.run_file import read_run_file
    from peer.schedule import Schedule, parse_events

    spec = read_run_file(run)
    layout = parse_layout(peers) if peers else dict.fromkeys(range(spec.num_stages), 1)
    planned = parse_events(events)
    if chaos is not None and planned:
        raise ConfigError("--chaos and --events both say what shall happen: give one of them")
    if compare and chaos is None:
        raise ConfigError("--compare tells what chaos costs: give --chaos SEED as well")
    folder = log_dir or Path(tempfile.mkdtemp(prefix="gossamer-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))  # so that `with` stops the peers
    if chaos is not None:
        from peer.chaos import Rates
        from peer.chaos_run import run_chaos

        return run_chaos(spec, layout, folder, chaos, rates=Rates(), compare=compare, say=typer.echo)
    swarm = LocalSwarm(spec, layout, folder)
    typer.echo(f"run {spec.run_id}: {sum(layout.values())} peers, logs in {swarm.folder / 'logs'}")
    with swarm:
        typer.echo(f"all peers serve; see them with `gossamer status --runtime-dir {swarm.runtime_dir}`")
        follow(swarm, Schedule(swarm, planned), ProgressTracker(spec.num_stages))
        folders = " ".join(str(path) for path in swarm.checkpoints(swarm.folder / "checkpoints"))
    typer.echo(f"done; for a model folder:  gossamer export model {folders}")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for curve, table, model and logs.")] = Path("out/demo"),
    rounds: Annotated[
        int | None, typer.Option(help="Fewer rounds than the whole job, for a quick look.")
    ] = None,
) -> None:
    """The whole story in under 4 minutes: train, lose peers, recover, compare, export, write text."""
    from peer.demo import TOTAL_ROUNDS, run_demo

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))
    if not run_demo(out, rounds or TOTAL_ROUNDS):
        raise typer.Exit(1)


def simulate(
    peers: Annotated[int, typer.Option(min=10, max=520, help="Peers at the start, over five stages.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same story, event by event.")] = 0,
    kill_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the peers that are killed.")
    ] = 0.15,
    microbatches: Annotated[int, typer.Option(min=1, help="How many to train.")] = 200,
    story: Annotated[bool, typer.Option("--story", help="Print what happened, line by line.")] = False,
) -> None:
    """Run the same protocol code under a virtual clock, with peers dying; exit 1 if anything is lost or leaked."""
    from peer.simulator import churn

    misfortunes = churn.Churn(kills=round(kill_rate * peers))
    report = churn.simulate(peers=peers, seed=seed, churn=misfortunes, microbatches=microbatches, tell=story)
    for line in report.story:
        typer.echo(line)
    typer.echo(report.summary())
    raise typer.Exit(0 if report.is_clean else 1)
