"""Text from an exported folder, with our own model class.

Shape suffixes: B rows, L tokens, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from peer.export import WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from peer.model.llama import Llama
from peer.partial import check_order, layers_of, read_run
from peer.tokens import load_tokenizer, special_tokens
from protocols.errors import ConfigError, describe_errors
from protocols.run_spec import ModelSpec

UNFINISHED_CHARACTER = "\ufffd"  # what the decoder gives for the first bytes of a character


def load_model(folder: Path) -> tuple[Llama, ModelSpec]:
    """The model of an exported folder, on the CPU in fp32."""
    spec = _read_config(folder)
    try:
        index = folder / WEIGHTS_INDEX_NAME
        names = [WEIGHTS_NAME]
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        state: dict[str, Tensor] = {}
        for name in names:
            state.update(load_file(folder / Path(name).name))
        with torch.device("meta"):
            model = Llama(spec)
        model.load_state_dict(state, assign=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"{folder}: weights cannot be read ({first_line}); export again") from None
    if not all(bool(weight.isfinite().all()) for weight in state.values()):
        raise ConfigError(
            f"{folder}: weights are not finite: the run has diverged; export an earlier checkpoint"
        )
    return model.float().eval(), spec


def _read_config(folder: Path) -> ModelSpec:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        is_ours = config["model_type"] == "llama" and config["tie_word_embeddings"] is False
    except (OSError, ValueError, TypeError, KeyError):
        is_ours = False
    if not is_ours:
        raise ConfigError(
            f"{folder}: not an exported model (no config.json of an untied LLaMa); see gossamer export"
        )
    sizes = {name: config[name] for name in ModelSpec.model_fields if name in config}
    try:
        return ModelSpec.model_validate(sizes)
    except ValidationError as error:
        raise ConfigError(f"{file}: {describe_errors(error)}") from None


@torch.inference_mode()
def generate(
    folder: Path,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    stages: Sequence[int] | None = None,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """The continuation of `prompt`, without it. Temperature 0 is greedy; `top_k` 0 takes all entries.

    `stages` run in that order, the others are left out; None: the whole model. `on_text` gets the pieces as they
    come. Ends at the end token. The same seed gives the same text.
    """
    if max_new_tokens < 1 or not 0 <= temperature < float("inf") or top_k < 0 or not 0 <= seed < 1 << 63:
        raise ConfigError(
            "max_new_tokens must be at least 1; temperature, top_k and seed at least 0 and finite"
        )
    model, spec = load_model(folder)
    layers = None if stages is None else _layers(folder, spec, stages)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    special = special_tokens(tokenizer)
    ids = [tokenizer.token_to_id(special.bos), *tokenizer.encode(prompt, add_special_tokens=False).ids]
    end_id, num_prompt_ids, shown = tokenizer.token_to_id(special.eos), len(ids), ""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_new_tokens):
        context_BL = torch.tensor([ids[-spec.max_position_embeddings :]])
        next_id = pick(model(context_BL, layers)[0, -1], temperature, top_k, generator)
        if next_id == end_id:
            break
        ids.append(next_id)
        shown += _emit(_decode(tokenizer, ids[num_prompt_ids:]), shown, on_text)
    return _decode(tokenizer, ids[num_prompt_ids:])


def _layers(folder: Path, model: ModelSpec, stages: Sequence[int]) -> list[int]:
    run = read_run(folder, model)
    check_order(run, stages)
    return layers_of(run, stages)


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def _emit(text: str, shown: str, on_text: Callable[[str], None] | None) -> str:
    """Hand on what is new, unless it ends inside a character."""
    if text.endswith(UNFINISHED_CHARACTER):
        return ""
    new = text[len(shown) :]
    if on_text is not None and new:
        on_text(new)
    return new


def pick(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """The next token's id."""
    if temperature == 0:
        return int(logits_V.argmax())
    if 0 < top_k < logits_V.numel():
        best, ids = logits_V.topk(top_k)
    else:
        best, ids = logits_V, torch.arange(logits_V.numel())
    chances = torch.softmax(best.float() / temperature, dim=-1)
    return int(ids[torch.multinomial(chances, 1, generator=generator)])
