# pyright: basic, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
"""The places where we reach into hivemind: its validator hook, its store, its daemon. Only `dht.node` uses
this.

hivemind has no types, hence "basic". Each class here exists for a trap that was met:
- RecordGate: hivemind's default is to let every record in.
- BoundedStorage: its store has no bound on keys or entries.
- LateCalls: a reply that meets its own cancellation kills the one task that reads all unary traffic, after
  which every call hangs in silence; so does every call after the daemon died.
- watch_daemon: nobody tells us that the daemon or one of those tasks is gone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import dht_pb2

from dht.directory import PLAIN
from dht.packing import unpack
from dht.validators import check_entry, open_envelope
from protocols.errors import GossamerError, RemoteProtocolError
from protocols.swarm import PeerId

KEYS_MAX = 1024  # a run has 16 shards, its spec and at most one claim key a stage
ENTRIES_PER_KEY_MAX = 512  # a shard of 512 records stays far below the 4 MiB at which a key turns unreadable
RPC_TIMEOUT_S = 1.5  # hivemind's 3 s makes each frozen peer cost seconds
PING_TIMEOUT_S = 5.0  # at a join many processes may start at once
BLACKLIST_S = 30.0
_SWEEP_S = 5.0
_DAEMON_EXIT_S = 3.0
_EXIT_IS_SEEN_S = 0.5  # the loop may hear of the closed connection before it hears of the exit

FAILURES = (asyncio.TimeoutError, OSError, EOFError, P2PDaemonError)
"""What a call may end in when the daemon or the other side is gone."""


class RecordGate(RecordValidatorBase):
    """`dht.validators` as hivemind's hook. Entries come here sealed, so there is nothing left to sign or
    strip."""

    def __init__(self, run_ids: Collection[str] | None) -> None:
        self._run_ids = run_ids

    def validate(self, record: DHTRecord) -> bool:
        return self.refusal(record) is None

    def refusal(self, record: DHTRecord) -> str | None:
        """Why not; None: welcome."""
        try:
            subkey, blob = unpack(record.subkey), unpack(record.value)
            if not isinstance(blob, bytes) or not (subkey is None or (isinstance(subkey, str) and subkey)):
                raise RemoteProtocolError("record-envelope")
            envelope = open_envelope(blob)
            if DHTID.generate(envelope.key).to_bytes() != record.key:
                raise RemoteProtocolError("record-key", "sealed for another key")
            check_entry(
                envelope,
                PLAIN if subkey is None else subkey,
                record.expiration_time,
                now_unix_s=time.time(),
                run_ids=self._run_ids,
            )
        except RemoteProtocolError as error:
            return error.reason
        return None


class BoundedStorage(DHTLocalStorage):
    """Refuses what would make it grow without end; those already in stay."""

    def __init__(self) -> None:
        super().__init__(maxsize=KEYS_MAX)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        held = self.get(key)
        entries: Any = held.value if held is not None else b""
        full = isinstance(entries, DictionaryDHTValue) and len(entries) >= ENTRIES_PER_KEY_MAX
        if full and subkey not in entries:
            return False
        return super().store_subkey(key, subkey, value, expiration_time)


class _LateFuture(asyncio.Future):
    """Takes a result that comes too late without complaint."""

    def set_result(self, result: Any) -> None:
        if not self.done():
            super().set_result(result)

    def set_exception(self, exception: Any) -> None:
        if not self.done():
            super().set_exception(exception)


class LateCalls(dict[Any, "asyncio.Future[Any]"]):
    """The library's table of open unary calls, with futures that survive the race; closed, each new call
    fails."""

    def __init__(self) -> None:
        super().__init__()
        self.closed_because: str | None = None

    def __setitem__(self, call_id: Any, future: asyncio.Future) -> None:
        late = _LateFuture()
        if self.closed_because is not None:
            late.set_exception(ConnectionError(self.closed_because))
        super().__setitem__(call_id, late)

    def close(self, reason: str) -> None:
        self.closed_because = reason
        for future in list(self.values()):
            future.set_exception(ConnectionError(reason))


class NoBootstrapAnswered(GossamerError):
    """The daemon ends itself when it cannot connect to any of its bootstrap addresses."""


async def start_daemon(identity_path: Path, *, timeout_s: float, **settings: Any) -> tuple[P2P, LateCalls]:
    """The libp2p daemon of this process, its table of calls mended before the first call."""
    # The Go scheduler's idle threads spin; with one, a 256 KiB hop costs half the CPU. A person may say otherwise.
    os.environ.setdefault("GOMAXPROCS", "1")
    try:
        p2p = await P2P.create(
            identity_path=str(identity_path),
            check_if_identity_free=False,  # costs a second daemon, and cannot read Ed25519 files
            nat_port_map=False,
            startup_timeout=timeout_s,
            **settings,
        )
    except P2PDaemonError as error:
        if "failed to connect to bootstrap peers" in str(error):
            raise NoBootstrapAnswered from None
        raise GossamerError(f"the libp2p daemon did not start: {error}") from None
    calls = p2p._client.control._pending_calls = LateCalls()
    return p2p, calls


async def watch_daemon(p2p: P2P, calls: LateCalls) -> str:
    """Returns why the daemon is of no use any more; by then all open calls have failed, and so will new ones."""
    control = p2p._client.control
    exit_task = asyncio.ensure_future(p2p._child.wait())
    causes = {
        exit_task: "the libp2p daemon exited",
        control._read_task: "the task that reads from the libp2p daemon ended",
        control._write_task: "the task that writes to the libp2p daemon ended",
    }
    try:
        while not (await asyncio.wait(causes, timeout=_SWEEP_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            _drop_finished_handlers(control)
        await asyncio.wait([exit_task], timeout=_EXIT_IS_SEEN_S)  # the cause of the others, if it is one
    finally:
        exit_task.cancel()
    reason = next(text for task, text in causes.items() if task.done() and not task.cancelled())
    calls.close(reason)
    return reason


def _drop_finished_handlers(control: Any) -> None:
    """The library forgets to when the caller gave up: a leak of one task for each remote timeout."""
    for call_id, task in list(control._handler_tasks.items()):
        if task.done():
            control._handler_tasks.pop(call_id, None)


async def shut_down_daemon(p2p: P2P) -> None:
    """No process is left when this returns, not even a stopped or hanging one."""
    try:
        await asyncio.wait_for(p2p.shutdown(), _DAEMON_EXIT_S)
    except asyncio.TimeoutError:
        p2p._child.kill()
        await p2p._child.wait()
    control = p2p._client.control
    await asyncio.gather(control._read_task, control._write_task, return_exceptions=True)


async def create_dht_node(p2p: P2P, gate: RecordGate) -> DHTNode:
    """A table of one; `ping` makes it part of the others' table.

    Its place in the table follows from the peer id: after a restart the others need not tell two places
    apart.
    """
    node = await DHTNode.create(
        p2p=p2p,
        node_id=DHTID.generate(p2p.peer_id.to_base58()),
        record_validator=gate,
        wait_timeout=RPC_TIMEOUT_S,
        blacklist_time=BLACKLIST_S,
        backoff_rate=1.0,  # a peer that was busy four times is not away for eight minutes
        cache_size=KEYS_MAX,
    )
    node.protocol.storage = BoundedStorage()
    return node


async def shut_down_dht_node(node: DHTNode) -> None:
    if node.cache_refresh_task is not None:
        node.cache_refresh_task.cancel()
    await node.shutdown()


Entries = dict[str, tuple[bytes, float]]
"""Sealed entry and expiry (unix seconds) by subkey; PLAIN for the entry without one."""


@dataclass(frozen=True, slots=True)
class Pong:
    """`offset_s`: how far the other clock is ahead of ours; `spread_s`: how uncertain that is."""

    offset_s: float
    spread_s: float
    can_call_back: bool


async def ping(node: DHTNode, peer: PeerId) -> Pong | None:
    """Call a peer; when it answers, each is in the other's routing table. None: it did not answer."""
    peer_id = PeerID.from_base58(peer)
    request = dht_pb2.PingRequest(peer=node.protocol.node_info, validate=True)
    sent_unix_s = time.time()
    try:
        pong = await node.protocol.get_stub(peer_id).rpc_ping(request, timeout=PING_TIMEOUT_S)
        other = DHTID.from_bytes(pong.peer.node_id)
    except Exception:  # the library raises whatever broke below it, and only "no answer" matters here
        return None
    spread_s = (time.time() - sent_unix_s) / 2
    await node.protocol.update_routing_table(other, peer_id, responded=True)
    return Pong(pong.dht_time - sent_unix_s - spread_s, spread_s, bool(pong.available))


async def find_neighbours(node: DHTNode) -> None:
    """Fill the routing table from those one already knows."""
    await node.find_nearest_nodes([node.node_id])


class LargeSwarm:
    """The table by hivemind's own walk, for a swarm of which we know a part."""

    def __init__(self, node: DHTNode) -> None:
        self._node = node

    async def store(self, key: str, subkey: str | None, sealed: bytes, expiry_unix_s: float) -> bool:
        return bool(await self._node.store(key, sealed, expiry_unix_s, subkey=subkey))

    async def read(self, keys: Iterable[str]) -> dict[str, Entries]:
        """The newest entries of all replicas."""
        found: dict[str, Entries] = {}
        answers = await self._node.get_many(list(keys), sufficient_expiration_time=float("inf"))
        for key, answer in answers.items():
            if answer is not None:
                entries = answer.value if isinstance(answer.value, dict) else {PLAIN: answer}
                found[key] = {name: (entry.value, entry.expiration_time) for name, entry in entries.items()}
        return found


async def visible_maddrs(p2p: P2P) -> list[str]:
    """The daemon's own addresses as of now, each with the peer id at its end."""
    return [str(maddr) for maddr in await p2p.get_visible_maddrs(latest=True)]


def num_neighbours(node: DHTNode) -> int:
    """Entries of the routing table."""
    return len(node.protocol.routing_table.uid_to_peer_id)
