"""What we bend in hivemind, without a network; with one: tests/live/test_dht.py."""

from __future__ import annotations

import asyncio
import time

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer

from dht.directory import PLAIN
from dht.engine import ENTRIES_PER_KEY_MAX, KEYS_MAX, BoundedStorage, LateCalls, RecordGate
from dht.records import RunRecord, encode_peer, encode_run, roster_key, spec_key
from dht.validators import seal


def in_table(key, subkey, sealed, expiry):
    """As hivemind shows an entry to its validator: hashed key, serialized rest."""
    dumps = MSGPackSerializer.dumps
    return DHTRecord(DHTID.generate(key).to_bytes(), dumps(subkey), dumps(sealed), expiry)


@pytest.fixture
def own(alice, spec, a_record):
    key, expiry = roster_key(spec.run_id, alice.peer_id), time.time() + 20
    return key, expiry, seal(key, alice.peer_id, encode_peer(a_record(alice.peer_id)), expiry, alice.sign)


def test_gate_lets_a_signed_record_in_unchanged(alice, own):
    key, expiry, sealed = own
    gate, record = RecordGate(None), in_table(key, alice.peer_id, sealed, expiry)
    assert gate.validate(record)
    assert gate.strip_value(record) == record.value == gate.sign_value(record)


def test_gate_refuses_what_is_sealed_for_another_key(alice, own):
    """The table knows hashes only: the key in the envelope must be the one that hashes to it."""
    key, expiry, sealed = own
    elsewhere = in_table("attack", alice.peer_id, sealed, expiry)
    assert RecordGate(None).refusal(elsewhere) == "record-key"
    assert RecordGate(None).refusal(in_table(key, alice.peer_id, sealed, expiry)) is None


def test_gate_refuses_runs_that_it_does_not_serve(alice, own, spec):
    key, expiry, sealed = own
    record = in_table(key, alice.peer_id, sealed, expiry)
    assert RecordGate([spec.run_id]).refusal(record) is None
    assert RecordGate(["other-0123456789abcdef"]).refusal(record) == "record-key"


def test_gate_takes_the_spec_as_the_only_plain_entry(alice, own, spec):
    expiry = time.time() + 20
    sealed = seal(spec_key(spec.run_id), PLAIN, encode_run(RunRecord(spec)), expiry, alice.sign)
    assert RecordGate(None).validate(in_table(spec_key(spec.run_id), None, sealed, expiry))
    assert not RecordGate(None).validate(in_table(own[0], None, own[2], own[1]))


@pytest.mark.parametrize(
    ("subkey", "value"),
    [
        (b"\xc1", b"\xc1"),
        (b"", b""),
        (MSGPackSerializer.dumps(""), MSGPackSerializer.dumps(b"x")),
        (MSGPackSerializer.dumps(7), MSGPackSerializer.dumps(b"x")),
        (MSGPackSerializer.dumps(["a"]), MSGPackSerializer.dumps(b"x")),
        (MSGPackSerializer.dumps("a"), MSGPackSerializer.dumps("text")),
        (MSGPackSerializer.dumps("a"), MSGPackSerializer.dumps((1, 2))),
        (MSGPackSerializer.dumps("a"), b"\x91" * 100_000),
        (MSGPackSerializer.dumps("a"), b"\xdf\xff\xff\xff\xff"),
    ],
)
def test_gate_answers_no_to_nonsense_and_never_raises(subkey, value):
    """hivemind calls it inside its own handlers; an exception there would cost an honest caller its answer."""
    record = DHTRecord(DHTID.generate("k").to_bytes(), subkey, value, time.time() + 5)
    assert not RecordGate(None).validate(record)


def test_store_keeps_those_that_are_in_when_a_key_is_full():
    """Twenty thousand entries under one key make it unreadable for all: 4 MiB is the largest answer."""
    storage, key, expiry = BoundedStorage(), DHTID.generate("k"), time.time() + 60
    for n in range(ENTRIES_PER_KEY_MAX):
        assert storage.store_subkey(key, f"p{n}", b"x", expiry)
    assert not storage.store_subkey(key, "one more", b"x", expiry)
    assert storage.store_subkey(key, "p7", b"y", expiry + 1)
    held = storage.get(key)
    assert held is not None
    assert len(held.value) == ENTRIES_PER_KEY_MAX
    assert held.value.get("p7").value == b"y"


def test_store_is_bounded_in_keys():
    storage, expiry = BoundedStorage(), time.time() + 60
    for n in range(KEYS_MAX + 10):
        storage.store_subkey(DHTID.generate(f"k{n}"), "a", b"x", expiry + n)
    assert len(storage) == KEYS_MAX


def test_reply_that_meets_its_own_cancellation_is_dropped():
    """The library sets the result without asking; an InvalidStateError there kills its reader for good."""

    async def story():
        calls = LateCalls()
        calls["id"] = asyncio.Future()
        calls["id"].cancel()
        calls["id"].set_result(b"late")
        calls["id"].set_exception(RuntimeError("later still"))
        assert calls["id"].cancelled()

    asyncio.run(story())


def test_open_and_new_calls_fail_once_the_daemon_is_gone():
    """They would wait for ever for the answer of a process that no longer is."""

    async def story():
        calls = LateCalls()
        calls["open"] = asyncio.Future()
        calls["done"] = asyncio.Future()
        calls["done"].set_result(b"in time")
        calls.close("the libp2p daemon exited")
        calls["new"] = asyncio.Future()
        for name in ("open", "new"):
            with pytest.raises(ConnectionError, match="daemon exited"):
                await calls[name]
        assert await calls["done"] == b"in time"

    asyncio.run(story())
