"""Who may write what: the default is no."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.directory import PLAIN
from dht.records import (
    RECORD_BYTES_MAX,
    TTL_MAX_S,
    ClaimRecord,
    RunRecord,
    claim_key,
    encode_claim,
    encode_peer,
    encode_run,
    roster_key,
    roster_keys,
    spec_key,
)
from dht.validators import Envelope, check_entry, open_envelope, seal
from protocols.errors import RemoteProtocolError

NOW = 1_700_000_000.0
EXPIRY = NOW + 20


def reason(blob, subkey, expiry=EXPIRY, *, run_ids=None):
    """Why this entry is refused; None when it is not."""
    try:
        check_entry(open_envelope(blob), subkey, expiry, now_unix_s=NOW, run_ids=run_ids)
    except RemoteProtocolError as error:
        return error.reason
    return None


@pytest.fixture
def own(alice, spec, a_record):
    """Alice's record, sealed: (key, value, sealed)."""
    key, value = roster_key(spec.run_id, alice.peer_id), encode_peer(a_record(alice.peer_id))
    return key, value, seal(key, alice.peer_id, value, EXPIRY, alice.sign)


def test_own_record_in_its_shard_is_welcome(alice, own):
    key, value, sealed = own
    assert reason(sealed, alice.peer_id) is None
    assert open_envelope(sealed).value == value
    assert open_envelope(sealed).key == key


def test_claim_under_the_own_id_is_welcome(alice, spec):
    key = claim_key(spec.run_id, 2)
    value = encode_claim(ClaimRecord(stage=2, claimed_unix_s=NOW))
    assert reason(seal(key, alice.peer_id, value, EXPIRY, alice.sign), alice.peer_id) is None


def test_nobody_writes_under_anothers_id(alice, mallory, own):
    """Mallory says that Alice has left, signed by Mallory."""
    key, value, _ = own
    assert reason(seal(key, alice.peer_id, value, EXPIRY, mallory.sign), alice.peer_id) == "record-signature"


def test_life_of_a_record_cannot_be_prolonged(alice, own):
    """A dead peer's last record, offered again with a later expiry."""
    assert reason(own[2], alice.peer_id, EXPIRY + 1) == "record-signature"


def test_value_cannot_be_exchanged(alice, own):
    key, value, sealed = own
    envelope = open_envelope(sealed)
    other = Envelope(key, value[:-1] + b"\xc3", envelope.signature)
    with pytest.raises(RemoteProtocolError, match="record-signature"):
        check_entry(other, alice.peer_id, EXPIRY, now_unix_s=NOW)


def test_record_in_another_shard_is_refused(alice, spec, own):
    """Or one identity could fill all sixteen."""
    wrong = next(key for key in roster_keys(spec.run_id) if key != own[0])
    sealed = seal(wrong, alice.peer_id, own[1], EXPIRY, alice.sign)
    assert reason(sealed, alice.peer_id) == "record-shard"


@pytest.mark.parametrize("key", ["", "demo", "demo-0123456789abcdef/other", "demo-0123456789abcdef/peers/16"])
def test_unknown_key_is_refused(alice, key):
    assert reason(seal(key, alice.peer_id, b"x", EXPIRY, alice.sign), alice.peer_id) == "record-key"


def test_foreign_run_is_refused_where_runs_are_named(alice, spec, own):
    assert reason(own[2], alice.peer_id, run_ids=[spec.run_id]) is None
    assert reason(own[2], alice.peer_id, run_ids=["other-0123456789abcdef"]) == "record-key"


@pytest.mark.parametrize("expiry", [NOW + TTL_MAX_S + 60, 4e9, math.inf, math.nan])
def test_long_time_to_live_is_refused(alice, own, expiry):
    """hivemind itself takes thirty years, and keeps an entry whose expiry is not a number for ever."""
    sealed = seal(own[0], alice.peer_id, own[1], expiry, alice.sign)
    assert reason(sealed, alice.peer_id, expiry) == "record-ttl"


def test_lapsed_record_is_no_fault(alice, own):
    """It may lapse on its way; refusing it would make the reader drop the whole shard."""
    sealed = seal(own[0], alice.peer_id, own[1], NOW - 1, alice.sign)
    assert reason(sealed, alice.peer_id, NOW - 1) is None


def test_oversize_record_is_refused(alice, own):
    sealed = seal(own[0], alice.peer_id, bytes(RECORD_BYTES_MAX + 1), EXPIRY, alice.sign)
    assert reason(sealed, alice.peer_id) == "record-size"
    assert reason(bytes(20_000), alice.peer_id) == "record-size"


def test_plain_entry_is_refused_everywhere_but_for_the_spec(alice, own):
    """A plain value would replace the whole dictionary under its key."""
    assert reason(seal(own[0], PLAIN, own[1], EXPIRY, alice.sign), PLAIN) == "record-owner"


def test_spec_certifies_itself(spec, alice):
    key, value = spec_key(spec.run_id), encode_run(RunRecord(spec))
    assert reason(seal(key, PLAIN, value, EXPIRY, alice.sign), PLAIN) is None
    assert reason(seal(key, PLAIN, value + b" ", EXPIRY, alice.sign), PLAIN) == "spec-hash"
    assert reason(seal(key, alice.peer_id, value, EXPIRY, alice.sign), alice.peer_id) == "record-owner"


def test_subkey_that_is_no_peer_id_owns_nothing(alice, spec):
    key = claim_key(spec.run_id, 1)
    for subkey in ("x", "12D3KooW", "y" * 65):
        assert reason(seal(key, subkey, b"x", EXPIRY, alice.sign), subkey) is not None


@given(st.binary(max_size=300))
def test_any_bytes_are_an_envelope_or_a_remote_error(blob):
    with contextlib.suppress(RemoteProtocolError):
        open_envelope(blob)


@given(position=st.integers(0, 1 << 16), flip=st.integers(1, 255))
def test_any_change_to_a_sealed_entry_is_noticed(alice, spec, a_record, position, flip):
    key = roster_key(spec.run_id, alice.peer_id)
    sealed = bytearray(seal(key, alice.peer_id, encode_peer(a_record(alice.peer_id)), EXPIRY, alice.sign))
    sealed[position % len(sealed)] ^= flip
    try:
        changed = open_envelope(bytes(sealed))
        check_entry(changed, alice.peer_id, EXPIRY, now_unix_s=NOW)
    except RemoteProtocolError:
        return
    pytest.fail("a changed entry was taken")
