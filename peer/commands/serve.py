"""`gossamer join` and `gossamer bootstrap`: peers that stay."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from peer.commands.options import ConfigFile, host_options
from peer.config import HostConfig, read_initial_peers, resolve
from peer.control import Controllable
from peer.first_screen import bootstrap_screen, first_screen
from peer.host import run_daemon, run_loop, tie_to_host
from peer.logs import PROGRESS_LOGGER
from peer.progress import ProgressTracker, in_words
from peer.run_file import read_run_file
from protocols.errors import ConfigError
from protocols.run_spec import RunSpec

PROGRESS_EVERY_S = 10.0
FETCH_TRIES = 5
FETCH_RETRY_S = 1.0

logger = logging.getLogger(PROGRESS_LOGGER)


def register(app: typer.Typer) -> None:
    app.command()(join)
    app.command()(bootstrap)


@host_options
def join(flags: dict[str, Any], config: ConfigFile = None) -> None:
    """Join a run and serve one stage of its model, until Ctrl-C.

    Options may also come from GOSSAMER_<OPTION> or from the file given with --config.
    """
    host = resolve(flags, file=config).config
    if host.run is None:
        raise ConfigError("join which run? Give --run FILE, or --run RUN_ID of one that the swarm knows")
    if not host.initial_peers and not host.new_swarm:
        raise ConfigError(
            "join through whom? Give --initial-peers ADDRESS (a peer of the run prints its own), "
            "or --new-swarm to be the first"
        )
    spec = load_spec(host.run, host)
    # waited for here, not in the daemon's loop, where nothing else could happen meanwhile
    host = host.model_copy(update={"initial_peers": read_initial_peers(host.initial_peers)})
    keep: list[asyncio.Task[None]] = []

    def on_ready(daemon: Controllable) -> None:
        typer.echo(first_screen(daemon.status(), host, spec))
        keep.append(asyncio.ensure_future(_report(daemon, spec)))

    raise typer.Exit(run_daemon(spec, host, on_ready))


async def _report(daemon: Controllable, spec: RunSpec) -> None:
    tracker = ProgressTracker(spec.num_stages)
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        status = daemon.status()
        line = in_words(tracker.update([status], asyncio.get_running_loop().time()))
        stage = "no stage yet" if status.stage is None else f"stage {status.stage}"
        logger.info("%s (%s)  %s", stage, status.state.value, line)


@host_options
def bootstrap(
    flags: dict[str, Any],
    config: ConfigFile = None,
    write_address: Annotated[
        Path | None, typer.Option(help="File that gets this peer's addresses, for @FILE of others.")
    ] = None,
) -> None:
    """Introduce peers to each other, without serving a stage, until Ctrl-C.

    With --run FILE it also tells newcomers what the run is, so that they can join by run id.
    """
    from peer.bootstrap import Bootstrap, run_bootstrap

    host = resolve(flags, file=config).config
    spec = read_run_file(Path(host.run)) if host.run else None

    def on_ready(peer: Bootstrap) -> None:
        tie_to_host(peer, host)
        typer.echo(bootstrap_screen(peer.status()))

    work = run_bootstrap(host, spec=spec, address_file=write_address, on_ready=on_ready)
    raise typer.Exit(run_loop(work, host))


def load_spec(run: str, host: HostConfig) -> RunSpec:
    """From a run file, or by run id from the swarm."""
    if Path(run).exists() or "/" in run or run.endswith(".json"):
        return read_run_file(Path(run))
    spec = asyncio.run(_fetch_spec(run, host))
    if spec is None:
        raise ConfigError(
            f"run {run!r} is neither a file here nor known to the swarm: ask its owner for the run file"
        )
    return spec


async def _fetch_spec(run_id: str, host: HostConfig) -> RunSpec | None:
    """Ask the table, under an identity for this one question: our own is the daemon's, a moment later."""
    from dht.discovery import fetch_run_spec
    from dht.identity import Identity
    from dht.node import DhtNode

    if not host.initial_peers:
        raise ConfigError(f"run {run_id!r} is no file here; to look it up in a swarm, give --initial-peers")
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        node = await DhtNode.start(
            Identity.load_or_create(Path(folder) / "identity.key"),
            host_maddrs=("/ip4/127.0.0.1/tcp/0",),
            initial_peers=read_initial_peers(host.initial_peers),
            use_relay=host.use_relay,
            startup_timeout_s=host.startup_timeout_s,
        )
        try:
            for _ in range(FETCH_TRIES):
                spec = await fetch_run_spec(node, run_id)
                if spec is not None:
                    return spec
                await asyncio.sleep(FETCH_RETRY_S)
        finally:
            await node.close()
    return None
