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
from protocols.run_spec import OuterMode, OuterSpec
from protocols.tensor_codec import check_packet, decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    step: tuple[int, int]  # outer step and pair round
    fast_weights: Tensor  # of the fragment, as they were
    own_half: Tensor  # as the partner decodes it
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """As in protocols.events.OuterStepDone."""

    with_partner: bool
    apart: float = 0.0
    cosine: float = 0.0


class SlowWeights:
    """The paper's phi (`weights`) and delta (`momentum`), fp32 [P]."""

    def __init__(self, spec: OuterSpec, fast_weights: Tensor) -> None:
        self._spec = spec
        self._prepared: _Prepared | None = None
        self.limit = noloco.PullLimit()
        self.weights = fast_weights.clone()
        self.momentum = torch.zeros_like(fast_weights)

    def prepare(
        self, outer_step: int, pair_round: int, fast_weights: Tensor, *, weight: float = 1.0
    ) -> TensorPacket:
        """Our half, from the weights of this moment."""
        part = self._spec.part(outer_step, len(self.weights))
        phi, theta = self.weights[part], fast_weights[part].clone()
        if pair_round == 0:
            delta = self.momentum[part]
            half = noloco.half(self._spec, phi=phi, theta=theta, delta=delta, weight=weight)
        else:
            half = phi.clone()
        packet = encode(half, self._spec.codec)
        own_half = decode(packet).to(half.device)
        step = (outer_step, pair_round)
        self._prepared = _Prepared(step=step, fast_weights=theta, own_half=own_half, weight=weight)
        return packet

    def apply(
        self, outer_step: int, pair_round: int, fast_weights: Tensor, packet: TensorPacket | None
    ) -> Outcome:
        """Take the step, moving `fast_weights` in place; alone without a half, or with one that is not fit."""
        part = self._spec.part(outer_step, len(self.weights))
        prepared, self._prepared = self._prepared, None
        his = None
        if prepared is not None and prepared.step == (outer_step, pair_round):
            his = self._fit(packet, prepared.own_half)
        if prepared is None or his is None:
            if pair_round == 0:
                self._move(part, fast_weights, fast_weights[part].clone(), None, weight=1.0)
            return Outcome(with_partner=False)
        halves = (prepared.own_half, his)
        outcome = self._compare(part, *halves)
        if pair_round == 0:
            self._move(part, fast_weights, prepared.fast_weights, halves, weight=prepared.weight)
        else:
            settled = noloco.settle(self.weights[part], halves, self.limit)
            fast_weights[part] += settled - self.weights[part]
            self.weights[part] = settled
        return outcome

    def _move(
        self,
        part: slice,
        fast_weights: Tensor,
        theta: Tensor,
        halves: tuple[Tensor, Tensor] | None,
        *,
        weight: float,
    ) -> None:
        phi, delta = self.weights[part], self.momentum[part]
        self.weights[part], self.momentum[part] = noloco.outer_step(
            self._spec, phi=phi, theta=theta, delta=delta, halves=halves, weight=weight, limit=self.limit
        )
        # in this order exact where nothing was trained meanwhile
        fast_weights[part] = fast_weights[part].sub_(theta).add_(self.weights[part])

    def _compare(self, part: slice, own: Tensor, his: Tensor) -> Outcome:
        """How far the two replicas are apart, and whether they go the same way."""
        phi = self.weights[part]
        base = phi * self._spec.gamma if self._spec.mode is OuterMode.PAPER else phi
        apart = float(torch.dist(own, his) / phi.norm().clamp(min=torch.finfo(torch.float32).tiny))
        cosine = float(torch.cosine_similarity(own - base, his - base, dim=0))
        return Outcome(with_partner=True, apart=apart, cosine=cosine)

    def _fit(self, packet: TensorPacket | None, own: Tensor) -> Tensor | None:
        if packet is None:
            return None
        try:
            check_packet(packet, shape=tuple(own.shape), dtype="float32")
        except RemoteProtocolError:
            return None
        return decode(packet).to(own.device)

    def restart(self, fast_weights: Tensor) -> None:
        """The fast weights are other ones now, and no slow weights came with them."""
        self.weights.copy_(fast_weights)
        self.forget_prepared()
        self.momentum.zero_()

    def forget_prepared(self) -> None:
        self._prepared = None
