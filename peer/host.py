"""What ties a running daemon to its machine: control socket, signals, metrics; undone in reverse order.

Signals: the first SIGINT or SIGTERM asks the daemon to leave, the second ends the process at once (its libp2p child
ends by itself, HIVEMIND 1). SIGUSR1 writes the stacks of all threads to stderr.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from peer.config import HostConfig
from peer.control import Controllable, attach
from peer.metrics import serve_metrics
from peer.status import PeerStatus

EXIT_INTERRUPTED = 130
SCRAPE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


@asynccontextmanager
async def hosted(daemon: Controllable, config: HostConfig) -> AsyncIterator[None]:
    """The daemon can be seen and told what to do by this machine's user while the block runs."""
    async with AsyncExitStack() as stack:
        uninstall = install_signals(daemon.request_leave)
        stack.callback(uninstall)
        control = await attach(daemon, config.runtime_dir)
        stack.push_async_callback(control.close)
        if config.metrics_addr:
            server = serve_metrics(config.metrics_addr, _in_loop(daemon.status))
            stack.callback(server.shutdown)
            logger.info("metrics at http://%s:%d/metrics", *server.server_address[:2])
        yield


def install_signals(request_leave: Callable[[], None]) -> Callable[[], None]:
    """First signal: leave. Second: end now. The result undoes it."""
    loop = asyncio.get_running_loop()
    asked: list[signal.Signals] = []

    def on_signal(which: signal.Signals) -> None:
        if asked:
            os._exit(EXIT_INTERRUPTED)
        asked.append(which)
        logger.info("%s: leaving the swarm; once more to end at once", which.name)
        request_leave()

    signals = (signal.SIGINT, signal.SIGTERM)
    for which in signals:
        loop.add_signal_handler(which, on_signal, which)
    faulthandler.register(signal.SIGUSR1)

    def uninstall() -> None:
        for which in signals:
            loop.remove_signal_handler(which)

    return uninstall


def _in_loop(read_status: Callable[[], PeerStatus]) -> Callable[[], PeerStatus]:
    """For other threads: the daemon's state may only be read between two turns of its loop."""
    loop = asyncio.get_running_loop()

    async def read() -> PeerStatus:
        return read_status()

    def from_thread() -> PeerStatus:
        return asyncio.run_coroutine_threadsafe(read(), loop).result(SCRAPE_TIMEOUT_S)

    return from_thread
