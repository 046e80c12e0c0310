"""From the table to a view: what is believed, for how long, and what is not."""

from __future__ import annotations

import asyncio
import random

import msgpack
import pytest

from dht.directory import PLAIN, DirectoryUnavailable
from dht.discovery import CLAIM_TTL_S, Discovery, fetch_run_spec
from dht.memory import MemoryDirectory
from dht.records import RunRecord, claim_key, encode_peer, encode_run, roster_key, spec_key
from protocols.run_spec import preset
from protocols.swarm import PeerState


class FlakyDirectory(MemoryDirectory):
    """Can be unreachable, or miss what it holds."""

    unreachable = False
    forgetful = False

    async def get_many(self, keys):
        if self.unreachable:
            raise DirectoryUnavailable("no answer")
        return {} if self.forgetful else self.get_now(keys)


@pytest.fixture
def table(clock) -> FlakyDirectory:
    return FlakyDirectory(clock)


@pytest.fixture
def discovery(table, spec) -> Discovery:
    return Discovery(table, spec, "me", random.Random(1))


@pytest.fixture
def store(table, spec, a_record, clock):
    """Store a record as its owner would, now."""

    def put(peer, **changes):
        record = a_record(peer, **{"stored_unix_s": clock.now, **changes})
        assert table.put_now(roster_key(spec.run_id, peer), peer, encode_peer(record), ttl_s=20)
        return record

    return put


def poll(discovery):
    return asyncio.run(discovery.poll())


def test_view_holds_everybody_by_id_with_the_records_for_status(discovery, store):
    later, sooner = store("c1", stage=2, tokens_trained=5), store("a1", stage=0)
    view = poll(discovery)
    assert view.peers == (sooner.info, later.info)
    assert view.replicas(2) == (later.info,)
    assert discovery.records == {"a1": sooner, "c1": later}


def test_record_lapses_a_time_to_live_after_it_was_stored(discovery, store, clock):
    store("a1")
    assert "a1" in poll(discovery)
    clock.now += 19.9
    assert "a1" in poll(discovery)
    clock.now += 0.2
    assert "a1" not in poll(discovery)


def test_poll_that_misses_a_record_does_not_make_the_peer_flicker(discovery, store, table, clock):
    """A replica of the shard answered late; the peer is as alive as before, until its record lapses."""
    store("a1")
    poll(discovery)
    table.forgetful = True
    clock.now += 10
    assert "a1" in poll(discovery)
    clock.now += 11
    assert "a1" not in poll(discovery)


def test_table_that_does_not_answer_says_nothing_about_the_peers(discovery, store, table):
    """No view at all: "stage 2 is empty, for the third poll" must not be concluded from a broken link."""
    store("a1")
    poll(discovery)
    table.unreachable = True
    assert poll(discovery) is None
    assert (discovery.num_polls, discovery.num_poll_failures) == (2, 1)
    table.unreachable = False
    assert "a1" in poll(discovery)


def test_withdrawn_peer_is_gone_at_the_next_poll(discovery, store, clock):
    store("a1", sequence=7)
    poll(discovery)
    clock.now += 1
    store("a1", sequence=8, withdrawn=True)
    assert "a1" not in poll(discovery)
    assert discovery.records == {}


def test_peer_that_left_is_not_resurrected_by_an_old_copy(discovery, store, clock):
    """Some replica missed the tombstone and still serves the record before it."""
    store("a1", sequence=8, withdrawn=True)
    poll(discovery)
    store("a1", sequence=7)
    assert "a1" not in poll(discovery)
    assert discovery.refusals["record-sequence"] == 1


def test_next_life_of_a_peer_starts_its_sequence_anew(discovery, store, clock):
    """Killed at sequence 900, back with the same identity: the later start counts, not the number."""
    store("a1", sequence=900, started_unix_s=1000.0)
    poll(discovery)
    store("a1", sequence=1, started_unix_s=2000.0, state=PeerState.JOINING)
    assert poll(discovery).get("a1").state is PeerState.JOINING


def test_record_of_a_former_life_is_ignored(discovery, store):
    store("a1", sequence=1, started_unix_s=2000.0, stage=2)
    poll(discovery)
    store("a1", sequence=900, started_unix_s=1000.0, stage=1)
    assert poll(discovery).get("a1").stage == 2


def test_clock_that_is_ahead_does_not_make_its_owner_immortal(discovery, store, clock, table):
    store("a1", stored_unix_s=clock.now + 1000)
    assert "a1" in poll(discovery)
    table.forgetful = True
    clock.now += 21
    assert "a1" not in poll(discovery)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"stage": 7}, "record-stage"), ({"maddrs": ("/x",) * 5}, "record-schema")],
)
def test_record_that_does_not_fit_the_run_is_dropped_and_counted(
    discovery, table, spec, a_record, store, changes, reason
):
    """And costs the others in its shard nothing."""
    store("a1")
    fields = msgpack.unpackb(encode_peer(a_record("bad")))
    fields[2] = changes.get("stage", fields[2])
    fields[12] = changes.get("maddrs", fields[12])
    table.put_now(roster_key(spec.run_id, "bad"), "bad", msgpack.packb(fields), ttl_s=20)
    assert [info.peer for info in poll(discovery).peers] == ["a1"]
    assert discovery.refusals == {reason: 1}


def test_other_runs_are_not_seen(discovery, table, a_record):
    table.put_now(roster_key("other-0123456789abcdef", "x1"), "x1", encode_peer(a_record("x1")), ttl_s=20)
    assert poll(discovery).peers == ()


def test_views_come_at_every_poll_changed_or_not(table):
    """A stage counts as empty only when several polls in a row say so: sameness is news."""
    fast = preset("pico", liveness={"view_poll_s": 0.001})

    async def story():
        views = Discovery(table, fast, "me", random.Random(1)).views()
        first = await views.__anext__()
        assert await views.__anext__() == first
        await views.aclose()

    asyncio.run(story())


# ---- claims -------------------------------------------------------------------------------------


def test_claims_tell_their_age_by_peer(table, spec, clock):
    first, second = (Discovery(table, spec, name, random.Random(1)) for name in ("b1", "a1"))
    assert asyncio.run(first.put_claim(1))
    clock.now += 4
    assert asyncio.run(second.put_claim(1))
    clock.now += 1
    assert asyncio.run(first.claims(1)) == (("a1", 1.0), ("b1", 5.0))
    assert asyncio.run(first.claims(2)) == ()


def test_claiming_again_makes_the_claim_neither_younger_nor_longer(discovery, clock):
    asyncio.run(discovery.put_claim(1))
    clock.now += CLAIM_TTL_S - 1
    asyncio.run(discovery.put_claim(1))
    assert asyncio.run(discovery.claims(1)) == (("me", CLAIM_TTL_S - 1),)
    clock.now += 1
    assert asyncio.run(discovery.claims(1)) == ()
    asyncio.run(discovery.put_claim(1))
    assert asyncio.run(discovery.claims(1)) == (("me", 0.0),)


def test_claim_from_the_future_is_new_and_nonsense_is_counted(discovery, table, spec, clock):
    """Two clocks may differ by seconds; a claim must not win by a negative age."""
    clock.now += 2
    asyncio.run(Discovery(table, spec, "b1", random.Random(1)).put_claim(1))
    clock.now -= 2
    table.put_now(claim_key(spec.run_id, 1), "c1", b"nonsense", ttl_s=20)
    assert asyncio.run(discovery.claims(1)) == (("b1", 0.0),)
    assert sum(discovery.refusals.values()) == 1


def test_claims_are_empty_when_the_table_does_not_answer(discovery, table):
    asyncio.run(discovery.put_claim(1))
    table.unreachable = True
    assert asyncio.run(discovery.claims(1)) == ()


# ---- run spec -----------------------------------------------------------------------------------


def test_joiner_finds_the_run_spec_by_its_id(table, spec):
    assert asyncio.run(fetch_run_spec(table, spec.run_id)) is None
    table.put_now(spec_key(spec.run_id), PLAIN, encode_run(RunRecord(spec)), ttl_s=300)
    assert asyncio.run(fetch_run_spec(table, spec.run_id)) == spec
