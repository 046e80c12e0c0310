"""The exported folder: what `transformers` makes of it, what is refused, and that nothing half-written appears."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peer.checkpoint import CheckpointMeta, save
from peer.export import export_from_checkpoints, hf_config, write_hf_folder
from peer.generate import generate, load_model
from peer.model.llama import Llama
from peer.model.stage import build_stage
from peer.tokens import tokenizer_path
from protocols.errors import ConfigError
from protocols.run_spec import RunSpec, preset


def with_model(**sizes) -> RunSpec:
    fields = preset("pico").model_dump()
    return RunSpec.model_validate(fields | {"model": fields["model"] | sizes})


SPECS = {
    "layers only in middle stages": preset("pico"),
    "first stage with layers": preset("pico", num_stages=2, first_stage_layers=1),
    "as many key-value heads as heads": with_model(num_key_value_heads=4, rope_theta=5e5),
}
SPEC = SPECS["layers only in middle stages"]
TOKENIZER = tokenizer_path("bpe1024")
PROMPT = "The people of the United States"


def stage_state(spec: RunSpec, stage: int) -> dict[str, torch.Tensor]:
    """Weights far from their start: logits near zero would agree by accident."""
    generator = torch.Generator().manual_seed(stage)
    return {
        name: weight.detach() * 3 + 0.1 * torch.randn(weight.shape, generator=generator)
        for name, weight in build_stage(spec, stage).state_dict().items()
    }


def whole_state(spec: RunSpec) -> dict[str, torch.Tensor]:
    return {name: w for stage in range(spec.num_stages) for name, w in stage_state(spec, stage).items()}


def export(target: Path, spec: RunSpec = SPEC, **options) -> Path:
    options = {"tokenizer_file": TOKENIZER, "facts": {"rounds": 300, "tokens": 1_000_000}} | options
    return write_hf_folder(target, spec, whole_state(spec), **options)


@pytest.fixture
def transformers(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return pytest.importorskip("transformers")


def load_in_transformers(transformers, folder: Path):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@torch.inference_mode()
def test_transformers_loads_the_export_and_computes_the_same(transformers, tmp_path, spec):
    """F8: no missing or unexpected key, equal logits, equal greedy text."""
    folder = export(tmp_path / "model", spec)
    theirs = load_in_transformers(transformers, folder)
    ours = Llama(spec.model)
    ours.load_state_dict(whole_state(spec))
    tokens_BL = torch.randint(0, spec.model.vocab_size, (3, 100), generator=torch.Generator().manual_seed(0))
    logits_BLV = ours(tokens_BL)
    assert logits_BLV.std() > 0.5
    assert torch.allclose(theirs(tokens_BL).logits, logits_BLV, atol=1e-4, rtol=0)

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("<|bos|>" + PROMPT, return_tensors="pt", return_token_type_ids=False)
    ids_BL = theirs.generate(**prompt, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(ids_BL[0], skip_special_tokens=True)
    assert PROMPT + generate(folder, PROMPT, max_new_tokens=24, temperature=0) == text
    assert len(text) > len(PROMPT) + 24


def test_tokenizer_of_the_export_loads(transformers, tmp_path):
    """The folder alone is enough to go from text to text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(export(tmp_path / "model"))
    ids = tokenizer(PROMPT)["input_ids"]
    assert tokenizer.decode(ids) == PROMPT
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_large_model_is_written_in_several_files(transformers, tmp_path):
    """More than 4 GiB; here more than 64 KiB."""
    folder = export(tmp_path / "model", weight_file_bytes_max=1 << 16)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    state = whole_state(SPEC)
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in state.values())
    assert index["weight_map"].keys() == state.keys()
    for name, weight in state.items():
        assert torch.equal(load_file(folder / index["weight_map"][name])[name], weight)
    assert not (folder / "model.safetensors").exists()
    load_in_transformers(transformers, folder)
    ours, _ = load_model(folder)
    assert torch.equal(ours.lm_head.weight, state["lm_head.weight"])


def test_half_precision_weights_keep_their_type(transformers, tmp_path):
    """A run in bf16."""
    state = {name: weight.bfloat16() for name, weight in whole_state(SPEC).items()}
    folder = write_hf_folder(tmp_path / "model", SPEC, state, tokenizer_file=TOKENIZER, facts={})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto")
    assert model.dtype == torch.bfloat16


def test_config_says_what_transformers_needs(tmp_path):
    """Read by other programs too: the names are Hugging Face's, rope_theta at top level."""
    config = json.loads((export(tmp_path / "model") / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_theta"] == 10_000.0
    assert config["head_dim"] == 16
    assert config["tie_word_embeddings"] is False
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    assert config["torch_dtype"] == "float32"
    assert hf_config(SPEC.model, torch.bfloat16)["torch_dtype"] == "bfloat16"


def test_model_card_states_run_and_facts(tmp_path):
    """Who finds the folder in a year must learn what it is."""
    card = (
        export(tmp_path / "model", facts={"validation_loss": 3.49123, "tokens": 973_000}) / "README.md"
    ).read_text()
    assert SPEC.run_id in card
    assert "| validation loss | 3.491 |" in card
    assert "| tokens | 973,000 |" in card
    assert "{" not in card


def test_all_files_of_the_export_are_equally_readable(tmp_path):
    """A web server runs as another user."""
    modes = {entry.stat().st_mode for entry in export(tmp_path / "model").iterdir()}
    assert len(modes) == 1


def test_earlier_export_is_replaced_whole(tmp_path):
    """A new export over one in several files: none of the old ones stays."""
    export(tmp_path / "model", weight_file_bytes_max=1 << 16)
    export(tmp_path / "model", facts={"rounds": 301})
    assert json.loads((tmp_path / "model" / "gossamer.json").read_text())["facts"] == {"rounds": 301}
    assert [entry.name for entry in (tmp_path / "model").glob("*.safetensors*")] == ["model.safetensors"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("content", ["thesis.tex", "README.md", "model.safetensors"])
def test_folder_with_other_files_is_refused(tmp_path, content):
    """A typing error must not delete somebody's work; an earlier export with a file added is somebody's work, too."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / content).write_text("mine")
    with pytest.raises(ConfigError, match=f"holds other files \\({content}\\)"):
        export(tmp_path / "model")
    assert (tmp_path / "model" / content).read_text() == "mine"
    shutil.rmtree(tmp_path / "model")
    (export(tmp_path / "model") / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes.txt"):
        export(tmp_path / "model")


def test_file_as_target_is_refused(tmp_path):
    """The name was taken."""
    (tmp_path / "model").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        export(tmp_path / "model")


def test_weights_that_do_not_fit_are_refused(tmp_path):
    """Checkpoints of another release, or of another cut."""
    state = whole_state(SPEC)
    short = dict(state)
    del short["model.norm.weight"]
    for wrong in (short, state | {"phi": torch.zeros(3)}, state | {"model.norm.weight": torch.zeros(3)}):
        with pytest.raises(ConfigError, match=r"1 weights .*(model\.norm\.weight|phi)"):
            write_hf_folder(tmp_path / "model", SPEC, wrong, tokenizer_file=TOKENIZER, facts={})
    assert list(tmp_path.iterdir()) == []


def test_wrong_tokenizer_is_refused(tmp_path):
    """Text in other ids than the model has learned is noise."""
    spec = preset("pico", data={"tokenizer_sha256": "0" * 64})
    with pytest.raises(ConfigError, match="use that file"):
        export(tmp_path / "model", spec)


def save_stage(folder: Path, stage: int, round_number: int, spec: RunSpec = SPEC, scale: float = 1.0) -> Path:
    weights = {name: scale * weight for name, weight in stage_state(spec, stage).items()}
    meta = CheckpointMeta(
        spec=spec,
        stage=stage,
        round=round_number,
        outer_step=0,
        counter=0,
        schema_hash="0" * 16,
        runtime={"tokens_trained": 1024 * round_number},
    )
    return save(folder, weights | {"phi": torch.ones(3)}, meta)


def test_export_takes_the_newest_whole_replica_of_each_stage(tmp_path, caplog):
    """Five peers, two of them originators; stage 1's newest checkpoint is damaged, so the one before is taken."""
    save_stage(tmp_path / "a", 0, 40)
    save_stage(tmp_path / "b", 1, 40)
    damaged = save_stage(tmp_path / "b", 1, 50, scale=2.0)
    (damaged / "state.safetensors").write_bytes(b"")
    save_stage(tmp_path / "c", 2, 30, scale=5.0)
    save_stage(tmp_path / "d", 2, 40)
    save_stage(tmp_path / "e", 0, 35)
    folders = [tmp_path / name for name in "abcde"]
    export_from_checkpoints(folders, tmp_path / "model", facts={"validation_loss": 3.5})
    state = load_file(tmp_path / "model" / "model.safetensors")
    assert state.keys() == whole_state(SPEC).keys()
    assert all(torch.equal(state[name], weight) for name, weight in whole_state(SPEC).items())
    assert str(damaged) in caplog.text
    facts = json.loads((tmp_path / "model" / "gossamer.json").read_text())["facts"]
    assert facts == {"rounds": 40, "tokens": 1024 * (40 + 35), "validation_loss": 3.5}


def test_missing_stages_are_named(tmp_path):
    """Nobody collected the folders of stages 0 and 2."""
    save_stage(tmp_path / "b", 1, 40)
    with pytest.raises(ConfigError, match="no usable checkpoint of stage 0, 2 in"):
        export_from_checkpoints([tmp_path / "b"], tmp_path / "model")


def test_folders_without_checkpoints_or_of_two_runs_are_refused(tmp_path):
    """Wrong folders were named."""
    with pytest.raises(ConfigError, match="no checkpoint in"):
        export_from_checkpoints([tmp_path / "none"], tmp_path / "model")
    other = preset("pico", name="other")
    save_stage(tmp_path / "a", 0, 40)
    save_stage(tmp_path / "b", 1, 40, other)
    with pytest.raises(ConfigError, match=f"several runs .*{SPEC.run_id}.*{other.run_id}"):
        export_from_checkpoints([tmp_path / "a", tmp_path / "b"], tmp_path / "model")
