"""A stage's parameters as one fp32 vector, their gradients as another.

The averaging, the clipping and the optimizer then are a few operations on vectors, whatever the number of layers.
Invariant: every parameter and its `.grad` are views of the two vectors; autograd adds into them in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from peer.model.stage import is_head, schema_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Neighbouring parameters that are divided by the same rows and decayed alike."""

    head: bool  # gradient from loss passes; else from backward passes
    decayed: bool  # matrices are, norms are not
    span: slice


class FlatStage:
    """Order of the vectors: body before head, matrices before norms, then as in the module."""

    def __init__(self, module: nn.Module) -> None:
        named = sorted(module.named_parameters(), key=lambda item: (is_head(item[0]), item[1].ndim < 2))
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named}
        self.schema = schema_hash(self.shapes)
        self.weights = torch.cat([parameter.detach().float().flatten() for _, parameter in named])
        self.gradient = torch.zeros_like(self.weights)
        weights, gradients = self.by_name(self.weights), self.by_name(self.gradient)
        for name, parameter in named:
            parameter.data = weights[name]
            parameter.grad = gradients[name]
        self.parts = tuple(self._parts())

    @property
    def size(self) -> int:
        return self.weights.numel()

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector in this order, under the exported names."""
        pieces = flat.split([math.prod(shape) for shape in self.shapes.values()])
        return {name: piece.view(self.shapes[name]) for name, piece in zip(self.shapes, pieces, strict=True)}

    def _parts(self) -> list[Part]:
        ends: dict[tuple[bool, bool], int] = {}
        end = 0
        for name, shape in self.shapes.items():
            end += math.prod(shape)
            ends[is_head(name), len(shape) >= 2] = end
        starts = (0, *ends.values())
        return [
            Part(head=head, decayed=decayed, span=slice(start, end))
            for (head, decayed), start, end in zip(ends, starts, ends.values(), strict=False)
        ]
