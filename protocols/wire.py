"""Messages <-> bytes: a protobuf envelope (`proto/swarm.proto`), then the tensor's bytes as they lie in memory.

`encode` and `decode` are inverse for every message that passes `protocols.admission`. Invariant: whatever the
bytes, `decode` and `Partial.finish` return a well-formed message or raise RemoteProtocolError, and allocate no more
than a small multiple of the header. What a message may say, and who may say it, is `admission`'s.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from google.protobuf.message import DecodeError

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.messages import (
    BoundaryActivation,
    BoundaryGradient,
    Hop,
    Message,
    OuterAccept,
    OuterExchange,
    OuterOffer,
    Path,
    Release,
    RoundPlan,
    TensorPacket,
    Undeliverable,
    WeightsChunk,
    WeightsKind,
    WeightsRequest,
    WorkKey,
)
from protocols.proto import swarm_pb2 as pb
from protocols.run_spec import PROTOCOL_VERSION, Codec
from protocols.swarm import PeerId

HEADER_BYTES_MAX = 256 << 10  # a round plan of KEYS_MAX keys fits
KEYS_MAX = 1 << 14
PATH_HOPS_MAX = 256  # RunSpec.num_stages cannot exceed it
DIMS_MAX = 4
INTEGER_MAX = (1 << 63) - 1
ATTEMPT_MAX = 1 << 16
PEER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
WORD = re.compile(r"[A-Za-z0-9._:-]{0,64}")  # schema hashes, snapshot names
DTYPES = ("float32", "bfloat16", "float16", "uint8")

_CODEC_TO_WIRE = {
    Codec.RAW: pb.CODEC_RAW,
    Codec.BF16: pb.CODEC_BF16,
    Codec.INT8: pb.CODEC_INT8,
    Codec.INT4: pb.CODEC_INT4,
    Codec.TOPK: pb.CODEC_TOPK,
}
_CODEC_FROM_WIRE: dict[int, Codec] = {number: codec for codec, number in _CODEC_TO_WIRE.items()}
_KIND_TO_WIRE = {
    WeightsKind.FULL: pb.WEIGHTS_FULL,
    WeightsKind.WEIGHTS: pb.WEIGHTS_ALONE,
    WeightsKind.SHADOW: pb.WEIGHTS_SHADOW,
}
_KIND_FROM_WIRE: dict[int, WeightsKind] = {number: kind for kind, number in _KIND_TO_WIRE.items()}


@lru_cache(maxsize=64)
def run_tag(run_id: str) -> bytes:
    """Stands for the run in every envelope and greeting: 16 bytes."""
    return hashlib.sha256(run_id.encode()).digest()[:16]


# ---- out ------------------------------------------------------------------------------------------------------------


def encode(message: Message, *, run_id: str) -> tuple[bytes, memoryview]:
    """Header and tensor bytes; the latter are a view of the packet's own memory, empty when there is no packet."""
    try:
        body = _WRITERS[type(message)](message)
        envelope = pb.Envelope(protocol=PROTOCOL_VERSION, run_tag=run_tag(run_id), **body)
        header = envelope.SerializeToString()
    except (KeyError, TypeError, ValueError) as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(header) > HEADER_BYTES_MAX:
        raise LocalProtocolError(f"{type(message).__name__}: header of {len(header)} bytes")
    packet: TensorPacket | None = getattr(message, "packet", None)
    return header, memoryview(packet.data).cast("B") if packet is not None else memoryview(b"")


def _put_key(key: WorkKey) -> pb.WorkKey:
    return pb.WorkKey(originator=key.originator, counter=key.counter, attempt=key.attempt)


def _put_keys(keys: Sequence[WorkKey]) -> pb.WorkKeys:
    originators = {key.originator for key in keys}
    if len(originators) > 1:
        raise ValueError("keys of several originators")
    return pb.WorkKeys(
        originator=originators.pop() if originators else "",
        counters=[key.counter for key in keys],
        attempts=[key.attempt for key in keys],
    )


def _put_tensor(packet: TensorPacket) -> pb.TensorHead:
    return pb.TensorHead(
        dtype=packet.dtype, shape=packet.shape, codec=_CODEC_TO_WIRE[packet.codec], num_bytes=packet.num_bytes
    )


def _put_activation(message: BoundaryActivation) -> dict[str, Any]:
    body = pb.BoundaryActivation(
        key=_put_key(message.key),
        round=message.round,
        path=[pb.Hop(stage=hop.stage, peer=hop.peer) for hop in message.path],
        hop=message.hop,
        train=message.train,
        tensor=_put_tensor(message.packet),
    )
    return {"boundary_activation": body}


def _put_gradient(message: BoundaryGradient) -> dict[str, Any]:
    body = pb.BoundaryGradient(key=_put_key(message.key), hop=message.hop, tensor=_put_tensor(message.packet))
    return {"boundary_gradient": body}


def _put_exchange(message: OuterExchange) -> dict[str, Any]:
    body = pb.OuterExchange(
        stage=message.stage,
        outer_step=message.outer_step,
        pair_round=message.pair_round,
        schema=message.schema,
        tensor=_put_tensor(message.packet),
    )
    return {"outer_exchange": body}


def _put_offer(message: OuterOffer) -> dict[str, Any]:
    body = pb.OuterOffer(
        stage=message.stage,
        outer_step=message.outer_step,
        pair_round=message.pair_round,
        microbatches=message.microbatches,
    )
    return {"outer_offer": body}


def _put_accept(message: OuterAccept) -> dict[str, Any]:
    body = pb.OuterAccept(
        stage=message.stage, outer_step=message.outer_step, pair_round=message.pair_round, ok=message.ok
    )
    return {"outer_accept": body}


def _put_request(message: WeightsRequest) -> dict[str, Any]:
    body = pb.WeightsRequest(
        kind=_KIND_TO_WIRE[message.kind], stage=message.stage, snapshot=message.snapshot, index=message.index
    )
    return {"weights_request": body}


def _put_chunk(message: WeightsChunk) -> dict[str, Any]:
    body = pb.WeightsChunk(
        kind=_KIND_TO_WIRE[message.kind],
        stage=message.stage,
        snapshot=message.snapshot,
        index=message.index,
        count=message.count,
        sha256=message.sha256,
        round=message.round,
        outer_step=message.outer_step,
        tensor=_put_tensor(message.packet) if message.packet is not None else None,
    )
    return {"weights_chunk": body}


_WRITERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    RoundPlan: lambda m: {"round_plan": pb.RoundPlan(round=m.round, keys=_put_keys(m.keys))},
    BoundaryActivation: _put_activation,
    BoundaryGradient: _put_gradient,
    Release: lambda m: {"release": pb.Release(keys=_put_keys(m.keys))},
    Undeliverable: lambda m: {
        "undeliverable": pb.Undeliverable(key=_put_key(m.key), unreachable=m.unreachable)
    },
    OuterOffer: _put_offer,
    OuterExchange: _put_exchange,
    OuterAccept: _put_accept,
    WeightsRequest: _put_request,
    WeightsChunk: _put_chunk,
}

# ---- in -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Partial:
    """A message whose tensor has not arrived; its packet holds no data yet."""

    message: Message
    tensor_bytes: int

    def finish(self, data: bytes | bytearray | memoryview) -> Message:
        """The message with its tensor; `data` is kept, not copied."""
        require(len(data) == self.tensor_bytes, "wrong-size")
        packet: TensorPacket | None = getattr(self.message, "packet", None)
        if packet is None:
            return self.message
        return replace(self.message, packet=replace(packet, data=data))  # type: ignore[call-arg]


def decode(header: bytes | bytearray | memoryview, *, run_id: str) -> Partial:
    """The message that `header` announces; RemoteProtocolError names what is wrong with it."""
    require(len(header) <= HEADER_BYTES_MAX, "header-too-long")
    envelope = pb.Envelope()
    try:
        envelope.ParseFromString(bytes(header))
    except (DecodeError, ValueError) as error:
        raise RemoteProtocolError("not-protobuf") from error
    require(envelope.protocol == PROTOCOL_VERSION, "other-protocol")
    require(envelope.run_tag == run_tag(run_id), "other-run")
    kind = envelope.WhichOneof("body")
    if kind is None:
        raise RemoteProtocolError("no-body")
    body = getattr(envelope, kind)
    message = _READERS[kind](body)
    tensor_bytes = body.tensor.num_bytes if getattr(message, "packet", None) is not None else 0
    return Partial(message, tensor_bytes)


def require(condition: bool, reason: str) -> None:
    """Refuse the message, unless."""
    if not condition:
        raise RemoteProtocolError(reason)


def _integer(value: int, most: int = INTEGER_MAX) -> int:
    require(value <= most, "integer-out-of-range")
    return value


def _peer(text: str) -> PeerId:
    require(PEER_ID.fullmatch(text) is not None, "bad-peer-id")
    return text


def _word(text: str) -> str:
    require(WORD.fullmatch(text) is not None, "bad-word")
    return text


def _attempt(value: int) -> int:
    require(1 <= value <= ATTEMPT_MAX, "bad-attempt")
    return value


def _key(key: pb.WorkKey) -> WorkKey:
    return WorkKey(_peer(key.originator), _integer(key.counter), _attempt(key.attempt))


def _keys(keys: pb.WorkKeys) -> tuple[WorkKey, ...]:
    require(len(keys.counters) == len(keys.attempts), "ragged-keys")
    require(len(keys.counters) <= KEYS_MAX, "too-many-keys")
    if not keys.counters:
        return ()
    originator = _peer(keys.originator)
    return tuple(
        WorkKey(originator, _integer(counter), _attempt(attempt))
        for counter, attempt in zip(keys.counters, keys.attempts, strict=True)
    )


def _path(hops: Sequence[pb.Hop]) -> Path:
    require(len(hops) <= PATH_HOPS_MAX, "path-too-long")
    return tuple(Hop(_integer(hop.stage), _peer(hop.peer)) for hop in hops)


def _tensor(head: pb.TensorHead) -> TensorPacket:
    require(head.dtype in DTYPES, "wrong-dtype")
    require(len(head.shape) <= DIMS_MAX, "too-many-dims")
    codec = _CODEC_FROM_WIRE.get(head.codec)
    if codec is None:
        raise RemoteProtocolError("unknown-codec")
    _integer(head.num_bytes)
    shape = tuple(_integer(size) for size in head.shape)
    return TensorPacket(dtype=head.dtype, shape=shape, codec=codec, data=b"")


def _kind(number: int) -> WeightsKind:
    kind = _KIND_FROM_WIRE.get(number)
    if kind is None:
        raise RemoteProtocolError("unknown-kind")
    return kind


def _read_activation(body: pb.BoundaryActivation) -> Message:
    return BoundaryActivation(
        key=_key(body.key),
        round=_integer(body.round),
        path=_path(body.path),
        hop=_integer(body.hop),
        train=body.train,
        packet=_tensor(body.tensor),
    )


def _read_gradient(body: pb.BoundaryGradient) -> Message:
    return BoundaryGradient(key=_key(body.key), hop=_integer(body.hop), packet=_tensor(body.tensor))


def _read_offer(body: pb.OuterOffer) -> Message:
    return OuterOffer(
        stage=_integer(body.stage),
        outer_step=_integer(body.outer_step),
        pair_round=_integer(body.pair_round),
        microbatches=_integer(body.microbatches),
    )


def _read_exchange(body: pb.OuterExchange) -> Message:
    return OuterExchange(
        stage=_integer(body.stage),
        outer_step=_integer(body.outer_step),
        pair_round=_integer(body.pair_round),
        schema=_word(body.schema),
        packet=_tensor(body.tensor),
    )


def _read_accept(body: pb.OuterAccept) -> Message:
    return OuterAccept(
        stage=_integer(body.stage),
        outer_step=_integer(body.outer_step),
        pair_round=_integer(body.pair_round),
        ok=body.ok,
    )


def _read_request(body: pb.WeightsRequest) -> Message:
    return WeightsRequest(
        kind=_kind(body.kind),
        stage=_integer(body.stage),
        snapshot=_word(body.snapshot),
        index=_integer(body.index),
    )


def _read_chunk(body: pb.WeightsChunk) -> Message:
    return WeightsChunk(
        kind=_kind(body.kind),
        stage=_integer(body.stage),
        snapshot=_word(body.snapshot),
        index=_integer(body.index),
        count=_integer(body.count),
        sha256=_word(body.sha256),
        round=_integer(body.round),
        outer_step=_integer(body.outer_step),
        packet=_tensor(body.tensor) if body.HasField("tensor") else None,
    )


_READERS: dict[str, Callable[[Any], Message]] = {
    "round_plan": lambda body: RoundPlan(round=_integer(body.round), keys=_keys(body.keys)),
    "boundary_activation": _read_activation,
    "boundary_gradient": _read_gradient,
    "release": lambda body: Release(keys=_keys(body.keys)),
    "undeliverable": lambda body: Undeliverable(key=_key(body.key), unreachable=_peer(body.unreachable)),
    "outer_offer": _read_offer,
    "outer_exchange": _read_exchange,
    "outer_accept": _read_accept,
    "weights_request": _read_request,
    "weights_chunk": _read_chunk,
}
