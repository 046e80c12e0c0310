"""Perplexity with stages left out: the arithmetic, which choices are tried, and the verb `gossamer eval`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peer.cli import main
from peer.data import TokenData
from peer.evaluate import CHOICES_MAX, Choice, batches, evaluate, legal_choices, open_export, table
from peer.export import PROVENANCE_NAME, write_hf_folder
from peer.model.llama import Llama
from peer.model.stage import FirstStage, build_model, build_stage
from peer.tokens import tokenizer_path
from protocols.run_spec import RunSpec, preset
from protocols.stage_order import is_legal


def a_spec(num_stages: int, **changed: Any) -> RunSpec:
    """pico with one layer a stage, the first included."""
    fields = preset("pico").model_dump()
    fields |= {"num_stages": num_stages, "first_stage_layers": 1, "rounds": {"rows": 2, "seq_len": 32}}
    fields["model"] |= {"num_hidden_layers": num_stages}
    return RunSpec.model_validate(fields | changed)


SPEC = a_spec(4)
WHOLE = (0, 1, 2, 3)


def larger_state(spec: RunSpec) -> dict[str, torch.Tensor]:
    """Weights so far from zero that every stage matters."""
    return {name: 8 * weight.detach() for name, weight in build_model(spec).state_dict().items()}


def a_model(**changed: torch.Tensor) -> Llama:
    model = build_model(SPEC)
    model.load_state_dict(larger_state(SPEC) | changed)
    return model


@pytest.fixture
def data() -> TokenData:
    ids = np.random.default_rng(0).integers(0, 1024, 500).astype("<u2")
    return TokenData(ids, ids, vocab_size=1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("export") / "model"
    return write_hf_folder(
        target, SPEC, larger_state(SPEC), tokenizer_file=tokenizer_path("bpe1024"), facts={}
    )


@pytest.fixture
def text(tmp_path: Path) -> str:
    """One document: its last twentieth is held out."""
    file = tmp_path / "text.txt"
    file.write_text("".join(f"Line {n} of the people, by the people, for the people.\n" for n in range(400)))
    return str(file)


@torch.inference_mode()
def loss_by_stages(order: tuple[int, ...], found: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The same through the modules that peers train with."""
    stages = [build_stage(SPEC, stage) for stage in range(SPEC.num_stages)]
    for module in stages:
        module.load_state_dict({name: 8 * weight for name, weight in module.state_dict().items()})
    first = stages[0]
    assert isinstance(first, FirstStage)
    losses = []
    for tokens_BL, targets_BL in found:
        x_BLD = first.embed(tokens_BL)
        for stage in order[1:]:
            x_BLD = stages[stage](x_BLD)
        losses.append(float(first.loss(x_BLD, targets_BL)))
    return sum(losses) / len(losses)


def test_every_order_has_the_loss_that_its_peers_would_see(data: TokenData):
    """Whole, with skips, with a swap, and stage 0 alone; orders that begin alike share work, and must not mix it up."""
    orders = [WHOLE, (0, 2, 1, 3), (0, 1), (0, 1, 3), (0,), (0, 2, 3), (0, 1, 2)]
    found = batches(data, SPEC, 128)
    choices = evaluate(a_model(), SPEC, orders, found)
    assert [choice.stages for choice in choices] == orders
    for choice in choices:
        assert choice.loss == pytest.approx(loss_by_stages(choice.stages, found), rel=1e-5)
    assert len({round(choice.loss, 3) for choice in choices}) == len(orders)


def test_model_that_knows_nothing_is_uniform_whatever_runs(data: TokenData):
    """All logits zero: perplexity 1,024, the size of the vocabulary."""
    zeros = {name: torch.zeros_like(weight) for name, weight in build_model(SPEC).state_dict().items()}
    for choice in evaluate(a_model(**zeros), SPEC, [WHOLE, (0, 3)], batches(data, SPEC, 64)):
        assert choice.perplexity == pytest.approx(1024, rel=1e-4)


def test_loss_beyond_what_a_float_can_raise_is_still_a_number():
    """Weights of a run that went wrong, but not to infinity."""
    assert math.isfinite(Choice(stages=WHOLE, loss=1e4).perplexity)


def test_batches_are_the_runs_own_and_no_more_than_the_text_has(data: TokenData):
    """The peers' own validation reads the same windows; a window read twice would count twice."""
    found = batches(data, SPEC, 10**9)
    assert len(found) == 500 // 64
    tokens_BL, targets_BL = data.validation_batch(1, 2, 32)
    assert torch.equal(found[1][0], tokens_BL)
    assert torch.equal(found[1][1], targets_BL)
    assert len(batches(data, SPEC, 1)) == 1


def test_choices_are_the_legal_paths_of_that_length():
    """The run's rule: the next stage is at most two beyond, so stage 3 does not follow stage 0."""
    spec = a_spec(4, paths={"skip_width_max": 2})
    assert legal_choices(spec, 2) == [(0, 1), (0, 2)]
    assert legal_choices(spec, 3) == [(0, 1, 2), (0, 1, 3), (0, 2, 3)]
    assert legal_choices(spec, 4) == [WHOLE]


def test_of_many_choices_a_fixed_sample_is_tried():
    """16 stages, half of them: 6,435 choices would take hours."""
    spec = a_spec(16)
    choices = legal_choices(spec, 8)
    assert len(set(choices)) == CHOICES_MAX
    assert choices == legal_choices(spec, 8)
    assert all(is_legal(order, 16, 8, swaps_max=0, skip_width_max=4) for order in choices)


def test_table_has_best_mean_and_worst_of_each_length():
    """The mean is of perplexities, as a person would take it from the list."""
    losses = {WHOLE: 1.0, (0, 1, 2): 1.5, (0, 2, 3): 1.2, (0, 1, 3): 2.0}
    whole, shorter = table([Choice(stages=stages, loss=loss) for stages, loss in losses.items()])
    assert (whole.num_stages, whole.num_choices, whole.best, whole.worst) == (4, 1, whole.best, whole.best)
    assert (shorter.num_stages, shorter.num_choices) == (3, 3)
    assert (shorter.best.stages, shorter.worst.stages) == ((0, 2, 3), (0, 1, 3))
    assert shorter.mean_perplexity == pytest.approx((math.exp(1.5) + math.exp(1.2) + math.exp(2.0)) / 3)


def test_folder_is_enough_wherever_it_lies(folder: Path):
    """The run's tokenizer may have been a file on another machine: the export has its own copy."""
    _, spec = open_export(folder)
    assert spec.data.tokenizer == str(folder / "tokenizer.json")
    assert spec.run_id != SPEC.run_id
    assert spec.model_copy(update={"data": SPEC.data}) == SPEC


# ---- gossamer eval ----


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_eval_tells_the_perplexity_of_every_number_of_stages(
    capsys: pytest.CaptureFixture[str], folder: Path, text: str
):
    """1 + 3 + 3 choices; the table sums them up, the whole model first."""
    code, out, _ = run(capsys, "eval", str(folder), "--data", text, "--tokens", "128", "--json")
    found = json.loads(out)
    assert (code, found["num_tokens"]) == (0, 128)
    assert [len(choice["stages"]) for choice in found["choices"]] == [4, 3, 3, 3, 2, 2, 2]
    assert [row["share"] for row in found["table"]] == [1.0, 0.75, 0.5]
    for row in found["table"]:
        alike = [choice for choice in found["choices"] if choice["share"] == row["share"]]
        assert row["best"] == min(choice["perplexity"] for choice in alike)
        assert row["worst"] == max(choice["perplexity"] for choice in alike)
        assert row["best"] <= row["mean"] <= row["worst"]
        assert row["cost"] == pytest.approx(row["best"] / found["choices"][0]["perplexity"] - 1)
    code, out, _ = run(capsys, "eval", str(folder), "--data", text, "--tokens", "128")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[2:]] == [["100%", "1"], ["75%", "3"], ["50%", "3"]]


def test_eval_with_dropped_stages_compares_them_with_the_whole(
    capsys: pytest.CaptureFixture[str], folder: Path, text: str
):
    """Two choices that somebody has in mind."""
    arguments = (
        "eval",
        str(folder),
        "--data",
        text,
        "--tokens",
        "64",
        "--drop-stages",
        "2,1",
        "--drop-stages",
        "3",
    )
    code, out, _ = run(capsys, *arguments, "--json")
    choices = json.loads(out)["choices"]
    assert code == 0
    assert [choice["stages"] for choice in choices] == [[0, 1, 2, 3], [0, 3], [0, 1, 2]]
    assert choices[0]["cost"] == 0
    for choice in choices:
        assert choice["perplexity"] == pytest.approx(math.exp(choice["loss_nats"]))
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines()[1:]] == ["stages", "0,1,2,3", "0,3", "0,1,2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "MODEL", "--drop-stages", "0"], "stage 0 cannot be dropped"),
        (["eval", "MODEL", "--drop-stages", "1,4"], "stage 4: this model has the stages 0 to 3"),
        (["eval", "MODEL", "--drop-stages", "1,1"], "each can be named once"),
        (["eval", "MODEL", "--drop-stages", "last"], "such as 0,1,3"),
        (["eval", "MODEL", "--data", "nowhere.txt"], "no such file or folder"),
        (["eval", "MODEL", "--tokens", "0"], "--tokens"),
        (["eval", "."], "not an exported model"),
        (["generate", "MODEL", "--stages", "1,2"], "stage 0 must come first"),
        (["generate", "MODEL", "--stages", "0,7"], "stage 7: this model has the stages 0 to 3"),
        (["generate", "MODEL", "--stages", "0,2,2"], "each can be named once"),
        (["generate", "MODEL", "--stages", ""], "such as 0,1,3"),
        (["generate", ".", "--stages", "0"], "not an exported model"),
    ],
)
def test_bad_input_ends_with_one_message_and_code_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    folder: Path,
    arguments: list[str],
    message: str,
):
    """No traceback, and nothing on stdout that a script could take for a result."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *(str(folder) if word == "MODEL" else word for word in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_folder_of_another_program_must_say_how_it_is_cut(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: Path
):
    """A LLaMa from elsewhere has no stages; it can still speak as a whole."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for entry in folder.iterdir():
        if entry.name != PROVENANCE_NAME:
            (foreign / entry.name).write_bytes(entry.read_bytes())
    for arguments in (["eval"], ["generate", "--stages", "0,1"]):
        code, _, err = run(capsys, arguments[0], str(foreign), *arguments[1:])
        assert code == 2
        assert "does not say how the model is cut" in err
    assert run(capsys, "generate", str(foreign), "We", "--tokens", "3")[0] == 0
