"""What is in the table: keys, and records with their strict bytes.

Every byte here may come from a stranger: a record has exactly the known fields, of the known types, in range,
or it is refused with RemoteProtocolError. A record says nothing that is not public: no host name, no e-mail.
A run's keys all start with its id: `<run_id>/peers/<00..15>`, `<run_id>/spec`, `<run_id>/claim/<stage>`. The
roster is cut into shards because a store reads its key from some twenty peers first, so one big roster would
cost quadratically.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import astuple, dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dht.identity import friendly_name
from dht.packing import pack, unpack
from protocols.coordinates import Coordinate
from protocols.costs import LINKS_MAX
from protocols.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from protocols.hashing import NUMBERS
from protocols.run_spec import PROTOCOL_VERSION, RunSpec
from protocols.swarm import PeerId, PeerInfo, PeerState

ROSTER_SHARDS = 16
STAGES_MAX = 256
RECORD_BYTES_MAX = 1024
SPEC_BYTES_MAX = 8192
TTL_MAX_S = 300.0
MADDRS_MAX = 4
MADDR_CHARS_MAX = 128
PEER_ID_CHARS_MAX = 64
_COUNT_MAX = 1 << 53  # exact in a double too, should a reader hold it as one
_UNIX_S_MAX = 1e11
_SECONDS_MAX = 1e6
_LATENCY_MAX_S = 3600.0  # of a coordinate

_RUN_ID = r"[a-z0-9][a-z0-9._-]{0,31}-[0-9a-f]{16}"
_KEY = re.compile(rf"({_RUN_ID})/(?:peers/(\d\d)|claim/(0|[1-9]\d{{0,2}})|(spec))")


class KeyKind(Enum):
    ROSTER = "peers"
    CLAIM = "claim"
    SPEC = "spec"


@dataclass(frozen=True, slots=True)
class RecordKey:
    """A key, understood. `index` is the shard or the stage; 0 for the spec."""

    run_id: str
    kind: KeyKind
    index: int


def shard_of(peer: PeerId) -> int:
    return hashlib.sha256(peer.encode()).digest()[0] % ROSTER_SHARDS


def roster_key(run_id: str, peer: PeerId) -> str:
    return f"{run_id}/peers/{shard_of(peer):02d}"


def roster_keys(run_id: str) -> tuple[str, ...]:
    return tuple(f"{run_id}/peers/{shard:02d}" for shard in range(ROSTER_SHARDS))


def spec_key(run_id: str) -> str:
    return f"{run_id}/spec"


def claim_key(run_id: str, stage: int) -> str:
    return f"{run_id}/claim/{stage}"


def parse_key(key: str) -> RecordKey | None:
    """None for anything that is not one of our keys, in their one spelling."""
    match = _KEY.fullmatch(key)
    if match is None or not key.isascii():
        return None
    run_id, shard, stage, _ = match.groups()
    if shard is not None:
        return RecordKey(run_id, KeyKind.ROSTER, int(shard)) if int(shard) < ROSTER_SHARDS else None
    if stage is not None:
        return RecordKey(run_id, KeyKind.CLAIM, int(stage)) if int(stage) < STAGES_MAX else None
    return RecordKey(run_id, KeyKind.SPEC, 0)


# ---- peer record ---------------------------------------------------------------------------------

_Count = Annotated[int, Field(ge=0, le=_COUNT_MAX)]
_Seconds = Annotated[float, Field(ge=0, le=_SECONDS_MAX)]
_UnixS = Annotated[float, Field(ge=0, le=_UNIX_S_MAX)]
_Stage = Annotated[int, Field(ge=0, lt=STAGES_MAX)]
_Rate = Annotated[float, Field(ge=0, le=1e15)]
_Place = Annotated[float, Field(ge=-_LATENCY_MAX_S, le=_LATENCY_MAX_S)]
_Height = Annotated[float, Field(gt=0, le=_LATENCY_MAX_S)]
_Number = Annotated[int, Field(ge=0, lt=NUMBERS)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Maddr = Annotated[str, Field(max_length=MADDR_CHARS_MAX, pattern=r"\A/[!-~]+\z")]


class _Wire(BaseModel):
    """Strict: no conversion of types, no unknown field, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    protocol_version: _Count


class _PeerWire(_Wire):
    peer: Annotated[str, Field(min_length=1, max_length=PEER_ID_CHARS_MAX)]
    stage: _Stage | None
    state: Annotated[PeerState, Field(strict=False)]
    round: _Count
    outer_step: _Count
    slots: Annotated[int, Field(ge=0, le=1 << 16)]
    forward_s: _Seconds
    backward_s: _Seconds
    upload_bytes_per_s: _Rate
    download_bytes_per_s: _Rate
    coordinate: tuple[_Place, _Place, _Height, _Share] | None  # x, y, height, error
    links: Annotated[tuple[tuple[_Number, _Height], ...], Field(max_length=LINKS_MAX)]
    grad_norm: _Rate
    started_unix_s: _UnixS
    fresh: bool
    software_version: Annotated[str, Field(pattern=r"\A[0-9A-Za-z.+_-]{1,32}\z")]
    maddrs: Annotated[tuple[_Maddr, ...], Field(max_length=MADDRS_MAX)]
    tokens_trained: _Count
    loss: Annotated[float, Field(ge=-1e6, le=1e6)] | None
    tokens_per_s: _Rate
    sequence: _Count
    stored_unix_s: _UnixS
    withdrawn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """What a peer says about itself, with what `status` and `peers` show.

    (`info.started_unix_s`, `sequence`) grows with every store: a reader ignores what went back. `withdrawn`
    is the tombstone of a peer that left. It is a flag and not a short time to live, because the table keeps
    whatever expires later: a short-lived farewell would be refused in favour of the heartbeat before it.
    """

    info: PeerInfo
    software_version: str = "0"
    protocol_version: int = PROTOCOL_VERSION
    maddrs: tuple[str, ...] = ()
    tokens_trained: int = 0
    loss: float | None = None  # nats a token, smoothed; first-stage peers only
    tokens_per_s: float = 0.0
    sequence: int = 0
    stored_unix_s: float = 0.0
    withdrawn: bool = False

    @property
    def peer(self) -> PeerId:
        return self.info.peer

    @property
    def friendly_name(self) -> str:
        """Derived, not told: nobody can take another's name or send control characters."""
        return friendly_name(self.info.peer)


_INFO_FIELDS = tuple(PeerInfo.__dataclass_fields__)


def encode_peer(record: PeerRecord) -> bytes:
    own = {name: getattr(record, name) for name in _PeerWire.model_fields if name not in _INFO_FIELDS}
    told = {name: getattr(record.info, name) for name in _INFO_FIELDS}
    if record.info.coordinate is not None:
        told["coordinate"] = astuple(record.info.coordinate)
    return _encode(_PeerWire, {**own, **told})


def parse_peer(data: bytes, *, owner: PeerId) -> PeerRecord:
    """The record under subkey `owner`; RemoteProtocolError when it is not one, or speaks of somebody else."""
    wire = _parse(_PeerWire, data)
    if wire.peer != owner:
        raise RemoteProtocolError("record-owner", "the record names another peer than its owner")
    fields = wire.model_dump()
    told = {name: fields.pop(name) for name in _INFO_FIELDS}
    if wire.coordinate is not None:
        told["coordinate"] = Coordinate(*wire.coordinate)
    info = PeerInfo(**told)
    return PeerRecord(info=info, **fields)


# ---- claim ---------------------------------------------------------------------------------------


class _ClaimWire(_Wire):
    stage: _Stage
    claimed_unix_s: _UnixS


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRecord:
    """Its owner means to adopt this empty stage."""

    stage: int
    claimed_unix_s: float


def encode_claim(record: ClaimRecord) -> bytes:
    return _encode(
        _ClaimWire,
        {
            "protocol_version": PROTOCOL_VERSION,
            "stage": record.stage,
            "claimed_unix_s": record.claimed_unix_s,
        },
    )


def parse_claim(data: bytes) -> ClaimRecord:
    wire = _parse(_ClaimWire, data)
    return ClaimRecord(stage=wire.stage, claimed_unix_s=wire.claimed_unix_s)


# ---- run -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The whole agreement of a run. Needs no signature: its hash is in the run id that one asked for."""

    spec: RunSpec


def encode_run(record: RunRecord) -> bytes:
    data = record.spec.to_json().encode()
    if len(data) > SPEC_BYTES_MAX:
        raise ConfigError(f"RunSpec has {len(data)} bytes; the table takes at most {SPEC_BYTES_MAX}")
    return data


def certifies_run(data: bytes, run_id: str) -> bool:
    """Whether these bytes are what `run_id` was made from, by hash alone."""
    return len(data) <= SPEC_BYTES_MAX and hashlib.sha256(data).hexdigest()[:16] == run_id.rpartition("-")[2]


def parse_run(data: bytes, *, run_id: str) -> RunRecord:
    if not certifies_run(data, run_id):
        raise RemoteProtocolError("spec-hash", "the RunSpec's hash is not the run's id")
    try:
        spec = RunSpec.from_json(data.decode())
    except (ConfigError, UnicodeDecodeError) as error:
        raise RemoteProtocolError("spec-schema", str(error)) from None
    if spec.run_id != run_id:
        raise RemoteProtocolError("spec-hash", "the RunSpec's name is not the run's")
    return RunRecord(spec)


# ---- bytes ---------------------------------------------------------------------------------------

_WireT = TypeVar("_WireT", bound=_Wire)


def _encode(model: type[_Wire], fields: dict[str, Any]) -> bytes:
    """A msgpack list in the order of the model's fields, the protocol version first; names would double its
    size."""
    try:
        model.model_validate(fields)
    except ValidationError as error:
        raise LocalProtocolError(f"own record is not valid: {error}") from None
    values = [fields[name] for name in model.model_fields]
    data = pack([value.value if isinstance(value, Enum) else value for value in values])
    if len(data) > RECORD_BYTES_MAX:
        raise LocalProtocolError(f"own record has {len(data)} bytes, more than {RECORD_BYTES_MAX}")
    return data


def _parse(model: type[_WireT], data: bytes) -> _WireT:
    if len(data) > RECORD_BYTES_MAX:
        raise RemoteProtocolError("record-size", f"{len(data)} bytes")
    values = unpack(data)
    if not isinstance(values, tuple) or not values:
        raise RemoteProtocolError("record-schema", "not a list of fields")
    values = cast("tuple[object, ...]", values)
    if type(values[0]) is not int or values[0] != PROTOCOL_VERSION:
        raise RemoteProtocolError("record-version", "speaks another protocol version")
    if len(values) != len(model.model_fields):
        raise RemoteProtocolError("record-schema", f"{len(values)} fields")
    try:
        return model.model_validate(dict(zip(model.model_fields, values, strict=True)))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        raise RemoteProtocolError("record-schema", f"{fault['loc'][:1]}: {fault['msg']}") from None
