"""The cut: stage 0 is both ends (embedding, first layers, final norm, head, loss), the others slices of layers.

Invariant: a stage's `state_dict` names are the exported ones, so all stages' dicts together are the model; and a
parameter's first value depends on the run's seed and that name alone: the same on every peer, under any cut.

Shape suffixes as in `peer.model.llama`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peer.model.llama import Linear, Llama, Trunk
from protocols.errors import LocalProtocolError
from protocols.run_spec import RunSpec

Value = TypeVar("Value")

INIT_STD = 0.02
_HEAD_PREFIXES = ("model.norm.", "lm_head.")
_OUTPUT_PROJECTIONS = ("o_proj.weight", "down_proj.weight")  # they write into the residual stream


class FirstStage(nn.Module):
    """Embeds tokens and computes the loss."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        self.model = Trunk(spec.model, spec.layer_range(0), ends=True)
        self.lm_head = Linear(spec.model.hidden_size, spec.model.vocab_size)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """Embedding and first layers -> [B, L, D]."""
        return self.model(self.model.embed_tokens(tokens_BL))

    def loss(self, x_BLD: Tensor, targets_BL: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token; the logarithm in fp32."""
        logits_BLV = self.lm_head(self.model.norm(x_BLD))
        return F.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten())


class MiddleStage(nn.Module):
    """A slice of layers: [B, L, D] -> [B, L, D]."""

    def __init__(self, spec: RunSpec, stage: int) -> None:
        super().__init__()
        self.model = Trunk(spec.model, spec.layer_range(stage), ends=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.model(x_BLD)


Stage: TypeAlias = "FirstStage | MiddleStage"


def build_stage(spec: RunSpec, stage: int) -> Stage:
    """A stage on the CPU with its seeded first weights."""
    if not 0 <= stage < spec.num_stages:
        raise LocalProtocolError(f"stage {stage} of {spec.num_stages}")
    module = FirstStage(spec) if stage == 0 else MiddleStage(spec, stage)
    _initialise(module, spec)
    return module


def build_model(spec: RunSpec) -> Llama:
    """The uncut model with the same first weights as the run's stages."""
    module = Llama(spec.model)
    _initialise(module, spec)
    return module


def _initialise(module: nn.Module, spec: RunSpec) -> None:
    """Norms one, all else normal; GPT-2's 1/sqrt(2 layers) for what writes into the residual stream."""
    residual_scale = (2 * spec.model.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            digest = hashlib.sha256(f"{spec.seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            std = INIT_STD * (residual_scale if name.endswith(_OUTPUT_PROJECTIONS) else 1.0)
            parameter.normal_(0.0, std, generator=generator)


def is_head(name: str) -> bool:
    """Whether a parameter gets its gradient from loss passes; all others get theirs from backward passes."""
    return name.startswith(_HEAD_PREFIXES)


def schema_hash(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """16 hex digits over names and shapes in this order: equal where the same flat vector means the same."""
    text = json.dumps([[name, list(shape)] for name, shape in shapes.items()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def renumbered(spec: RunSpec, named: Mapping[str, Value], source: int, target: int) -> dict[str, Value]:
    """What belongs to the parameters of middle stage `source`, under the names that middle stage `target` uses."""
    if min(source, target) < 1:
        raise LocalProtocolError("stage 0 has another shape than the middle stages")
    shift = spec.layer_range(target).start - spec.layer_range(source).start
    renamed = {}
    for name, value in named.items():
        prefix, layers, index, rest = name.split(".", 3)  # model.layers.7.mlp.up_proj.weight
        renamed[f"{prefix}.{layers}.{int(index) + shift}.{rest}"] = value
    return renamed
