"""DhtNode: this process's libp2p daemon and its part of the table, in the event loop that starts it.

One process, one loop, no fork: the daemon ends with its last control connection, so even a kill -9 of this
process leaves nothing behind. Start-up faults are told in words; from then on the network's faults are return
values.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dht import engine
from dht.addresses import Maddr, parse_announce_maddr, parse_host_maddr, parse_initial_peer, public_first
from dht.directory import PLAIN, DirectoryUnavailable, next_expiry
from dht.engine import LargeSwarm, LateCalls, Pong, RecordGate
from dht.identity import Identity
from dht.reachability import check_port_free, describe_dial
from dht.small_swarm import SmallSwarm
from dht.validators import open_envelope, seal
from protocols.errors import ConfigError, GossamerError
from protocols.swarm import PeerId

CLOCK_OFFSET_MAX_S = 3.0  # times to live are a few heartbeats; beyond that, records seem dead or immortal
CLOSE_MAX_S = 2.0  # nobody waits for a farewell of the table's
CALL_MAX_S = 6.0  # a store or a read; with frozen replicas it takes two RPC time-outs
JOIN_S = 12.0  # how long a bootstrap peer may take to answer: it may just be starting too
REJOIN_S = 30.0
_REJOIN_ALONE_S = 3.0
_JOIN_RETRY_S = 0.5

_log = logging.getLogger(__name__)
_ResultT = TypeVar("_ResultT")


class CannotReachSwarm(GossamerError):
    """None of the bootstrap addresses led to a peer; the message says what each of them met."""


class DhtNode:
    """A Directory over the network. Its entries are sealed with the identity's key."""

    def __init__(self, identity: Identity, p2p: Any, node: Any, calls: LateCalls) -> None:
        self._identity = identity
        self._p2p = p2p
        self._node = node
        self._calls = calls
        self._initial_peers: tuple[Maddr, ...] = ()
        self._small_swarm = SmallSwarm(node, random.Random(identity.peer_id))
        self._large_swarm = LargeSwarm(node)
        self._expiries: dict[tuple[str, str], float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.clock_offset_s = 0.0
        """How far the bootstrap peers' clocks are ahead of ours (median); 0 without any."""

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str] = (),
        initial_peers: Sequence[str] = (),
        run_ids: Sequence[str] | None = None,
        use_relay: bool = True,
        auto_nat: bool = False,
        startup_timeout_s: float = 60.0,
        on_dead: Callable[[str], None] | None = None,
    ) -> DhtNode:
        """Start and join. `run_ids` None: keep records of any run, as a bootstrap peer may.

        `auto_nat` also looks for relays and punches holes; it probes the network, so tests leave it off.
        `on_dead(reason)` is called once when the daemon is lost: close this node and start another.
        """
        hosts = [parse_host_maddr(text) for text in host_maddrs]
        announced = [parse_announce_maddr(text) for text in announce_maddrs]
        initial = tuple(
            maddr for maddr in map(parse_initial_peer, initial_peers) if maddr.peer != identity.peer_id
        )
        for maddr in hosts:
            check_port_free(maddr)
        p2p, calls = await _start_daemon(
            identity,
            initial,
            timeout_s=startup_timeout_s,
            host_maddrs=[maddr.text for maddr in hosts],
            announce_maddrs=[maddr.text for maddr in announced] or None,
            initial_peers=[maddr.text for maddr in initial] or None,
            use_relay=use_relay,
            use_auto_relay=use_relay and auto_nat,
            auto_nat=auto_nat,
        )
        try:
            node = cls(identity, p2p, await engine.create_dht_node(p2p, RecordGate(run_ids)), calls)
            await node._join(initial)
        except BaseException:
            await engine.shut_down_daemon(p2p)
            raise
        node._tasks = [asyncio.create_task(node._watch(on_dead)), asyncio.create_task(node._stay_joined())]
        return node

    @property
    def peer_id(self) -> PeerId:
        return self._identity.peer_id

    @property
    def p2p(self) -> Any:
        """hivemind's P2P, for the transport to put its streams on."""
        return self._p2p

    def now_unix_s(self) -> float:
        return time.time()

    async def visible_maddrs(self) -> tuple[str, ...]:
        """Own addresses with the peer id, ready to paste on another machine: public first, loopback last."""
        return public_first(await self._bounded(engine.visible_maddrs(self._p2p), []))

    async def put(self, key: str, subkey: str, value: bytes, *, ttl_s: float) -> bool:
        place = (key, subkey)
        expiry = self._expiries[place] = next_expiry(self.now_unix_s(), ttl_s, self._expiries.get(place))
        sealed = seal(key, subkey, value, expiry, self._identity.sign)
        name = None if subkey == PLAIN else subkey
        stored = await self._bounded(self._table.store(key, name, sealed, expiry), False)
        return stored and self._calls.closed_because is None

    async def get_many(self, keys: Iterable[str]) -> dict[str, dict[str, bytes]]:
        found = await self._bounded(self._table.read(keys), None)
        if found is None or self._calls.closed_because is not None:
            raise DirectoryUnavailable(self._calls.closed_because or f"no answer within {CALL_MAX_S:g} s")
        return {key: live for key, entries in found.items() if (live := self._unexpired(entries))}

    @property
    def _table(self) -> SmallSwarm | LargeSwarm:
        return self._small_swarm if self._small_swarm.is_small else self._large_swarm

    async def close(self) -> None:
        """Stop serving and end the daemon; no process is left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._bounded(engine.shut_down_dht_node(self._node), None, limit_s=CLOSE_MAX_S)
        self._calls.close("this peer is leaving")
        await engine.shut_down_daemon(self._p2p)

    def _unexpired(self, entries: Mapping[str, tuple[bytes, float]]) -> dict[str, bytes]:
        now = self.now_unix_s()
        return {
            name: open_envelope(sealed).value for name, (sealed, expiry) in entries.items() if expiry > now
        }

    async def _bounded(
        self, call: Awaitable[_ResultT], otherwise: _ResultT, *, limit_s: float = CALL_MAX_S
    ) -> _ResultT:
        """The result, or `otherwise` when it takes too long or the daemon is gone."""
        try:
            return await asyncio.wait_for(call, limit_s)
        except engine.FAILURES as error:
            _log.debug("the table did not answer: %s", error or type(error).__name__)
            return otherwise

    async def _watch(self, on_dead: Callable[[str], None] | None) -> None:
        reason = await engine.watch_daemon(self._p2p, self._calls)
        _log.error("%s: this peer cannot reach anybody any more", reason)
        if on_dead is not None:
            on_dead(reason)

    # ---- joining ---------------------------------------------------------------------------------

    async def _join(self, initial: tuple[Maddr, ...]) -> None:
        if not initial:
            return
        deadline = time.monotonic() + JOIN_S
        while not (pongs := await self._ping_all(initial)):
            if time.monotonic() > deadline:
                raise CannotReachSwarm(await _describe_all(initial))
            await asyncio.sleep(_JOIN_RETRY_S)
        self._initial_peers = initial
        self._check_clock(pongs)
        if not any(pong.can_call_back for pong in pongs):
            _log.warning("bootstrap peers cannot call this peer back: a firewall or NAT is in the way")
        await self._bounded(engine.find_neighbours(self._node), None)

    async def _ping_all(self, maddrs: Sequence[Maddr]) -> list[Pong]:
        peers = sorted({maddr.peer for maddr in maddrs if maddr.peer is not None})
        pongs = await asyncio.gather(*(engine.ping(self._node, peer) for peer in peers))
        return [pong for pong in pongs if pong is not None]

    def _check_clock(self, pongs: Sequence[Pong]) -> None:
        """One clock that agrees with ours will do: a bootstrap peer with a wrong clock keeps nobody out."""
        self.clock_offset_s = statistics.median(pong.offset_s for pong in pongs)
        nearest = min(pongs, key=lambda pong: abs(pong.offset_s))
        if abs(nearest.offset_s) > CLOCK_OFFSET_MAX_S + nearest.spread_s:
            relation = "behind" if nearest.offset_s > 0 else "ahead of"
            raise ConfigError(
                f"this machine's clock is {abs(nearest.offset_s):.1f} s {relation} that of each of the {len(pongs)} "
                f"bootstrap peer(s) that answered; {CLOCK_OFFSET_MAX_S:g} s are the most that can be borne. "
                "Set the clock (on Linux: timedatectl set-ntp true) and start again"
            )

    async def _stay_joined(self) -> None:
        """Look around now and then: heals a swarm that fell in two, and a peer whose network was away."""
        while True:
            alone = self._initial_peers and not engine.num_neighbours(self._node)
            await asyncio.sleep(_REJOIN_ALONE_S if alone else REJOIN_S)
            pongs = await self._ping_all(self._initial_peers)
            if pongs:
                self.clock_offset_s = statistics.median(pong.offset_s for pong in pongs)
            await self._bounded(engine.find_neighbours(self._node), None)


async def _start_daemon(
    identity: Identity, initial: tuple[Maddr, ...], *, timeout_s: float, **settings: Any
) -> tuple[Any, LateCalls]:
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            return await engine.start_daemon(identity.path, timeout_s=timeout_s, **settings)
        except engine.NoBootstrapAnswered:
            if time.monotonic() > deadline:
                raise CannotReachSwarm(await _describe_all(initial)) from None
        await asyncio.sleep(_JOIN_RETRY_S)


async def _describe_all(maddrs: Sequence[Maddr]) -> str:
    met = await asyncio.gather(*map(describe_dial, maddrs))
    lines = [f"\n  {maddr.text}: {what}" for maddr, what in zip(maddrs, met, strict=True)]
    return "no bootstrap peer could be reached:" + "".join(lines)
