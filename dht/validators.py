"""Who may write what into the table. Pure: the network's validator and the in-memory table both ask here.

Everything is denied that is not named: a peer's record in its own shard of the roster and a peer's claim on a
stage, both under the owner's peer id and signed by it, and the self-certifying RunSpec. Checked when an entry
is stored and again when it is read, so one honest end suffices. The *content* of a peer's own record is its
reader's affair (`dht.records`): one garbled record must not make the readers throw away the whole shard that
it came in, which is what the table does with a shard that holds a refused entry. For the same reason an
expired entry is no fault here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache

from dht.directory import PLAIN
from dht.identity import verify
from dht.packing import pack, unpack
from dht.records import (
    PEER_ID_CHARS_MAX,
    RECORD_BYTES_MAX,
    SPEC_BYTES_MAX,
    TTL_MAX_S,
    KeyKind,
    RecordKey,
    certifies_run,
    parse_key,
    shard_of,
)
from protocols.errors import RemoteProtocolError
from protocols.swarm import PeerId

CLOCK_SLACK_S = 5.0  # two clocks may each be off; join refuses more than 3 s against a bootstrap peer
_KEY_CHARS_MAX = 96
_ENVELOPE_BYTES_MAX = SPEC_BYTES_MAX + 256
_DOMAIN = "gossamer-record-1"  # a signature made for a record is worth nothing anywhere else

Sign = Callable[[bytes], bytes]

# A poll reads the same entry from several replicas, and most of them again at the next poll: 0.1 ms each saved.
_verify_once = lru_cache(maxsize=4096)(verify)


@dataclass(frozen=True, slots=True)
class Envelope:
    """An entry as it lies in the table. The key is repeated in it since the table knows only the key's
    hash."""

    key: str
    value: bytes
    signature: bytes


def seal(key: str, subkey: PeerId, value: bytes, expiry_unix_s: float, sign: Sign) -> bytes:
    """The bytes to store. The signature covers place and expiry, so nobody can move the entry or prolong its
    life."""
    signature = b"" if subkey == PLAIN else sign(_signed_bytes(key, subkey, value, expiry_unix_s))
    return pack([key, value, signature])


def open_envelope(data: bytes) -> Envelope:
    if len(data) > _ENVELOPE_BYTES_MAX:
        raise RemoteProtocolError("record-size", f"{len(data)} bytes")
    match unpack(data):
        case (str(key), bytes(value), bytes(signature)) if len(key) <= _KEY_CHARS_MAX:
            return Envelope(key, value, signature)
        case _:
            raise RemoteProtocolError("record-envelope")


def check_entry(
    envelope: Envelope,
    subkey: PeerId,
    expiry_unix_s: float,
    *,
    now_unix_s: float,
    run_ids: Collection[str] | None = None,
) -> None:
    """RemoteProtocolError unless this entry may be in the table; `run_ids` None: of whichever run."""
    check_place(envelope.key, subkey, envelope.value, expiry_unix_s, now_unix_s=now_unix_s, run_ids=run_ids)
    if subkey == PLAIN:
        if envelope.signature:
            raise RemoteProtocolError("record-envelope", "a signature that nobody made")
        return
    signed = _signed_bytes(envelope.key, subkey, envelope.value, expiry_unix_s)
    if not _verify_once(subkey, signed, envelope.signature):
        raise RemoteProtocolError("record-signature")


def check_place(
    key: str,
    subkey: PeerId,
    value: bytes,
    expiry_unix_s: float,
    *,
    now_unix_s: float,
    run_ids: Collection[str] | None = None,
) -> None:
    """All rules but the signature: known key, its right owner, size, time to live."""
    place = parse_key(key)
    if place is None or (run_ids is not None and place.run_id not in run_ids):
        raise RemoteProtocolError("record-key")
    if not math.isfinite(expiry_unix_s) or expiry_unix_s > now_unix_s + TTL_MAX_S + CLOCK_SLACK_S:
        raise RemoteProtocolError("record-ttl")
    if place.kind is KeyKind.SPEC:
        _check_spec(place, subkey, value)
        return
    if not 0 < len(subkey) <= PEER_ID_CHARS_MAX:
        raise RemoteProtocolError("record-owner", "only the RunSpec has no owner")
    if place.kind is KeyKind.ROSTER and place.index != shard_of(subkey):
        raise RemoteProtocolError("record-shard")
    if len(value) > RECORD_BYTES_MAX:
        raise RemoteProtocolError("record-size", f"{len(value)} bytes")


def _check_spec(place: RecordKey, subkey: str, value: bytes) -> None:
    if subkey != PLAIN:
        raise RemoteProtocolError("record-owner", "the RunSpec has no owner")
    if not certifies_run(value, place.run_id):
        raise RemoteProtocolError("spec-hash")


def _signed_bytes(key: str, subkey: str, value: bytes, expiry_unix_s: float) -> bytes:
    return pack([_DOMAIN, key, subkey, float(expiry_unix_s), value])
