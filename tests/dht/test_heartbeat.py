"""The own record in the table: when it is stored, and how it goes."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from dht.directory import PLAIN
from dht.heartbeat import Heartbeat
from dht.memory import MemoryDirectory
from dht.records import parse_peer, parse_run, roster_key, spec_key
from protocols.run_spec import preset
from protocols.swarm import PeerState

HURRIED = {"heartbeat_s": 0.01, "record_ttl_s": 20.0, "ping_s": 0.01}
CALM = {"heartbeat_s": 60.0, "record_ttl_s": 300.0, "attempt_s": 300.0, "round_s": 300.0, "lease_s": 300.0}


class WatchedDirectory(MemoryDirectory):
    """Tells when the roster was written; refuses on demand, or holds a put until told."""

    def __init__(self, clock):
        super().__init__(clock)
        self.written: asyncio.Queue[bytes] = asyncio.Queue()
        self.refuse = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

    async def put(self, key, subkey, value, *, ttl_s):
        self.entered.set()
        await self.gate.wait()
        stored = not self.refuse and self.put_now(key, subkey, value, ttl_s=ttl_s)
        if "/peers/" in key:
            self.written.put_nowait(value)
        return stored

    async def next_record(self, owner="a1"):
        return parse_peer(await asyncio.wait_for(self.written.get(), 5), owner=owner)


@asynccontextmanager
async def running(heartbeat):
    task = asyncio.create_task(heartbeat.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def a_heartbeat(table, liveness):
    return Heartbeat(table, "a1", preset("pico", liveness=liveness), random.Random(1))


def test_record_is_renewed_with_a_growing_sequence(clock, a_record):
    async def story():
        table = WatchedDirectory(clock)
        heartbeat = a_heartbeat(table, HURRIED)
        heartbeat.announce(a_record("a1"))
        async with running(heartbeat):
            records = [await table.next_record() for _ in range(3)]
        assert [record.sequence for record in records] == [1, 2, 3]
        assert records[0].stored_unix_s == clock.now
        assert heartbeat.num_store_failures == 0

    asyncio.run(story())


def test_change_that_others_plan_by_is_stored_at_once(clock, a_record):
    """The heartbeat of this spec is a minute away."""

    async def story():
        table = WatchedDirectory(clock)
        heartbeat = a_heartbeat(table, CALM)
        heartbeat.announce(a_record("a1", state=PeerState.JOINING, stage=None))
        async with running(heartbeat):
            assert (await table.next_record()).info.state is PeerState.JOINING
            heartbeat.announce(a_record("a1", state=PeerState.SERVING, stage=2))
            assert (await table.next_record()).info.stage == 2

    asyncio.run(story())


def test_drifting_numbers_wait_for_the_next_heartbeat(clock, a_record):
    """A round may take a tenth of a second; a store costs some calls to others."""

    async def story():
        table = WatchedDirectory(clock)
        heartbeat = a_heartbeat(table, CALM)
        heartbeat.announce(a_record("a1", round=1))
        async with running(heartbeat):
            await table.next_record()
            for n in range(2, 50):
                heartbeat.announce(a_record("a1", round=n))
                await asyncio.sleep(0)
            heartbeat.announce(a_record("a1", round=50, outer_step=5))
            record = await table.next_record()
        assert record.info.round == 50
        assert record.sequence == 2

    asyncio.run(story())


def test_withdrawal_replaces_the_record_and_ends_the_heartbeat(clock, a_record):
    async def story():
        table = WatchedDirectory(clock)
        heartbeat = a_heartbeat(table, HURRIED)
        heartbeat.announce(a_record("a1"))
        async with running(heartbeat) as task:
            await table.next_record()
            assert await heartbeat.withdraw()
            await asyncio.wait_for(task, 5)
        key = roster_key(preset("pico", liveness=HURRIED).run_id, "a1")
        assert parse_peer(table.get_now([key])[key]["a1"], owner="a1").withdrawn

    asyncio.run(story())


def test_heartbeat_under_way_does_not_overtake_the_farewell(clock, a_record):
    """A slow store of the living record must not land after the tombstone."""

    async def story():
        table = WatchedDirectory(clock)
        heartbeat = a_heartbeat(table, HURRIED)
        table.gate.clear()
        heartbeat.announce(a_record("a1"))
        async with running(heartbeat):
            await asyncio.wait_for(table.entered.wait(), 5)
            farewell = asyncio.create_task(heartbeat.withdraw())
            await asyncio.sleep(0)
            table.gate.set()
            assert await farewell
        records = [await table.next_record() for _ in range(table.written.qsize())]
        assert [record.withdrawn for record in records] == [False, True]

    asyncio.run(story())


def test_failed_store_is_counted_and_tried_again_soon(clock, a_record):
    async def story():
        table = WatchedDirectory(clock)
        table.refuse = True
        heartbeat = a_heartbeat(table, HURRIED)
        heartbeat.announce(a_record("a1"))
        async with running(heartbeat):
            await table.next_record()
            await table.next_record()
            table.refuse = False
            await table.next_record()
            await table.next_record()
        assert heartbeat.num_store_failures >= 2
        assert heartbeat.num_stores > heartbeat.num_store_failures

    asyncio.run(story())


def test_farewell_without_an_answer_is_told(clock, a_record):
    async def story():
        table = WatchedDirectory(clock)
        table.refuse = True
        heartbeat = a_heartbeat(table, HURRIED)
        heartbeat.announce(a_record("a1"))
        assert not await heartbeat.withdraw()
        assert heartbeat.num_store_failures == 2

    asyncio.run(story())


def test_peer_that_never_announced_has_nothing_to_withdraw(clock):
    async def story():
        table = WatchedDirectory(clock)
        assert await a_heartbeat(table, HURRIED).withdraw()
        assert table.written.empty()

    asyncio.run(story())


@pytest.mark.parametrize("liveness", [HURRIED, CALM])
def test_run_spec_is_kept_in_the_table_for_joiners(clock, a_record, liveness):
    async def story():
        table = WatchedDirectory(clock)
        spec = preset("pico", liveness=liveness)
        heartbeat = a_heartbeat(table, liveness)
        heartbeat.announce(a_record("a1"))
        async with running(heartbeat):
            await table.next_record()
            heartbeat.announce(a_record("a1", stage=2))
            await table.next_record()
        value = table.get_now([spec_key(spec.run_id)])[spec_key(spec.run_id)][PLAIN]
        assert parse_run(value, run_id=spec.run_id).spec == spec

    asyncio.run(story())
