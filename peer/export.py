"""One Hugging Face folder from one replica of each stage.

The stages' parameters carry the exported names already, so putting them together is a union of dicts.
Invariant: the target appears whole or not at all, and nothing but an earlier export is ever replaced.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from peer.checkpoint import CheckpointMeta, StoredCheckpoint, list_checkpoints
from peer.model.llama import Llama
from peer.tokens import SpecialTokens, file_sha256, load_tokenizer, special_tokens, tokenizer_path
from protocols.errors import ConfigError
from protocols.run_spec import ModelSpec, RunSpec

WEIGHT_FILE_BYTES_MAX = 4 << 30
WEIGHTS_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
PROVENANCE_NAME = "gossamer.json"  # marks a folder as our export
_FIXED_NAMES = frozenset(
    {WEIGHTS_NAME, WEIGHTS_INDEX_NAME, PROVENANCE_NAME, "README.md", "config.json", "generation_config.json"}
    | {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
)


def export_from_checkpoints(
    folders: Sequence[Path], target: Path, *, facts: Mapping[str, Any] | None = None
) -> Path:
    """Export from peers' checkpoint folders: of each stage the replica at the highest round, saved last.

    ConfigError names the stages that no folder has, or the runs when there are several.
    """
    by_folder = [list_checkpoints(folder) for folder in folders]
    stored = list(chain.from_iterable(by_folder))
    spec = _only_spec(stored, folders)
    stored.sort(key=lambda checkpoint: (checkpoint.meta.round, checkpoint.sequence), reverse=True)
    stages = [_newest_of_stage(stored, stage) for stage in range(spec.num_stages)]
    missing = ", ".join(str(stage) for stage, found in enumerate(stages) if found is None)
    if missing:
        raise ConfigError(
            f"no usable checkpoint of stage {missing} in {', '.join(map(str, folders))}; "
            f"add the checkpoint folder of a peer that serves it"
        )
    names = weight_shapes(spec.model)  # a checkpoint also holds the optimizers' state
    state = {name: tensors[name] for tensors, _ in filter(None, stages) for name in names if name in tensors}
    counted = {
        "rounds": max(meta.round for _, meta in filter(None, stages)),
        "tokens": sum(map(_tokens_originated, by_folder)),
    }
    tokenizer_file = tokenizer_path(spec.data.tokenizer)
    return write_hf_folder(
        target, spec, state, tokenizer_file=tokenizer_file, facts=counted | dict(facts or {})
    )


def _tokens_originated(newest_first: Sequence[StoredCheckpoint]) -> int:
    """Tokens that one peer has trained on as an originator; 0 for a middle stage's."""
    own = (checkpoint.meta.runtime for checkpoint in newest_first if checkpoint.meta.stage == 0)
    return int(next(own, {}).get("tokens_trained", 0))


def _newest_of_stage(
    stored: Sequence[StoredCheckpoint], stage: int
) -> tuple[dict[str, Tensor], CheckpointMeta] | None:
    """The first whole one of `stage`."""
    for checkpoint in stored:
        if checkpoint.meta.stage == stage:
            tensors = checkpoint.read_tensors()
            if tensors is not None:
                return tensors, checkpoint.meta
    return None


def _only_spec(stored: Sequence[StoredCheckpoint], folders: Sequence[Path]) -> RunSpec:
    specs = {checkpoint.meta.run_id: checkpoint.meta.spec for checkpoint in stored}
    if not specs:
        raise ConfigError(f"no checkpoint in {', '.join(map(str, folders)) or 'the folders given'}")
    if len(specs) > 1:
        runs = ", ".join(sorted(specs))
        raise ConfigError(f"checkpoints of several runs ({runs}); give the folders of one")
    return next(iter(specs.values()))


def write_hf_folder(
    target: Path,
    spec: RunSpec,
    state: Mapping[str, Tensor],
    *,
    tokenizer_file: Path,
    facts: Mapping[str, Any],
    weight_file_bytes_max: int = WEIGHT_FILE_BYTES_MAX,
) -> Path:
    """Write what `AutoModelForCausalLM` and `AutoTokenizer` load. `facts` go to the model card, in order."""
    _check_state(spec.model, state)
    _check_tokenizer(spec, tokenizer_file)
    _refuse_foreign_target(target)
    temporary = target.with_name(f".{target.name}.new-{os.getpid()}")
    replaced = target.with_name(f".{target.name}.old-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        _write_texts(temporary, spec, tokenizer_file, facts, dtype=state["lm_head.weight"].dtype)
        _write_weights(temporary, state, weight_file_bytes_max)
        if target.exists():
            target.rename(replaced)
        temporary.rename(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"export to {target}: {reason}; free space or choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
    return target


def weight_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every exported parameter's name and shape."""
    with torch.device("meta"):
        return {name: tuple(weight.shape) for name, weight in Llama(model).state_dict().items()}


def _check_state(model: ModelSpec, state: Mapping[str, Tensor]) -> None:
    expected = weight_shapes(model)
    found = {name: tuple(weight.shape) for name, weight in state.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        raise ConfigError(
            f"{len(wrong)} weights are missing, unexpected or of another shape; first {wrong[0]} "
            f"(expected {expected.get(wrong[0], 'nothing')}, found {found.get(wrong[0], 'nothing')})"
        )


def _check_tokenizer(spec: RunSpec, tokenizer_file: Path) -> None:
    wanted, found = spec.data.tokenizer_sha256, file_sha256(tokenizer_file)
    if wanted and wanted != found:
        raise ConfigError(f"{tokenizer_file}: SHA-256 {found}, the run's has {wanted}; use that file")


def _refuse_foreign_target(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"export target {target} is a file; choose a folder")
    names = {entry.name for entry in target.iterdir()}
    others = sorted(name for name in names - _FIXED_NAMES if not name.endswith(".safetensors"))
    if names and (others or PROVENANCE_NAME not in names):
        kept = others[0] if others else sorted(names)[0]
        raise ConfigError(f"export target {target} holds other files ({kept}); choose a new or empty folder")


def _write_weights(folder: Path, state: Mapping[str, Tensor], weight_file_bytes_max: int) -> None:
    groups = _groups(state, weight_file_bytes_max)
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = [WEIGHTS_NAME]
    for name, group in zip(names, groups, strict=True):
        tensors = {key: state[key].detach().cpu().contiguous() for key in group}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        # the library makes files that only their owner can read: let these be as readable as the texts
        (folder / name).chmod((folder / "config.json").stat().st_mode)
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(weight.nbytes for weight in state.values())},
            "weight_map": {key: name for name, group in zip(names, groups, strict=True) for key in group},
        }
        _write_json(folder / WEIGHTS_INDEX_NAME, index)


def _groups(state: Mapping[str, Tensor], num_bytes_max: int) -> list[list[str]]:
    """Names cut, in order, into groups of at most so many bytes; a larger tensor is alone in its group."""
    groups: list[list[str]] = [[]]
    num_bytes = 0
    for name, weight in state.items():
        if groups[-1] and num_bytes + weight.nbytes > num_bytes_max:
            groups.append([])
            num_bytes = 0
        groups[-1].append(name)
        num_bytes += weight.nbytes
    return groups


def _write_texts(
    folder: Path, spec: RunSpec, tokenizer_file: Path, facts: Mapping[str, Any], *, dtype: torch.dtype
) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    special = special_tokens(tokenizer)
    ids = {
        f"{role}_token_id": tokenizer.token_to_id(text)
        for role, text in special._asdict().items()
        if text is not None
    }
    _write_json(folder / "config.json", hf_config(spec.model, dtype) | ids)
    _write_json(folder / "generation_config.json", ids)
    shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    texts = {f"{role}_token": text for role, text in special._asdict().items() if text is not None}
    _write_json(folder / "special_tokens_map.json", texts)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.model.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config | texts)
    provenance = {"run_id": spec.run_id, "facts": dict(facts), "spec": json.loads(spec.to_json())}
    _write_json(folder / PROVENANCE_NAME, provenance)
    (folder / "README.md").write_text(model_card(spec, facts, special), encoding="utf-8")


def hf_config(model: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` of a LLaMa; our sizes have its names already."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **model.model_dump(),
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def model_card(spec: RunSpec, facts: Mapping[str, Any], special: SpecialTokens) -> str:
    num_parameters = sum(torch.Size(shape).numel() for shape in weight_shapes(spec.model).values())
    rows = {
        "run": f"`{spec.run_id}`",
        "parameters": num_parameters,
        "layers": spec.model.num_hidden_layers,
        "width": spec.model.hidden_size,
        "text": f"`{spec.data.corpus}`",
        "tokenizer": f"`{spec.data.tokenizer}`",
        "context in training": f"{spec.rounds.seq_len} tokens",
        **{name.replace("_", " "): value for name, value in facts.items()},
    }
    template = (files("peer") / "assets" / "model_card.md").read_text(encoding="utf-8")
    return template.format(
        name=spec.name,
        table="\n".join(f"| {name} | {_in_words(value)} |" for name, value in rows.items()),
        num_stages=spec.num_stages,
        rows=spec.rounds.rows,
        path_stages=spec.path_stages,
        inner_steps=spec.outer.inner_steps,
        mode=spec.outer.mode.value,
        bos=special.bos,
        eos=special.eos,
    )


def _in_words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
