"""A replica's side of the averaging: slow weights, outer momentum, and the half under way (protocols.noloco).

Invariant: training goes on between `prepare` and `apply`; what it adds to the fast weights meanwhile is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protocols import noloco
from protocols.errors import RemoteProtocolError
from protocols.messages import TensorPacket
from protocols.run_spec import OuterSpec
from protocols.tensor_codec import check_packet, decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    outer_step: int
    fast_weights: Tensor  # as they were
    own_half: Tensor  # as the partner decodes it


class SlowWeights:
    """The paper's phi (`weights`) and delta (`momentum`), fp32."""

    def __init__(self, spec: OuterSpec, fast_weights: Tensor) -> None:
        self._spec = spec
        self._prepared: _Prepared | None = None
        self.weights = fast_weights.clone()
        self.momentum = torch.zeros_like(fast_weights)

    def prepare(self, outer_step: int, fast_weights: Tensor) -> TensorPacket:
        """Our half, from the fast weights of this moment."""
        half = noloco.half(self._spec, phi=self.weights, theta=fast_weights, delta=self.momentum)
        packet = encode(half, self._spec.codec)
        self._prepared = _Prepared(
            outer_step=outer_step, fast_weights=fast_weights.clone(), own_half=decode(packet).to(half.device)
        )
        return packet

    def apply(self, outer_step: int, fast_weights: Tensor, packet: TensorPacket | None) -> bool:
        """Take the outer step, moving `fast_weights` in place; False: alone, for want of a half that is fit."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.outer_step != outer_step:
            theta, halves = fast_weights.clone(), None
        else:
            theta, partner_half = prepared.fast_weights, self._fit(packet)
            halves = None if partner_half is None else (prepared.own_half, partner_half)
        self.weights, self.momentum = noloco.outer_step(
            self._spec,
            phi=self.weights,
            theta=theta,
            delta=self.momentum,
            halves=halves,
        )
        fast_weights.sub_(theta).add_(self.weights)  # in this order exact where nothing was trained meanwhile
        return halves is not None

    def _fit(self, packet: TensorPacket | None) -> Tensor | None:
        if packet is None:
            return None
        try:
            check_packet(packet, shape=tuple(self.weights.shape), dtype="float32")
        except RemoteProtocolError:
            return None
        return decode(packet).to(self.weights.device)

    def restart(self, fast_weights: Tensor) -> None:
        """The fast weights are other ones now, and no slow weights came with them."""
        self.weights.copy_(fast_weights)
        self.forget_prepared()
        self.momentum.zero_()

    def forget_prepared(self) -> None:
        self._prepared = None
