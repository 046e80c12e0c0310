"""What ties a running daemon to its machine: event loop, logs, signals, metrics.

Signals: the first SIGINT or SIGTERM asks the daemon to leave, the second ends the process at once (its libp2p child
ends by itself). SIGUSR1 writes the stacks of all threads to stderr.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from peer import logs
from peer.config import HostConfig
from peer.control import Controllable
from peer.metrics import serve_metrics
from peer.status import PeerStatus
from protocols.run_spec import RunSpec

EXIT_INTERRUPTED = 130
SCRAPE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


def run_daemon(
    spec: RunSpec, config: HostConfig, on_ready: Callable[[Controllable], None] | None = None
) -> int:
    """Run a peer in this process until it has left; its exit code. `on_ready` is called in its loop."""
    from peer.daemon import run_peer  # torch and hivemind: seconds

    def ready(daemon: Controllable) -> None:
        tie_to_host(daemon, config)
        if on_ready is not None:
            on_ready(daemon)

    return run_loop(run_peer(spec, config, on_ready=ready), config)


def run_loop(main: Coroutine[Any, Any, int], config: HostConfig) -> int:
    logs.set_up(config.log_level, config.log_format)
    try:
        return uvloop.run(main)
    except KeyboardInterrupt:  # before the daemon was ready to be asked
        return EXIT_INTERRUPTED


def tie_to_host(daemon: Controllable, config: HostConfig) -> None:
    """Signals and metrics of a daemon that is up; for the rest of the process's life. Call it in the daemon's loop."""
    install_signals(daemon.request_leave)
    if config.metrics_addr:
        server = serve_metrics(config.metrics_addr, in_loop(daemon.status))
        logger.info("metrics at http://%s:%d/metrics", *server.server_address[:2])


def install_signals(request_leave: Callable[[], None]) -> None:
    """First signal: leave. Second: end now."""
    loop = asyncio.get_running_loop()
    asked: list[signal.Signals] = []

    def on_signal(which: signal.Signals) -> None:
        if asked:
            os._exit(EXIT_INTERRUPTED)
        asked.append(which)
        logger.info("%s: leaving the swarm; once more to end at once", which.name)
        request_leave()

    for which in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(which, on_signal, which)
    faulthandler.register(signal.SIGUSR1)


def in_loop(read_status: Callable[[], PeerStatus]) -> Callable[[], PeerStatus]:
    """For other threads: the daemon's state may only be read between two turns of its loop."""
    loop = asyncio.get_running_loop()

    async def read() -> PeerStatus:
        return read_status()

    def from_thread() -> PeerStatus:
        return asyncio.run_coroutine_threadsafe(read(), loop).result(SCRAPE_TIMEOUT_S)

    return from_thread
