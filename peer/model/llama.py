"""LLaMa in plain torch: what a layer computes, and the whole model for reference, export checks and sampling.

Parameter names are Hugging Face's, and layers are residual, so a skipped stage is the identity.

Shape suffixes: B rows, L tokens, D model width, N heads, K key-value heads, H head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protocols.run_spec import ModelSpec


class Linear(nn.Linear):
    """Without bias and without values: whoever builds a model writes every element.

    (Building on the "meta" device would spare the default values too, but its first use imports sympy: seconds.)
    """

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__(in_width, out_width, bias=False)

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """The same for a table."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """Root-mean-square norm; fp32 inside whatever the activations are."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BLD: Tensor) -> Tensor:
        wide_BLD = x_BLD.float()
        wide_BLD = wide_BLD * torch.rsqrt(wide_BLD.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide_BLD.to(x_BLD.dtype)


@lru_cache(maxsize=8)
def rotary_table(
    num_tokens: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [L, 1, H] of the rotary embedding; angles in fp32, cast last."""
    with torch.inference_mode(False):  # a sampler may fill the cache, and training use it later
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angle = torch.outer(torch.arange(num_tokens, dtype=torch.float32), 1.0 / theta**exponent)
        angle_L1H = torch.cat((angle, angle), dim=-1)[:, None, :]
        return angle_L1H.cos().to(device, dtype), angle_L1H.sin().to(device, dtype)


def rotate(x_BLNH: Tensor, cos_L1H: Tensor, sin_L1H: Tensor) -> Tensor:
    """Rotary embedding on the two halves of each head (the "rotate-half" layout of the exported weights)."""
    low, high = x_BLNH.chunk(2, dim=-1)
    return x_BLNH * cos_L1H + torch.cat((-high, low), dim=-1) * sin_L1H


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.theta = spec.rope_theta
        self.grouped = spec.num_key_value_heads != spec.num_attention_heads
        kv_width = spec.num_key_value_heads * spec.head_dim
        self.q_proj = Linear(spec.hidden_size, spec.hidden_size)
        self.k_proj = Linear(spec.hidden_size, kv_width)
        self.v_proj = Linear(spec.hidden_size, kv_width)
        self.o_proj = Linear(spec.hidden_size, spec.hidden_size)

    def forward(self, x_BLD: Tensor) -> Tensor:
        rows, num_tokens, _ = x_BLD.shape
        heads = (rows, num_tokens, -1, self.head_dim)
        q_BLNH = self.q_proj(x_BLD).view(heads)
        k_BLKH = self.k_proj(x_BLD).view(heads)
        v_BLKH = self.v_proj(x_BLD).view(heads)
        cos, sin = rotary_table(num_tokens, self.head_dim, self.theta, x_BLD.device, q_BLNH.dtype)
        out_BNLH = F.scaled_dot_product_attention(
            rotate(q_BLNH, cos, sin).transpose(1, 2),
            rotate(k_BLKH, cos, sin).transpose(1, 2),
            v_BLKH.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.grouped,
        )
        return self.o_proj(out_BNLH.transpose(1, 2).reshape(rows, num_tokens, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))


class Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = FeedForward(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD))
        return x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))


class Trunk(nn.Module):
    """What Hugging Face names `model.`: some layers, by their number in the whole model, and perhaps both ends."""

    def __init__(self, spec: ModelSpec, layers: Iterable[int], *, ends: bool) -> None:
        super().__init__()
        if ends:
            self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
            self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        # a dict, not a list: the layer's global number becomes part of the parameter's name
        self.layers = nn.ModuleDict({str(index): Layer(spec) for index in layers})

    def forward(self, x_BLD: Tensor, layers: Iterable[int] | None = None) -> Tensor:
        """All layers in turn; or those numbered `layers`, in that order."""
        for layer in self.layers.values() if layers is None else (self.layers[str(n)] for n in layers):
            x_BLD = layer(x_BLD)
        return x_BLD


class Llama(nn.Module):
    """All layers and both ends in one module: `load_state_dict` of the stages' weights put together."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.model = Trunk(spec, range(spec.num_hidden_layers), ends=True)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size)

    def forward(self, tokens_BL: Tensor, layers: Iterable[int] | None = None) -> Tensor:
        """Logits [B, L, V]; with some layers left out, or exchanged, where `layers` says so."""
        return self.head(self.model(self.model.embed_tokens(tokens_BL), layers))

    def head(self, x_BLD: Tensor) -> Tensor:
        """Logits [B, L, V] of what the last layer gave."""
        return self.lm_head(self.model.norm(x_BLD))
