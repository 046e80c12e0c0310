"""A bootstrap peer: part of the table, without a stage. Newcomers join through it and learn who else there is.

It keeps no list and decides nothing, so any number of them may run, and the swarm goes on when all of them are gone.
With a run file it also keeps that run's spec in the table, for those who join by run id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from dht.directory import PLAIN
from dht.identity import Identity, IdentityLock, friendly_name
from dht.node import DhtNode
from dht.records import TTL_MAX_S, RunRecord, encode_run, spec_key
from peer.config import HostConfig, listen_maddrs, read_initial_peers, write_text
from peer.control import attach
from peer.status import PeerStatus
from protocols.errors import ConfigError
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, PeerState

STORE_EVERY_S = TTL_MAX_S / 3

logger = logging.getLogger(__name__)


class Bootstrap:
    """A daemon for the control plane, with nothing to pause or to save."""

    def __init__(self, peer: PeerId, spec: RunSpec | None) -> None:
        self.left = asyncio.Event()
        self.exit_code = 0
        self.addresses: tuple[str, ...] = ()
        self._peer, self._spec = peer, spec
        self._started_s = time.monotonic()

    def status(self) -> PeerStatus:
        return PeerStatus(
            peer=self._peer,
            name=friendly_name(self._peer),
            run_id=self._spec.run_id if self._spec else "",
            stage=None,
            state=PeerState.LEAVING if self.left.is_set() else PeerState.SERVING,
            addresses=self.addresses,
            uptime_s=time.monotonic() - self._started_s,
        )

    def request_leave(self) -> None:
        self.left.set()

    def request_pause(self) -> None:
        """Others rely on it: it cannot pause."""

    def request_resume(self) -> None:
        """It never paused."""

    async def export_stage(self, folder: Path | None) -> Path:
        raise ConfigError("a bootstrap peer has no weights to save")

    def on_dead(self, reason: str) -> None:
        logger.error("the network daemon is lost (%s): this peer stops; start it again", reason)
        self.exit_code = 1
        self.left.set()

    async def keep_spec(self, node: DhtNode) -> None:
        while self._spec is not None:
            record = encode_run(RunRecord(self._spec))
            if not await node.put(spec_key(self._spec.run_id), PLAIN, record, ttl_s=TTL_MAX_S):
                logger.info("the run's spec was not stored; trying again in %d s", STORE_EVERY_S)
            await asyncio.sleep(STORE_EVERY_S)


async def run_bootstrap(
    config: HostConfig,
    *,
    spec: RunSpec | None = None,
    address_file: Path | None = None,
    on_ready: Callable[[Bootstrap], None],
) -> int:
    """Run until asked to leave; the exit code. `address_file` gets the addresses, one a line, farthest first."""
    identity = Identity.load_or_create(config.identity_file)
    with IdentityLock(config.identity_file):
        bootstrap = Bootstrap(identity.peer_id, spec)
        node = await DhtNode.start(
            identity,
            host_maddrs=listen_maddrs(config),
            announce_maddrs=config.announce_maddrs,
            initial_peers=read_initial_peers(config.initial_peers),
            use_relay=config.use_relay,
            auto_nat=config.auto_nat,
            startup_timeout_s=config.startup_timeout_s,
            on_dead=bootstrap.on_dead,
        )
        keeper = asyncio.create_task(bootstrap.keep_spec(node))
        try:
            bootstrap.addresses = await node.visible_maddrs()
            await _serve(bootstrap, config, address_file, on_ready)
            return bootstrap.exit_code
        finally:
            keeper.cancel()
            await node.close()


async def _serve(
    bootstrap: Bootstrap, config: HostConfig, address_file: Path | None, on_ready: Callable[[Bootstrap], None]
) -> None:
    control = await attach(bootstrap, config.runtime_dir)
    try:
        if address_file is not None:
            write_text(address_file, "".join(f"{address}\n" for address in bootstrap.addresses))
        on_ready(bootstrap)
        await bootstrap.left.wait()
    finally:
        await control.close()
