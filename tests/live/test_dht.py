"""The table on real libp2p daemons, on loopback: a few peers in one process and one event loop."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

import dht.node
from dht.directory import PLAIN, DirectoryUnavailable
from dht.discovery import Discovery, fetch_run_spec
from dht.heartbeat import Heartbeat
from dht.identity import Identity
from dht.node import CannotReachSwarm, DhtNode
from dht.records import PeerRecord, encode_peer, roster_key, roster_keys, shard_of, spec_key
from dht.validators import seal
from protocols.errors import ConfigError
from protocols.run_spec import preset
from protocols.swarm import PeerInfo, PeerState

# hivemind 1.1.12 finds its daemon by importlib.resources.path
pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")

ANY_PORT = "/ip4/127.0.0.1/tcp/0"
SPEC = preset("pico")


class Swarm:
    """Starts peers that know the first one, and ends them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.nodes: list[DhtNode] = []
        self.bootstrap: tuple[str, ...] = ()

    async def start(self, name=None, *, host=ANY_PORT, initial_peers=None, **settings):
        identity = Identity.load_or_create(self._folder / (name or f"peer{len(self.nodes)}"))
        peers = self.bootstrap if initial_peers is None else initial_peers
        node = await DhtNode.start(identity, host_maddrs=[host], initial_peers=peers, **settings)
        self.nodes.append(node)
        self.bootstrap = self.bootstrap or await node.visible_maddrs()
        return node

    def heartbeat(self, node, stage=1):
        heartbeat = Heartbeat(node, node.peer_id, SPEC, random.Random(node.peer_id))
        info = PeerInfo(
            peer=node.peer_id, stage=stage, state=PeerState.SERVING, started_unix_s=node.now_unix_s()
        )
        heartbeat.announce(PeerRecord(info=info))
        return heartbeat


@asynccontextmanager
async def a_swarm(folder, size=0):
    swarm = Swarm(folder)
    try:
        for _ in range(size):
            await swarm.start()
        yield swarm
    finally:
        for node in reversed(swarm.nodes):
            await node.close()
        assert daemons() == []


def daemons():
    """Our libp2p daemons that still run."""
    living = [c for c in psutil.Process().children(recursive=True) if c.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if child.name() == "p2pd"]


async def eventually(condition, within_s=20.0):
    """Wait until it holds; the test's own time limit is the real one."""
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.05)


def closed_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_peers_see_each_other_and_a_withdrawal_at_the_next_poll(tmp_path):
    """Four peers announce themselves; each sees all four, then one leaves and all see three."""

    async def story():
        async with a_swarm(tmp_path, 4) as swarm:
            heartbeats = [swarm.heartbeat(node, stage % 3) for stage, node in enumerate(swarm.nodes)]
            tasks = [asyncio.create_task(heartbeat.run()) for heartbeat in heartbeats]
            eyes = [Discovery(node, SPEC, node.peer_id, random.Random(1)) for node in swarm.nodes]

            async def all_seen():
                return all([len((await eye.poll()).peers) == 4 for eye in eyes])

            await eventually(all_seen)
            assert await heartbeats[2].withdraw()
            for eye in eyes:
                assert swarm.nodes[2].peer_id not in await eye.poll()
            assert await fetch_run_spec(swarm.nodes[3], SPEC.run_id) == SPEC
            assert [heartbeat.num_store_failures for heartbeat in heartbeats] == [0, 0, 0, 0]
            assert sum((eye.refusals for eye in eyes), eyes[0].refusals).total() == 0
            for task in tasks:
                task.cancel()

    asyncio.run(story())


def test_identity_gives_the_same_peer_id_in_the_daemon_and_after_a_restart(tmp_path):
    async def story():
        async with a_swarm(tmp_path) as swarm:
            first = await swarm.start("same")
            assert first.p2p.peer_id.to_base58() == first.peer_id
            assert all(maddr.endswith(f"/p2p/{first.peer_id}") for maddr in await first.visible_maddrs())
            await swarm.nodes.pop().close()
            assert (await swarm.start("same", initial_peers=())).peer_id == first.peer_id

    asyncio.run(story())


async def an_attacker(swarm):
    """A participant of the table without any manners."""
    p2p = await P2P.create(
        initial_peers=swarm.bootstrap, host_maddrs=[ANY_PORT], nat_port_map=False, auto_nat=False
    )
    return p2p, await DHTNode.create(p2p=p2p, initial_peers=swarm.bootstrap)


def test_hostile_entries_are_refused_when_stored_and_when_read(tmp_path):
    """The attacker keeps its forgeries at home as well, where readers ask it as one of the replicas."""

    async def story():
        async with a_swarm(tmp_path, 3) as swarm:
            victim, reader, _ = swarm.nodes
            assert await swarm.heartbeat(victim)._store(swarm.heartbeat(victim)._record)
            mallory = Identity.load_or_create(tmp_path / "mallory")
            p2p, table = await an_attacker(swarm)
            for key, subkey, value, expiry in forgeries(victim, mallory):
                assert not await table.store(key, value, expiry, subkey=subkey, exclude_self=True), key
                await table.store(key, value, expiry, subkey=subkey)
            keys = [*roster_keys(SPEC.run_id), spec_key(SPEC.run_id), f"{SPEC.run_id}/other"]
            for _ in range(4):  # each read asks other replicas
                found = await reader.get_many(keys)
                assert [list(entries) for entries in found.values()] == [[victim.peer_id]]
            found = await dht.engine.LargeSwarm(reader._node).read(keys)
            assert {name for entries in found.values() for name in entries} <= {victim.peer_id}
            await table.shutdown()
            await p2p.shutdown()

    asyncio.run(story())


def forgeries(victim, mallory):
    """(key, subkey, value, expiry): what may not be in the table."""
    now = victim.now_unix_s()
    own_key, others_key = (roster_key(SPEC.run_id, peer) for peer in (mallory.peer_id, victim.peer_id))
    record = encode_peer(PeerRecord(info=PeerInfo(peer=mallory.peer_id, stage=1, state=PeerState.SERVING)))
    wrong_shard = roster_keys(SPEC.run_id)[(shard_of(mallory.peer_id) + 1) % 16]

    def signed(key, subkey, value, expiry):
        return (key, subkey, seal(key, subkey or PLAIN, value, expiry, mallory.sign), expiry)

    yield signed(others_key, victim.peer_id, record, now + 30)  # in another's name
    yield signed(own_key, mallory.peer_id, bytes(1025), now + 30)  # too large
    yield signed(own_key, mallory.peer_id, record, now + 4000)  # to stay for an hour
    yield signed(wrong_shard, mallory.peer_id, record, now + 30)
    yield signed(f"{SPEC.run_id}/other", mallory.peer_id, record, now + 30)  # a key that nobody knows
    yield signed(others_key, None, record, now + 30)  # plain: would replace the shard
    yield signed(spec_key(SPEC.run_id), None, b'{"name":"pico"}', now + 30)  # another agreement
    yield (own_key, mallory.peer_id, record, now + 30)  # not sealed at all
    yield (own_key, mallory.peer_id, {"a": 1}, now + 30)


def test_dead_bootstrap_address_beside_a_live_one_does_no_harm(tmp_path):
    async def story():
        async with a_swarm(tmp_path, 1) as swarm:
            stranger = Identity.load_or_create(tmp_path / "stranger").peer_id
            dead = f"/ip4/127.0.0.1/tcp/{closed_port()}/p2p/{stranger}"
            node = await swarm.start(initial_peers=[dead, *swarm.bootstrap])
            assert await swarm.heartbeat(node)._store(swarm.heartbeat(node)._record)
            assert await swarm.nodes[0].get_many(roster_keys(SPEC.run_id))

    asyncio.run(story())


def test_only_dead_bootstrap_addresses_are_each_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(dht.node, "JOIN_S", 0.5)

    async def story():
        async with a_swarm(tmp_path) as swarm:
            stranger = Identity.load_or_create(tmp_path / "stranger").peer_id
            with socket.socket() as other_service:
                other_service.bind(("127.0.0.1", 0))
                other_service.listen()
                foreign = f"/ip4/127.0.0.1/tcp/{other_service.getsockname()[1]}/p2p/{stranger}"
                dead = f"/ip4/127.0.0.1/tcp/{closed_port()}/p2p/{stranger}"
                with pytest.raises(CannotReachSwarm) as caught:
                    await swarm.start(initial_peers=[dead, foreign])
            assert f"{dead}: connection refused" in str(caught.value)
            assert f"{foreign}: something listens there, but" in str(caught.value)

    asyncio.run(story())


def test_address_with_anothers_peer_id_is_explained(tmp_path, monkeypatch):
    """The bootstrap peer lost its identity file, or somebody copied the wrong line."""
    monkeypatch.setattr(dht.node, "JOIN_S", 0.5)

    async def story():
        async with a_swarm(tmp_path, 1) as swarm:
            stranger = Identity.load_or_create(tmp_path / "stranger").peer_id
            wrong = swarm.bootstrap[0].replace(swarm.nodes[0].peer_id, stranger)
            with pytest.raises(CannotReachSwarm, match=f"does not answer as peer {stranger}"):
                await swarm.start(initial_peers=[wrong])

    asyncio.run(story())


def test_busy_port_is_told_before_anything_starts(tmp_path):
    async def story():
        async with a_swarm(tmp_path, 1) as swarm:
            port = swarm.bootstrap[0].split("/")[4]
            with pytest.raises(ConfigError, match=f"port {port} is in use"):
                await swarm.start(host=f"/ip4/127.0.0.1/tcp/{port}")
            assert len(daemons()) == 1

    asyncio.run(story())


def test_wrong_clock_is_told_with_its_offset(tmp_path, monkeypatch):
    """hivemind's own words are "local time must be within 3 seconds of others"."""
    real_ping = DHTProtocol.rpc_ping

    async def ping_from_the_future(self, request, context):
        pong = await real_ping(self, request, context)
        pong.dht_time += 31
        return pong

    ping_from_the_future.__annotations__ = real_ping.__annotations__

    async def story():
        async with a_swarm(tmp_path, 1) as swarm:
            with pytest.raises(
                ConfigError, match=r"clock is (30|31)\.\d s behind .*timedatectl set-ntp true"
            ):
                await swarm.start()

    monkeypatch.setattr(DHTProtocol, "rpc_ping", ping_from_the_future)
    asyncio.run(story())


def test_bootstrap_peer_that_comes_back_is_found_again(tmp_path, monkeypatch):
    """It restarts with its identity at its port; the peer that had lost everybody calls it on its own."""
    monkeypatch.setattr(dht.node, "_REJOIN_ALONE_S", 0.2)
    monkeypatch.setattr(dht.node, "REJOIN_S", 0.2)

    async def story():
        async with a_swarm(tmp_path) as swarm:
            port = closed_port()
            first = await swarm.start("bootstrap", host=f"/ip4/127.0.0.1/tcp/{port}")
            lonely = await swarm.start()
            await first.close()
            swarm.nodes.remove(first)

            async def lost():
                with suppress(DirectoryUnavailable):
                    await lonely.get_many(roster_keys(SPEC.run_id))
                return not dht.engine.num_neighbours(lonely._node)

            await eventually(lost)
            again = await swarm.start("bootstrap", host=f"/ip4/127.0.0.1/tcp/{port}", initial_peers=())

            async def seen():
                heartbeat = swarm.heartbeat(lonely)
                await heartbeat._store(heartbeat._record)
                return bool(await again.get_many(roster_keys(SPEC.run_id)))

            await eventually(seen)

    asyncio.run(story())


def test_dead_daemon_is_noticed_and_no_call_hangs(tmp_path):
    """The library waits for ever for the answers of a daemon that was killed."""

    async def story():
        async with a_swarm(tmp_path, 1) as swarm:
            told: asyncio.Queue[str] = asyncio.Queue()
            node = await swarm.start(on_dead=told.put_nowait)
            node.p2p._child.kill()
            assert "daemon exited" in await asyncio.wait_for(told.get(), 5)
            with pytest.raises(DirectoryUnavailable):
                await asyncio.wait_for(node.get_many(roster_keys(SPEC.run_id)), 5)
            heartbeat = swarm.heartbeat(node)
            assert not await asyncio.wait_for(heartbeat._store(heartbeat._record), 5)
            assert await asyncio.wait_for(node.visible_maddrs(), 5) == ()

    asyncio.run(story())


def test_frozen_peer_costs_neither_the_view_nor_the_stores(tmp_path):
    """Its machine swaps, or its cable is out: no signal comes from it, only silence. Then it is back."""

    async def story():
        async with a_swarm(tmp_path, 3) as swarm:
            first, frozen, reader = swarm.nodes
            heartbeats = [swarm.heartbeat(node) for node in swarm.nodes]
            for heartbeat in heartbeats:
                assert await heartbeat._store(heartbeat._record)
            eye = Discovery(reader, SPEC, reader.peer_id, random.Random(1))
            psutil.Process(frozen.p2p._child.pid).suspend()
            for _ in range(3):
                assert await heartbeats[0]._store(heartbeats[0]._record)
                assert first.peer_id in await eye.poll()
            psutil.Process(frozen.p2p._child.pid).resume()

            async def back():
                await heartbeats[1]._store(heartbeats[1]._record)
                found = await reader.get_many([roster_key(SPEC.run_id, frozen.peer_id)])
                return any(frozen.peer_id in entries for entries in found.values())

            await eventually(back)

    asyncio.run(story())


def test_reply_in_the_same_turn_as_its_cancellation_leaves_the_reader_alive(tmp_path):
    """The loop was blocked (a collection, a busy machine) while the reply came and the caller's time ran out.

    The call is to a handler that the other side does not have, so its daemon answers by itself meanwhile.
    """

    async def story():
        async with a_swarm(tmp_path, 2) as swarm:
            node, other = swarm.nodes
            control, loop = node.p2p._client.control, asyncio.get_running_loop()
            for _ in range(8):
                call = asyncio.ensure_future(control.call_unary_handler(other.p2p.peer_id, "nobody", b""))
                cancel_as_the_reply_is_read(loop, call)
                with suppress(asyncio.CancelledError, P2PDaemonError):  # the latter when the reply was faster
                    await call
            assert not control._read_task.done()
            assert await dht.engine.ping(node._node, other.peer_id) is not None

    asyncio.run(story())


def cancel_as_the_reply_is_read(loop, call):
    """Let the request go out, block until the reply must be there, cancel in the turn that reads it."""

    def after(turns):
        if turns:
            loop.call_soon(after, turns - 1)
        else:
            loop.call_later(0.1, call.cancel)
            time.sleep(0.2)

    loop.call_soon(after, 2)


def test_killed_process_leaves_no_daemon_behind(tmp_path):
    """kill -9: nothing of ours runs to clean up, so the daemon must go by itself."""
    program = (
        "import asyncio, sys, pathlib\n"
        "from dht.identity import Identity\n"
        "from dht.node import DhtNode\n"
        "async def main():\n"
        "    identity = Identity.load_or_create(pathlib.Path(sys.argv[1]))\n"
        f"    await DhtNode.start(identity, host_maddrs=[{ANY_PORT!r}])\n"
        "    print('up', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "identity")],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
    ) as peer:
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"up\n"
        descendants = psutil.Process(peer.pid).children(recursive=True)
        assert descendants
        peer.kill()
        peer.wait()
    _, alive = psutil.wait_procs(descendants, timeout=2)
    assert alive == []
