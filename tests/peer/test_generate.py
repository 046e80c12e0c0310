"""Text from an exported folder, with our own model class."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.export import write_hf_folder
from peer.generate import generate, pick
from peer.model.stage import build_model
from peer.tokens import load_tokenizer, tokenizer_path
from protocols.errors import ConfigError
from protocols.run_spec import preset

SPEC = preset("pico")
CONTEXT_TOKENS = SPEC.model.max_position_embeddings
TOKENIZER = tokenizer_path("bpe1024")


def write_model(folder, **changed):
    """A model whose weights are far enough from zero that its choices differ."""
    state = {name: 8 * weight.detach() for name, weight in build_model(SPEC).state_dict().items()} | changed
    return write_hf_folder(folder, SPEC, state, tokenizer_file=TOKENIZER, facts={})


def always(text: str) -> dict[str, torch.Tensor]:
    """Weights of a model that says one token, whatever it reads: the head has a row for it alone."""
    (token_id,) = load_tokenizer(TOKENIZER).encode(text).ids or [2]
    return one_token(token_id)


def one_token(token_id: int) -> dict[str, torch.Tensor]:
    state = {name: torch.zeros_like(weight) for name, weight in build_model(SPEC).state_dict().items()}
    state["model.embed_tokens.weight"][:] = 1.0
    state["model.norm.weight"][:] = 1.0
    state["lm_head.weight"][token_id] = 1.0
    return state


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("export") / "model")


def test_same_seed_same_text(folder):
    """A sample in a report can be made again."""
    options = {"max_new_tokens": 20, "temperature": 1.0, "top_k": 0}
    first = generate(folder, "We the people", seed=1, **options)
    assert first == generate(folder, "We the people", seed=1, **options)
    assert first != generate(folder, "We the people", seed=2, **options)


def test_greedy_text_does_not_depend_on_the_seed(folder):
    """Temperature 0; so does keeping the best entry alone."""
    greedy = generate(folder, "We", max_new_tokens=12, temperature=0, seed=1)
    assert greedy == generate(folder, "We", max_new_tokens=12, temperature=0, seed=2)
    assert greedy == generate(folder, "We", max_new_tokens=12, temperature=1.5, top_k=1, seed=3)


def test_text_longer_than_the_context_goes_on(folder):
    """The model sees the last tokens that it has positions for: what stands before does not matter."""
    long = " of the people" * CONTEXT_TOKENS
    text = generate(folder, long, max_new_tokens=5, temperature=0)
    assert text
    assert text == generate(folder, "Something else." + long, max_new_tokens=5, temperature=0)


def test_pieces_add_up_to_the_text(folder):
    """A terminal shows them as they come; no half character is shown, and none is lost but at the very end."""
    pieces: list[str] = []
    text = generate(folder, "We", max_new_tokens=60, temperature=2.0, top_k=0, on_text=pieces.append)
    assert len(pieces) > 10
    assert text.startswith("".join(pieces))
    assert set(text[len("".join(pieces)) :]) <= {"\ufffd"}


def test_end_token_ends_the_text(tmp_path):
    """The model has said all."""
    write_model(tmp_path / "model", **one_token(2))
    assert generate(tmp_path / "model", "We", max_new_tokens=20, temperature=0) == ""


def test_prompt_is_not_repeated_in_the_text(tmp_path):
    """prompt + text reads on without a seam."""
    write_model(tmp_path / "model", **always("s"))
    assert generate(tmp_path / "model", "We the people", max_new_tokens=4, temperature=0) == "ssss"


@given(st.integers(1, 12), st.floats(0.1, 3.0), st.integers(0, 1 << 32))
def test_pick_takes_only_the_best_entries(top_k, temperature, seed):
    """Of ten entries in falling order the first `top_k`."""
    logits_V = torch.arange(10.0).flip(0)
    picked = pick(logits_V, temperature, top_k, torch.Generator().manual_seed(seed))
    assert 0 <= picked < min(top_k, 10)


def test_pick_follows_the_chances():
    """Odds of e : 1 at temperature 1, e^2 : 1 at 0.5; 4,000 draws, five standard deviations allowed."""
    generator = torch.Generator().manual_seed(0)
    for temperature, odds in ((1.0, math.e), (0.5, math.e**2)):
        share = (
            sum(pick(torch.tensor([1.0, 0.0]), temperature, 0, generator) == 0 for _ in range(4000)) / 4000
        )
        expected = odds / (1 + odds)
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / 4000)


@pytest.mark.parametrize(
    "wrong",
    [{"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"seed": -1}],
)
def test_wrong_options_are_refused(folder, wrong):
    """Before anything is computed."""
    with pytest.raises(ConfigError, match="at least"):
        generate(folder, "We", **wrong)


def test_folder_that_is_no_export_is_refused(tmp_path):
    """Missing, empty, of another model, or tied."""
    for config in (None, "not json", "[]", '{"model_type": "gpt2"}', '{"model_type": "llama"}'):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(ConfigError, match="not an exported model"):
            generate(tmp_path, "We")


def test_export_with_wrong_sizes_names_the_field(tmp_path):
    """Somebody edited config.json."""
    write_model(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match="weights cannot be read"):
        generate(tmp_path / "model", "We")
    file.write_text(json.dumps(config | {"num_hidden_layers": "many"}))
    with pytest.raises(ConfigError, match=r"config\.json: num_hidden_layers"):
        generate(tmp_path / "model", "We")


def test_damaged_or_diverged_weights_are_refused(tmp_path):
    """A copy that broke off; a run that reached infinity."""
    write_model(tmp_path / "model", **{"lm_head.weight": torch.full((1024, 64), float("inf"))})
    with pytest.raises(ConfigError, match="not finite"):
        generate(tmp_path / "model", "We")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ConfigError, match="weights cannot be read"):
        generate(tmp_path / "model", "We")


@torch.inference_mode()
def test_stages_left_out_are_the_identity(tmp_path, folder):
    """Layers are residual: a model whose stage writes nothing speaks as one that leaves the stage out."""
    silent = {
        name: torch.zeros_like(weight)
        for name, weight in build_model(SPEC).state_dict().items()
        if name.startswith("model.layers.0.") and name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    assert len(silent) == 2
    write_model(tmp_path / "model", **silent)
    options = {"max_new_tokens": 12, "temperature": 0}
    assert generate(folder, "We", stages=(0, 2), **options) == generate(tmp_path / "model", "We", **options)


def test_order_of_stages_is_the_order_in_which_they_run(folder):
    """All of them in the model's order is the model; exchanged, another one."""
    options = {"max_new_tokens": 12, "temperature": 0}
    whole = generate(folder, "We", **options)
    assert generate(folder, "We", stages=(0, 1, 2), **options) == whole
    assert generate(folder, "We", stages=(0, 2, 1), **options) != whole


@pytest.mark.parametrize("stages", [(), (1, 2), (0, 3), (0, 1, 1)])
def test_stages_that_cannot_run_are_refused(folder, stages):
    """The rules are tests/peer/test_partial.py's; here, that they are asked."""
    with pytest.raises(ConfigError, match="stage"):
        generate(folder, "We", stages=stages)
