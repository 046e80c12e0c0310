"""What a message may say, and who may say it: the checks between the wire and the core.

Two steps, because a tensor's buffer is allocated between them: `check_message` looks at a message whose tensor has
not arrived (sizes, shapes, roles), `check_data` at the bytes. Invariant: what both let through cannot make the core
or the compute side raise, whoever sent it. `sender` is proven by the channel; nothing else in a message is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from protocols.messages import (
    BoundaryActivation,
    BoundaryGradient,
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
    WeightsRequest,
    WorkKey,
)
from protocols.run_spec import ModelSpec, RunSpec
from protocols.swarm import PeerId
from protocols.wire import KEYS_MAX, decode, require

CHUNK_BYTES_MAX = 4 << 20  # of a WeightsChunk, before slack
SLACK_BYTES = 64 << 10  # scales of a codec, alignment of a file format
BYTES_PER_ELEMENT_MAX = 4  # raw fp32, the widest codec
BOUNDARY_DTYPES = ("float32", "bfloat16")
STATE_VECTORS = 5  # of a whole state: weights, slow weights, outer momentum and the two moments
STATE_SLACK_BYTES = 16 << 20  # names and offsets, and a donor that cuts finer than it must


def stage_parameters(spec: RunSpec, stage: int) -> int:
    """Parameters of a replica of `stage`: its layers; the first stage also has embedding, final norm and head."""
    model = spec.model
    ends = 2 * model.vocab_size * model.hidden_size + model.hidden_size if stage == 0 else 0
    return ends + len(spec.layer_range(stage)) * _layer_parameters(model)


def _layer_parameters(model: ModelSpec) -> int:
    attention = 2 * model.hidden_size**2 + 2 * model.hidden_size * model.num_key_value_heads * model.head_dim
    return attention + 3 * model.hidden_size * model.intermediate_size + 2 * model.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Caps that follow from the agreement of the run; both ends compute the same."""

    run_id: str
    num_stages: int
    boundary_shape: tuple[int, ...]
    boundary_bytes_max: int
    exchange_bytes_max: int
    chunks_max: int  # of one state
    chunk_bytes_max: int = CHUNK_BYTES_MAX + SLACK_BYTES
    keys_max: int = KEYS_MAX

    @classmethod
    def of(cls, spec: RunSpec) -> WireLimits:
        parameters = max(stage_parameters(spec, stage) for stage in range(min(2, spec.num_stages)))
        rounds = spec.rounds
        state_bytes_max = STATE_VECTORS * BYTES_PER_ELEMENT_MAX * parameters + STATE_SLACK_BYTES
        return cls(
            run_id=spec.run_id,
            num_stages=spec.num_stages,
            boundary_shape=spec.boundary_shape,
            boundary_bytes_max=BYTES_PER_ELEMENT_MAX * prod(spec.boundary_shape),
            exchange_bytes_max=BYTES_PER_ELEMENT_MAX * parameters + SLACK_BYTES,
            chunks_max=ceil(state_bytes_max / CHUNK_BYTES_MAX),
            keys_max=min(KEYS_MAX, (rounds.microbatches + rounds.eval_microbatches) * rounds.attempts_max),
        )

    @property
    def tensor_bytes_max(self) -> int:
        return max(self.boundary_bytes_max, self.exchange_bytes_max, self.chunk_bytes_max)

    def tensor_bytes_of(self, message: Message) -> int:
        """Most bytes that the tensor of `message` may have."""
        match message:
            case BoundaryActivation() | BoundaryGradient():
                return self.boundary_bytes_max
            case OuterExchange():
                return self.exchange_bytes_max
            case WeightsChunk():
                return self.chunk_bytes_max
            case _:
                return 0


def admit(
    header: bytes | memoryview,
    data: bytes | bytearray | memoryview,
    *,
    sender: PeerId,
    me: PeerId,
    limits: WireLimits,
) -> Message:
    """All of it in one go, for those who hold both parts already (the simulator)."""
    partial = decode(header, run_id=limits.run_id)
    check_message(partial.message, partial.tensor_bytes, sender=sender, me=me, limits=limits)
    message = partial.finish(data)
    check_data(message, limits)
    return message


def check_message(
    message: Message, tensor_bytes: int, *, sender: PeerId, me: PeerId, limits: WireLimits
) -> None:
    """RemoteProtocolError unless `sender` may say this to `me`; the tensor is announced, not yet here."""
    require(sender != me, "own-message")
    require(tensor_bytes <= limits.tensor_bytes_of(message), "tensor-too-long")
    match message:
        case RoundPlan(keys=keys) | Release(keys=keys):
            require(len(keys) <= limits.keys_max, "too-many-keys")
            require(all(key.originator == sender for key in keys), "not-the-originator")
        case BoundaryActivation():
            check_path(message.path, message.key, limits.num_stages)
            _check_hop(message, sender, me)
            _check_boundary(message.packet, limits)
        case BoundaryGradient(key=key, hop=hop):
            require(hop < limits.num_stages, "hop-out-of-range")
            require((hop == 0) == (key.originator == me), "wrong-receiver")
            _check_boundary(message.packet, limits)
        case Undeliverable(key=key):
            require(key.originator == me, "wrong-receiver")
        case OuterOffer() | OuterAccept() | WeightsRequest():
            require(message.stage < limits.num_stages, "stage-out-of-range")
        case OuterExchange():
            require(message.stage < limits.num_stages, "stage-out-of-range")
            _check_flat(message.packet, limits.exchange_bytes_max)
        case WeightsChunk():
            _check_chunk(message, limits)


def check_data(message: Message, limits: WireLimits) -> None:
    """RemoteProtocolError unless the tensor's bytes fit its header and are finite. One pass over the bytes."""
    if getattr(message, "packet", None) is None:
        return
    from protocols.tensor_codec import check_packet  # torch: who has no tensors need not load it

    match message:
        case BoundaryActivation(packet=packet) | BoundaryGradient(packet=packet):
            check_packet(packet, shape=limits.boundary_shape, dtype=packet.dtype)
        case OuterExchange(packet=packet):
            check_packet(packet, shape=packet.shape, dtype="float32")
        case WeightsChunk(packet=TensorPacket() as packet):
            check_packet(packet, shape=packet.shape, dtype=packet.dtype)
        case _:
            pass


def check_path(path: Path, key: WorkKey, num_stages: int) -> None:
    """Originator first, at stage 0; then each stage and each peer at most once. Whether it is legal is for planners."""
    require(2 <= len(path) <= num_stages, "bad-path-length")
    require(path[0].stage == 0 and path[0].peer == key.originator, "path-without-originator")
    require(all(0 < hop.stage < num_stages for hop in path[1:]), "stage-out-of-range")
    require(len({hop.stage for hop in path}) == len(path), "stage-repeated")
    require(len({hop.peer for hop in path}) == len(path), "peer-repeated")


def _check_hop(message: BoundaryActivation, sender: PeerId, me: PeerId) -> None:
    """It comes from the hop before, to me; past the last hop it is back at the originator."""
    path, hop = message.path, message.hop
    require(1 <= hop <= len(path), "hop-out-of-range")
    receiver = path[hop].peer if hop < len(path) else path[0].peer
    require(receiver == me, "wrong-receiver")
    require(path[hop - 1].peer == sender, "not-the-hop-before")


def _check_boundary(packet: TensorPacket, limits: WireLimits) -> None:
    require(packet.shape == limits.boundary_shape, "wrong-shape")
    require(packet.dtype in BOUNDARY_DTYPES, "wrong-dtype")


def _check_flat(packet: TensorPacket, bytes_max: int) -> None:
    require(packet.dtype == "float32", "wrong-dtype")
    require(len(packet.shape) == 1, "wrong-shape")
    # int8 carries a quarter of the bytes, but must decode to a vector of the same cap
    require(packet.shape[0] * BYTES_PER_ELEMENT_MAX <= bytes_max, "wrong-shape")


def _check_chunk(message: WeightsChunk, limits: WireLimits) -> None:
    require(message.stage < limits.num_stages, "stage-out-of-range")
    require(message.count <= limits.chunks_max, "too-many-chunks")
    require((message.packet is None) == (message.count == 0), "chunk-without-data")
    if message.packet is not None:
        require(message.index < message.count, "chunk-out-of-range")
        _check_flat_or_bytes(message.packet, limits)


def _check_flat_or_bytes(packet: TensorPacket, limits: WireLimits) -> None:
    require(len(packet.shape) == 1, "wrong-shape")
    require(packet.shape[0] <= limits.chunk_bytes_max, "wrong-shape")
