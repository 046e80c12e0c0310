"""The table in a dict behaves as the one on the network does."""

from __future__ import annotations

import asyncio

import pytest

from dht.directory import PLAIN
from dht.memory import MemoryDirectory
from dht.records import RunRecord, encode_peer, encode_run, roster_key, roster_keys, spec_key


@pytest.fixture
def table(clock) -> MemoryDirectory:
    return MemoryDirectory(clock)


def test_entry_is_found_until_it_lapses(table, clock, spec, a_record):
    key, value = roster_key(spec.run_id, "a1"), encode_peer(a_record("a1"))
    assert table.put_now(key, "a1", value, ttl_s=20)
    clock.now += 19.9
    assert table.get_now(roster_keys(spec.run_id)) == {key: {"a1": value}}
    clock.now += 0.1
    assert table.get_now(roster_keys(spec.run_id)) == {}


def test_later_put_wins_although_its_time_to_live_is_short(table, clock, spec, a_record):
    """As on the network, where an entry that expires earlier than its forerunner is refused in silence."""
    key = roster_key(spec.run_id, "a1")
    table.put_now(key, "a1", encode_peer(a_record("a1", sequence=1)), ttl_s=20)
    farewell = encode_peer(a_record("a1", sequence=2, withdrawn=True))
    assert table.put_now(key, "a1", farewell, ttl_s=0.1)
    clock.now += 19
    assert table.get_now([key]) == {key: {"a1": farewell}}


def test_put_survives_a_clock_that_goes_back(table, clock, spec, a_record):
    key = roster_key(spec.run_id, "a1")
    table.put_now(key, "a1", encode_peer(a_record("a1", sequence=1)), ttl_s=20)
    clock.now -= 10
    second = encode_peer(a_record("a1", sequence=2))
    assert table.put_now(key, "a1", second, ttl_s=20)
    assert table.get_now([key])[key]["a1"] == second


def test_same_rules_hold_as_on_the_network(table, spec, a_record):
    key, value = roster_key(spec.run_id, "a1"), encode_peer(a_record("a1"))
    assert not table.put_now("nonsense", "a1", value, ttl_s=20)
    assert not table.put_now(key, PLAIN, value, ttl_s=20)
    assert not table.put_now(key, "a1", value, ttl_s=1000)
    assert not table.put_now(key, "a1", bytes(2000), ttl_s=20)
    assert not table.put_now(spec_key(spec.run_id), PLAIN, b"{}", ttl_s=20)
    assert table.put_now(spec_key(spec.run_id), PLAIN, encode_run(RunRecord(spec)), ttl_s=300)
    assert table.refusals == {
        "record-key": 1,
        "record-owner": 1,
        "record-ttl": 1,
        "record-size": 1,
        "spec-hash": 1,
    }


def test_entries_come_sorted_so_that_a_simulation_repeats(table, spec, a_record):
    names = [name for n in range(300) if roster_key(spec.run_id, name := f"p{n}").endswith("/03")]
    for name in reversed(names):
        table.put_now(roster_key(spec.run_id, name), name, encode_peer(a_record(name)), ttl_s=20)
    (entries,) = table.get_now(roster_keys(spec.run_id)).values()
    assert list(entries) == sorted(names)


def test_asynchronous_side_is_the_same_table(table, clock, spec, a_record):
    async def story():
        key, value = roster_key(spec.run_id, "a1"), encode_peer(a_record("a1"))
        assert await table.put(key, "a1", value, ttl_s=5)
        assert await table.get_many([key]) == {key: {"a1": value}}
        assert table.now_unix_s() == clock.now
        await table.close()

    asyncio.run(story())
