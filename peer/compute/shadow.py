"""Shadows: peers of a stage keep the slow weights of the stage after it, so that its last replica may die.

A ring: the last stage's peers keep stage 0's (embedding, final norm and head included). The owner is one replica, and
one peer follows one replica: slow weights of two are never mixed.

    whole    the owner's slow weights, fp32 or bf16, every `shadow_every` rounds
    change   their difference from what the holder has, in any codec, at an outer step

Invariant: owner and holder compute the same bits, since a change is measured from what the holder has, with all that
earlier codecs lost. So one sha256 proves a shadow, and no error builds up.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.messages import TensorPacket
from protocols.run_spec import Codec, RunSpec
from protocols.tensor_codec import check_packet, decode, encode, encoded_bytes

WHOLE_CODECS = (Codec.RAW, Codec.BF16)  # all others are too coarse to train on from
DTYPE = "float32"  # of what a shadow decodes to, whatever it travels as


def shadowed_stage(holder_stage: int, num_stages: int) -> int:
    """Whose weights the peers of `holder_stage` keep."""
    return (holder_stage + 1) % num_stages


def holder_stage(stage: int, num_stages: int) -> int:
    """Who keeps the weights of `stage`."""
    return (stage - 1) % num_stages


def is_due(round_: int, shadow_every: int) -> bool:
    """Whether a whole copy is sent after this round; every peer of a stage sends in the same ones."""
    return round_ % shadow_every == 0


def traffic_share(spec: RunSpec, stage_size: int, codec: Codec, shadow_every: int, originators: int) -> float:
    """Bytes of whole copies / bytes that cross one border of the stage, there and back; `stage_size` in weights."""
    shadow_bytes = encoded_bytes((stage_size,), DTYPE, codec) / shadow_every
    return shadow_bytes / (2 * spec.boundary_bytes * spec.rounds.microbatches * originators)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowUpdate:
    """What an owner sends. `sha256` is of the fp32 weights that the holder has afterwards."""

    stage: int
    schema: str
    round: int
    outer_step: int
    is_whole: bool
    packet: TensorPacket
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A stage as it was at the end of `round`, after `outer_step` outer steps."""

    weights: Tensor  # flat fp32, in the order of the stage's schema
    round: int
    outer_step: int


class ShadowOwner:
    """The side of the replica that is followed. `codec` is of whole copies."""

    def __init__(self, stage: int, schema: str, codec: Codec) -> None:
        if codec not in WHOLE_CODECS:
            raise LocalProtocolError(f"{codec.value} is for changes; a whole copy in it is too coarse")
        self._stage = stage
        self._schema = schema
        self._codec = codec
        self._reference: Tensor | None = None  # what the holder has

    def whole(self, slow_weights: Tensor, *, round_: int, outer_step: int) -> ShadowUpdate:
        """All of it; the first update must be this."""
        packet = encode(slow_weights.detach().cpu().clone(), self._codec)  # training writes to the original
        self._reference = decode(packet).clone()
        return self._update(packet, round_, outer_step, is_whole=True)

    def change(
        self, slow_weights: Tensor, codec: Codec, *, round_: int, outer_step: int
    ) -> ShadowUpdate | None:
        """Since the last update; None where the holder has nothing yet."""
        if self._reference is None:
            return None
        packet = encode(slow_weights.detach().cpu() - self._reference, codec)
        self._reference.add_(decode(packet))
        return self._update(packet, round_, outer_step, is_whole=False)

    def _update(self, packet: TensorPacket, round_: int, outer_step: int, *, is_whole: bool) -> ShadowUpdate:
        assert self._reference is not None, "there is an update"
        return ShadowUpdate(
            stage=self._stage,
            schema=self._schema,
            round=round_,
            outer_step=outer_step,
            is_whole=is_whole,
            packet=packet,
            sha256=weights_sha256(self._reference),
        )


class ShadowHolder:
    """The side of the peer that keeps: one stage's weights, in CPU memory, at most `bytes_max` of them."""

    def __init__(self, stage: int, schema: str, size: int, bytes_max: int) -> None:
        """`size` in weights. LocalProtocolError where the stage does not fit into `bytes_max`."""
        if encoded_bytes((size,), DTYPE, Codec.RAW) > bytes_max:
            raise LocalProtocolError(f"a shadow of {size} weights needs more than {bytes_max} bytes")
        self._stage = stage
        self._schema = schema
        self._size = size
        self._held: Restored | None = None
        self._sha256 = ""

    @property
    def num_bytes(self) -> int:
        return 0 if self._held is None else self._held.weights.nbytes

    @property
    def round(self) -> int | None:
        """Of what is held."""
        return None if self._held is None else self._held.round

    def take(self, update: ShadowUpdate) -> None:
        """RemoteProtocolError, and nothing changed, for what is foreign, unfit, older, or leads to other bits.

        After a refused change the holder asks for a whole copy.
        """
        if (update.stage, update.schema) != (self._stage, self._schema):
            raise RemoteProtocolError("wrong-stage", f"stage {update.stage}, schema {update.schema}")
        held = self._held
        if held is not None and (update.outer_step, update.round) < (held.outer_step, held.round):
            raise RemoteProtocolError("stale", f"round {update.round} after round {held.round}")
        if update.is_whole and update.packet.codec not in WHOLE_CODECS:
            raise RemoteProtocolError("wrong-codec", f"a whole copy in {update.packet.codec.value}")
        check_packet(update.packet, shape=(self._size,), dtype=DTYPE)
        weights = decode(update.packet).clone()  # the packet's memory is the transport's
        if not update.is_whole:
            if held is None:
                raise RemoteProtocolError("no-base", "a change of a shadow that was never sent")
            weights.add_(held.weights)
        if weights_sha256(weights) != update.sha256:
            raise RemoteProtocolError("wrong-hash", f"stage {update.stage}, round {update.round}")
        if not bool(weights.isfinite().all()):
            raise RemoteProtocolError("non-finite", "a change that overflows")
        self._held = Restored(weights=weights, round=update.round, outer_step=update.outer_step)
        self._sha256 = update.sha256

    def restore(self, *, oldest_round: int = 0) -> Restored | None:
        """A copy of what is held; None where there is none, it is older than `oldest_round`, or memory went bad."""
        held = self._held
        if held is None or held.round < oldest_round or weights_sha256(held.weights) != self._sha256:
            return None
        return Restored(weights=held.weights.clone(), round=held.round, outer_step=held.outer_step)

    def forget(self) -> None:
        """Its owner is another replica now, or this peer changes its stage."""
        self._held = None
        self._sha256 = ""


def weights_sha256(weights: Tensor) -> str:
    return hashlib.sha256(weights.detach().contiguous().cpu().view(torch.uint8).numpy().data).hexdigest()
