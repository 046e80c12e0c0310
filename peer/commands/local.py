"""Verbs for peers that run on this machine. They ask the control sockets and import neither torch nor hivemind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from peer.control_client import ControlClient, choose_peers, connect
from peer.pointers import Pointer, default_runtime_dir, find_peers
from peer.progress import ProgressTracker, describe_state, in_words, short_number, short_time
from peer.status import PeerStatus

RuntimeDir = Annotated[
    Path | None,
    typer.Option(help="Where peers keep their control sockets.", envvar="GOSSAMER_RUNTIME_DIR"),
]
Which = Annotated[str | None, typer.Argument(help="Name, or begin or end of the id; all peers if left out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


def register(app: typer.Typer) -> None:
    for command in (status, peers, pause, resume, leave, checkpoint, healthcheck):
        app.command()(command)


def status(which: Which = None, runtime_dir: RuntimeDir = None, as_json: AsJson = False) -> None:
    """Show the peers of this machine: stage, state, losses, speed, last events."""
    found = _ask(which, runtime_dir, lambda client, pointer: client.status())
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], default=_plain))
        return
    typer.echo("\n\n".join(_status_in_words(one) for one in found))


def peers(which: Which = None, runtime_dir: RuntimeDir = None, as_json: AsJson = False) -> None:
    """List the peers of the swarm, as a peer of this machine sees them."""
    infos = {info.peer: info for view in _ask(which, runtime_dir, lambda c, p: c.peers()) for info in view}
    rows = [infos[peer] for peer in sorted(infos)]
    if as_json:
        typer.echo(json.dumps([asdict(info) for info in rows], default=_plain))
        return
    typer.echo(f"{'peer':<54} {'stage':>5}  {'state':<12} {'round':>7}")
    for info in sorted(rows, key=lambda info: (info.stage is None, info.stage or 0, info.peer)):
        stage = "-" if info.stage is None else info.stage
        typer.echo(f"{info.peer:<54} {stage:>5}  {info.state.value:<12} {info.round:>7}")


def pause(which: Which = None, runtime_dir: RuntimeDir = None) -> None:
    """Finish what is under way, then start nothing new."""
    _tell(which, runtime_dir, ControlClient.pause, "pauses")


def resume(which: Which = None, runtime_dir: RuntimeDir = None) -> None:
    """Go on after a pause."""
    _tell(which, runtime_dir, ControlClient.resume, "goes on")


def leave(which: Which = None, runtime_dir: RuntimeDir = None) -> None:
    """Finish what is held, say goodbye to the swarm, stop."""
    _tell(which, runtime_dir, ControlClient.leave, "leaves")


def checkpoint(which: Which = None, runtime_dir: RuntimeDir = None) -> None:
    """Write the weights to disk now and say where."""
    for path in _ask(which, runtime_dir, lambda client, pointer: client.checkpoint()):
        typer.echo(path)


def healthcheck(runtime_dir: RuntimeDir = None) -> None:
    """Exit 0 when every peer of this machine serves, 1 when one does not or there is none: for containers."""
    pointers = find_peers(runtime_dir or default_runtime_dir())
    for pointer in pointers:
        with connect(pointer.socket_path) as client:
            if not client.is_serving():
                typer.echo(f"{pointer.name} does not serve", err=True)
                raise typer.Exit(1)
    raise typer.Exit(0 if pointers else 1)


def _ask(
    which: str | None, runtime_dir: Path | None, question: Callable[[ControlClient, Pointer], Any]
) -> list[Any]:
    answers = []
    for pointer in choose_peers(runtime_dir or default_runtime_dir(), which):
        with connect(pointer.socket_path) as client:
            answers.append(question(client, pointer))
    return answers


def _tell(
    which: str | None, runtime_dir: Path | None, order: Callable[[ControlClient], None], what: str
) -> None:
    for name in _ask(which, runtime_dir, lambda client, pointer: (order(client), pointer.name)[1]):
        typer.echo(f"{name} {what}")


def _status_in_words(status: PeerStatus) -> str:
    if status.is_bootstrap:
        return "\n".join([*_head(status), *(f"  address  {address}" for address in status.addresses)])
    num_stages = max((info.stage for info in status.peers if info.stage is not None), default=0) + 1
    progress = in_words(ProgressTracker(num_stages).update([status], now=0.0))
    lines = [
        *_head(status),
        f"  progress {progress}",
        f"  own work {short_number(status.tokens_per_s)} tokens/s, {status.num_in_flight} microbatches in flight, "
        f"{status.queue_depth} held, up {short_time(status.uptime_s)}",
    ]
    if status.planned_round_s:
        lines.append(f"  plan     a round in {status.planned_round_s:.2f} s, by the group's plan")
    if status.outer_wait_s:
        lines.append(
            f"  average  {status.apart:.2%} from its partners, cosine {status.cosine:.2f}, "
            f"{status.outer_wait_s:.2f} s from due to applied"
        )
    lines += [f"  address  {address}" for address in status.addresses]
    lines += _counters(status.counters.items())
    lines += [f"  event    {event}" for event in status.events[-10:]]
    return "\n".join(lines)


def _head(status: PeerStatus) -> list[str]:
    stage = "" if status.stage is None else f"stage {status.stage} on {status.device}, "
    return [
        f"{status.name}  {status.peer}",
        f"  run      {status.run_id or 'any'}",
        f"  state    {stage}{describe_state(status)}{' (paused)' if status.paused else ''}",
    ]


def _counters(counters: Iterable[tuple[str, float]]) -> list[str]:
    shown = [f"{name} {short_number(value)}" for name, value in sorted(counters) if value]
    return [f"  counters {', '.join(shown)}"] if shown else []


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else dict(value)
