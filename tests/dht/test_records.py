"""What records look like as bytes, and what is said of bytes that are none."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.identity import friendly_name
from dht.records import (
    MADDRS_MAX,
    RECORD_BYTES_MAX,
    ROSTER_SHARDS,
    ClaimRecord,
    KeyKind,
    PeerRecord,
    RecordKey,
    RunRecord,
    claim_key,
    encode_claim,
    encode_peer,
    encode_run,
    parse_claim,
    parse_key,
    parse_peer,
    parse_run,
    roster_key,
    roster_keys,
    shard_of,
    spec_key,
)
from protocols.coordinates import Coordinate
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.run_spec import PROTOCOL_VERSION, preset
from protocols.swarm import PeerInfo, PeerState

RUN = "demo-0123456789abcdef"
PEER = "12D3KooWAWuzJhrhKyMJCwc464MSn7J9yaBBuM1p9vH4jRZaf9Re"

_counts = st.integers(0, 1 << 53)
_seconds = st.floats(0, 1e6)
_maddrs = st.from_regex(r"\A/[!-~]{1,127}\Z")
peer_infos = st.builds(
    PeerInfo,
    peer=st.text("abcdefgh123456789", min_size=1, max_size=60),
    stage=st.none() | st.integers(0, 255),
    state=st.sampled_from(PeerState),
    round=_counts,
    outer_step=_counts,
    slots=st.integers(0, 1000),
    forward_s=_seconds,
    backward_s=_seconds,
    upload_bytes_per_s=st.floats(0, 1e15),
    download_bytes_per_s=st.floats(0, 1e15),
    coordinate=st.none()
    | st.builds(Coordinate, st.floats(-60, 60), st.floats(-60, 60), st.floats(1e-5, 60), st.floats(0, 1)),
    grad_norm=st.floats(0, 1e12),
    started_unix_s=st.floats(0, 1e11),
    fresh=st.booleans(),
)
peer_records = st.builds(
    PeerRecord,
    info=peer_infos,
    software_version=st.from_regex(r"\A[0-9A-Za-z.+_-]{1,32}\Z"),
    protocol_version=st.just(PROTOCOL_VERSION),
    maddrs=st.lists(_maddrs, max_size=MADDRS_MAX).map(tuple),
    tokens_trained=_counts,
    loss=st.none() | st.floats(-1e6, 1e6),
    tokens_per_s=st.floats(0, 1e15),
    sequence=_counts,
    stored_unix_s=st.floats(0, 1e11),
    withdrawn=st.booleans(),
)


@given(peer_records)
def test_peer_record_comes_back_as_it_was_and_stays_small(record):
    """The largest record there can be is a good deal below the cap that the table enforces."""
    data = encode_peer(record)
    assert len(data) <= RECORD_BYTES_MAX
    assert parse_peer(data, owner=record.peer) == record


def test_every_field_of_a_peer_travels(a_record):
    """A field added to PeerInfo but forgotten here would silently read as its default on other machines."""
    fields = len(dataclasses.fields(PeerInfo)) + len(dataclasses.fields(PeerRecord)) - 1
    assert len(msgpack.unpackb(encode_peer(a_record(PEER)))) == fields


def test_friendly_name_is_derived_so_that_nobody_can_take_anothers(a_record):
    assert a_record(PEER).friendly_name == friendly_name(PEER)


def test_record_of_somebody_else_is_refused(a_record):
    with pytest.raises(RemoteProtocolError) as caught:
        parse_peer(encode_peer(a_record(PEER)), owner="12D3KooWother")
    assert caught.value.reason == "record-owner"


def test_record_of_another_protocol_version_is_told_apart_from_garbage(a_record):
    """The newer one may have more fields: the version is looked at first."""
    fields = msgpack.unpackb(encode_peer(a_record(PEER)))
    newer = msgpack.packb([PROTOCOL_VERSION + 1, *fields[1:], "a field of the future"])
    with pytest.raises(RemoteProtocolError) as caught:
        parse_peer(newer, owner=PEER)
    assert caught.value.reason == "record-version"


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, True),  # equals 1, is no version
        (0, 1.0),
        (1, 7),
        (2, 256),
        (2, -1),
        (2, "1"),
        (3, "dead"),
        (4, True),
        (4, 1 << 60),
        (7, math.nan),
        (8, math.inf),
        (8, -1.0),
        (9, -1.0),
        (10, math.inf),
        (12, (1.0, 2.0)),
        (12, (0.0, 0.0, 1e-3, 2.0)),  # an error of 200 %
        (12, (0.0, 1e9, 1e-3, 0.5)),  # behind the moon
        (13, ((-1, 0.1),)),
        (13, ((1, math.inf),)),
        (13, ((1, 0.1),) * 17),
        (15, 1),
        (16, "1.0\x1b[2J"),  # would clear the screen of whoever lists the peers
        (17, ["/ip4/127.0.0.1/tcp/1"] * 5),
        (17, ["/" + "x" * 128]),
        (17, ["/ip4/1.2.3.4\n"]),
        (19, "low"),
        (23, 0),
    ],
)
def test_field_of_a_wrong_type_or_range_is_refused(a_record, position, value):
    fields = msgpack.unpackb(encode_peer(a_record(PEER)))
    fields[position] = value
    with pytest.raises(RemoteProtocolError) as caught:
        parse_peer(msgpack.packb(fields), owner=PEER)
    assert caught.value.reason in {"record-schema", "record-version"}


@pytest.mark.parametrize("change", [lambda fields: fields[:-1], lambda fields: [*fields, 0], lambda _: []])
def test_field_set_is_exact(a_record, change):
    fields = msgpack.unpackb(encode_peer(a_record(PEER)))
    with pytest.raises(RemoteProtocolError):
        parse_peer(msgpack.packb(change(fields)), owner=PEER)


@given(st.binary(max_size=1200))
def test_any_bytes_are_a_record_or_a_remote_error(data):
    for parse in (lambda: parse_peer(data, owner=PEER), lambda: parse_claim(data)):
        with pytest.raises(RemoteProtocolError):
            parse()


@given(peer_records, st.integers(0, 1 << 16), st.integers(1, 255))
def test_any_corrupted_record_is_read_or_refused_and_nothing_else(record, position, flip):
    data = bytearray(encode_peer(record))
    data[position % len(data)] ^= flip
    with contextlib.suppress(RemoteProtocolError):
        assert parse_peer(bytes(data), owner=record.peer).peer == record.peer


def test_own_record_out_of_range_is_our_bug(a_record):
    with pytest.raises(LocalProtocolError, match="own record"):
        encode_peer(a_record(PEER, forward_s=math.nan))


# ---- keys ---------------------------------------------------------------------------------------


def test_roster_is_cut_into_sixteen_shards_by_the_hash_of_the_peer():
    keys = roster_keys(RUN)
    assert len(keys) == len(set(keys)) == ROSTER_SHARDS
    assert keys[0] == f"{RUN}/peers/00"
    assert keys[-1] == f"{RUN}/peers/15"
    assert roster_key(RUN, PEER) == keys[shard_of(PEER)]
    assert {shard_of(f"peer-{n}") for n in range(500)} == set(range(ROSTER_SHARDS))


def test_own_keys_are_understood():
    assert parse_key(f"{RUN}/peers/07") == RecordKey(RUN, KeyKind.ROSTER, 7)
    assert parse_key(claim_key(RUN, 12)) == RecordKey(RUN, KeyKind.CLAIM, 12)
    assert parse_key(spec_key(RUN)) == RecordKey(RUN, KeyKind.SPEC, 0)
    assert parse_key(spec_key(preset("pico").run_id)) is not None


@pytest.mark.parametrize(
    "key",
    [
        "",
        RUN,
        f"{RUN}/",
        f"{RUN}/peers/16",
        f"{RUN}/peers/7",
        f"{RUN}/peers/007",
        f"{RUN}/peers/\u0660\u0667",  # digits, but not ours
        f"{RUN}/claim/256",
        f"{RUN}/claim/07",
        f"{RUN}/claim/-1",
        f"{RUN}/spec/",
        f"{RUN}/spec\n",
        f"{RUN}/stats/00",
        "Demo-0123456789abcdef/spec",
        "demo/spec",
        f"{'a' * 33}-0123456789abcdef/spec",
    ],
)
def test_anything_else_is_no_key(key):
    assert parse_key(key) is None


# ---- claim and run ------------------------------------------------------------------------------


def test_claim_comes_back_as_it_was():
    claim = ClaimRecord(stage=3, claimed_unix_s=1_700_000_000.25)
    assert parse_claim(encode_claim(claim)) == claim


def test_run_record_is_the_spec_behind_its_id():
    spec = preset("nano", name="my-run")
    assert parse_run(encode_run(RunRecord(spec)), run_id=spec.run_id).spec == spec


def test_run_record_of_another_run_certifies_nothing():
    """Whoever answers for a run id cannot change a single character of the agreement."""
    spec = preset("nano")
    data = encode_run(RunRecord(spec))
    for forged in (data.replace(b'"seed":0', b'"seed":1'), data + b" ", b"", b"{}", b"\xff" * 100):
        assert forged != data
        with pytest.raises(RemoteProtocolError) as caught:
            parse_run(forged, run_id=spec.run_id)
        assert caught.value.reason == "spec-hash"


def test_run_record_under_another_name_is_refused():
    spec = preset("nano", name="honest")
    with pytest.raises(RemoteProtocolError):
        parse_run(encode_run(RunRecord(spec)), run_id=spec.run_id.replace("honest", "forged"))


def test_bytes_that_fit_the_hash_but_are_no_spec_are_refused():
    """Anybody can name a run after the hash of nonsense."""
    import hashlib

    nonsense = b'{"name": [[[['
    with pytest.raises(RemoteProtocolError) as caught:
        parse_run(nonsense, run_id=f"demo-{hashlib.sha256(nonsense).hexdigest()[:16]}")
    assert caught.value.reason == "spec-schema"
