"""`gossamer plan`: the planner's answer for a matrix of costs, or for the swarm that a peer of this machine sees."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peer.commands.local import AsJson, RuntimeDir
from peer.config import resolve
from peer.plan_file import MatrixFile, published_plan, read_arrangement, read_matrix
from protocols.errors import ConfigError
from protocols.swarm import PeerId

if TYPE_CHECKING:
    from peer.comparison import Contender
    from peer.status import PeerStatus
    from protocols.planning import Plan
    from protocols.run_spec import RunSpec

PIPE_COLUMNS = 140  # where nobody sees the lines break


def register(app: typer.Typer) -> None:
    app.command()(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan with all that is shown of it; `number` is what JSON calls a peer. The last contender is the plan."""

    title: str
    plan: Plan
    contenders: Sequence[Contender]
    labels: Mapping[PeerId, str]
    number: Callable[[PeerId], int | str]


def plan(
    file: Annotated[
        Path | None, typer.Argument(help="Costs as JSON; the swarm of a peer here if left out.")
    ] = None,
    arrangement: Annotated[
        Path | None, typer.Option(help="JSON list of stages, each a list of peers: who serves what.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(help="Microbatches that a peer may hold, instead of the file's.")
    ] = None,
    origin_slots: Annotated[
        int | None, typer.Option(help="The same for first-stage peers, whose own cost them little.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the round: a timeline of all peers, .png or .svg.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="The swarm's run file; asked of the swarm if left out.")
    ] = None,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Plan who serves which stage, and which way each microbatch goes; compare with the full pipeline."""
    from peer.timeline import check_format, draw

    if picture is not None:
        check_format(picture)
    if file is not None:
        answer = _of_file(file, arrangement, slots, origin_slots)
    elif arrangement is None and slots is None and origin_slots is None:
        answer = _of_swarm(run, runtime_dir)
    else:
        raise ConfigError("--arrangement, --slots and --origin-slots go with a FILE: a swarm has its own")
    if picture is not None:
        draw(picture, answer.plan, answer.contenders, answer.labels, title=answer.title)
    if as_json:
        typer.echo(json.dumps(_as_json(answer)))
    else:
        _show(answer)


def _of_file(path: Path, arrangement: Path | None, slots: int | None, origin_slots: int | None) -> Answer:
    from peer.comparison import full_pipeline, ours, published
    from protocols.planning import plan as make_plan

    matrix = read_matrix(path)
    order = None if arrangement is None else read_arrangement(arrangement)
    found = make_plan(matrix.instance(order, slots=slots, originator_slots=origin_slots))
    _check_caps(found)
    known = published_plan(matrix)
    if order is None and known is not None:
        order = known.arrangement
    arranged = matrix.instance(order, slots=slots, originator_slots=origin_slots) if order else found.instance
    contenders = [full_pipeline(arranged, order), ours(found)]
    if known is not None:
        contenders.insert(1, published(matrix, known))
    labels = {peer: _label(matrix, number) for number, peer in enumerate(matrix.names())}
    return Answer(
        title=f"{matrix.setting or path.stem}: {_size(found)}",
        plan=found,
        contenders=contenders,
        labels=labels,
        number=int,
    )


def _label(matrix: MatrixFile, number: int) -> str:
    places = matrix.node_location
    return f"{number} {places[number]}" if number < len(places) else str(number)


def _check_caps(found: Plan) -> None:
    """Of a file, a person can change the numbers; a live swarm goes on with the best there is."""
    if not found.shortfall:
        return
    instance = found.instance
    missing = []
    for stage in instance.rules.relayed_stages:
        replicas = set(instance.replicas(stage).tolist())
        visits = sum(hop in replicas for path in found.paths for hop in path[1:])
        room = int(instance.room[list(replicas)].sum())
        missing.append((visits - room, stage, visits, room))
    short, stage, visits, room = max(missing)
    where = f"stage {stage} is visited {visits} times a round and its peers have room for {room}"
    raise ConfigError(
        f"slots cannot be kept: {found.shortfall} visits more than relays have room for"
        f" ({where}: {short} too few): give more slots, more peers to that stage, or fewer microbatches"
    )


def _of_swarm(run: str | None, runtime_dir: Path | None) -> Answer:
    from dht.identity import friendly_name
    from peer.comparison import full_pipeline, ours
    from protocols.group_plan import PlanProblem, solve
    from protocols.swarm import PeerState

    status = _ask_peer(runtime_dir)
    spec = _spec(run, status)
    serving = (info for info in status.peers if info.state is PeerState.SERVING and info.stage is not None)
    peers = tuple(sorted(serving, key=lambda info: info.peer))
    if not any(info.stage == 0 for info in peers):
        raise ConfigError("nobody serves the first stage now: there are no microbatches to plan")
    made = solve(PlanProblem(spec=spec, peers=peers, me=status.peer, latency_s={}), None)
    if made.plan is None:
        raise ConfigError(f"the swarm as it is has no legal plan: {made.reason}")
    return Answer(
        title=f"{status.run_id}: {_size(made.plan)}",
        plan=made.plan,
        contenders=[full_pipeline(made.plan.instance), ours(made.plan)],
        labels={info.peer: friendly_name(info.peer) for info in peers},
        number=str,
    )


def _ask_peer(runtime_dir: Path | None) -> PeerStatus:
    """Any peer of this machine that takes part in a run."""
    from peer.control_client import choose_peers, connect
    from peer.pointers import default_runtime_dir

    for pointer in choose_peers(runtime_dir or default_runtime_dir()):
        with connect(pointer.socket_path) as client:
            status = client.status()
        if not status.is_bootstrap:
            return status
    raise ConfigError("the peers of this machine only introduce others: give FILE, or join a run first")


def _spec(run: str | None, status: PeerStatus) -> RunSpec:
    """From the run file, or through the peer that was asked, from the swarm's table."""
    from peer.commands.serve import load_spec

    host = resolve({}).config
    spec = load_spec(
        run or host.run or status.run_id, host.model_copy(update={"initial_peers": status.addresses})
    )
    if spec.run_id != status.run_id:
        raise ConfigError(f"the peer here is of run {status.run_id}, not of {spec.run_id}: give its run file")
    return spec


def _size(found: Plan) -> str:
    rules = found.instance.rules
    return (
        f"{found.instance.num_peers} peers, {rules.num_stages} stages, "
        f"{len(found.paths)} microbatches through {rules.path_stages} stages each"
    )


def _as_json(answer: Answer) -> dict[str, Any]:
    found, number = answer.plan, answer.number
    return {
        "makespan_s": found.makespan_s,
        "lower_bound_s": found.lower_bound_s,
        "idle_share": answer.contenders[-1].round.idle_share(),
        "shortfall": found.shortfall,
        "stage_of": {str(number(peer)): stage for peer, stage in found.stage_of.items()},
        "microbatches": [
            {"originator": number(one.originator), "path": [number(peer) for peer in one.path]}
            for one in found.microbatches
        ],
        "compared": [
            {"name": one.name, "makespan_s": one.round.makespan_s, "idle_share": one.round.idle_share()}
            for one in answer.contenders
        ],
    }


def _show(answer: Answer) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_COLUMNS)
    console.print(Text(answer.title, style="bold"), end="\n\n")
    console.print(_comparison(answer), end="\n\n")
    console.print(_routes(answer))
    if answer.plan.shortfall:
        console.print(f"\n{answer.plan.shortfall} visits more than relays have room for: they queue")


def _comparison(answer: Answer) -> Any:
    from rich.table import Table

    from peer.comparison import in_seconds

    table = Table("", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("makespan", "of the first", "idle"):
        table.add_column(column, justify="right")
    whole_s = answer.contenders[0].round.makespan_s
    for one in answer.contenders:
        length_s = one.round.makespan_s
        table.add_row(
            one.name, in_seconds(length_s), f"{length_s / whole_s:.2f}", f"{one.round.idle_share():.0%}"
        )
    bound_s = answer.plan.lower_bound_s
    table.add_row("lower bound of this plan", in_seconds(bound_s), f"{bound_s / whole_s:.2f}", "")
    return table


def _routes(answer: Answer) -> Any:
    from rich.table import Table

    from peer.comparison import in_seconds, routes

    names, stage_of = answer.plan.instance.peers, answer.plan.stage_of
    table = Table("originator", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("microbatches", justify="right")
    table.add_column("path (stage:peer)")
    table.add_column("done", justify="right")
    for route in routes(answer.plan):
        hops = [f"{stage_of[names[hop]]}:{answer.labels[names[hop]]}" for hop in route.path[1:]]
        table.add_row(
            answer.labels[names[route.path[0]]],
            str(route.microbatches),
            " > ".join(hops),
            in_seconds(route.done_s),
        )
    return table
