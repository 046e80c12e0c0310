"""Our layers are Hugging Face's, number for number."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peer.model.llama import Llama, rotary_table
from protocols.run_spec import ModelSpec


def a_model_spec(num_key_value_heads: int, rope_theta: float = 10_000.0) -> ModelSpec:
    return ModelSpec(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=64,
        rope_theta=rope_theta,
    )


def both_models(spec: ModelSpec) -> tuple[Llama, LlamaForCausalLM]:
    """With the same large weights, so that agreement is not an accident of small numbers."""
    config = LlamaConfig(**spec.model_dump(), tie_word_embeddings=False, attn_implementation="sdpa")
    theirs = LlamaForCausalLM(config).eval()
    ours = Llama(spec)
    generator = torch.Generator().manual_seed(3)
    state = {
        name: torch.randn(weight.shape, generator=generator) * 0.1 + (1.0 if weight.ndim == 1 else 0.0)
        for name, weight in ours.state_dict().items()
    }
    ours.load_state_dict(state)
    theirs.load_state_dict(state)
    return ours, theirs


@pytest.mark.parametrize(("num_key_value_heads", "rope_theta"), [(4, 1e4), (2, 1e4), (1, 5e5)])
def test_logits_equal_those_of_transformers(num_key_value_heads: int, rope_theta: float) -> None:
    """An exported model must say elsewhere what it says here (F8)."""
    ours, theirs = both_models(a_model_spec(num_key_value_heads, rope_theta))
    tokens = torch.randint(97, (3, 50), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_bf16_logits_equal_those_of_transformers() -> None:
    """The norm is fp32 inside and the rotary table is cast last, or bf16 drifts apart."""
    ours, theirs = both_models(a_model_spec(2))
    tokens = torch.randint(97, (3, 50), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        torch.testing.assert_close(
            ours.bfloat16()(tokens), theirs.bfloat16()(tokens).logits, atol=0.05, rtol=0
        )


def test_no_token_sees_a_later_one() -> None:
    """Else the loss falls beautifully, and sampling talks nonsense."""
    ours, _ = both_models(a_model_spec(2))
    tokens = torch.randint(97, (1, 20), generator=torch.Generator().manual_seed(5))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 97
    with torch.no_grad():
        before, after = ours(tokens), ours(changed)
    assert torch.equal(before[0, :12], after[0, :12])
    assert not torch.equal(before[0, 12:], after[0, 12:])


def test_a_table_made_while_sampling_serves_training_too() -> None:
    """The cache is shared by the process; tensors of inference mode cannot be saved for backward."""
    ours, _ = both_models(a_model_spec(2))
    rotary_table.cache_clear()
    tokens = torch.zeros(1, 7, dtype=torch.int64)
    with torch.inference_mode():
        ours(tokens)
    ours(tokens).sum().backward()
