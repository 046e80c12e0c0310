"""P8 on a small scale; the values are `python -m benchmarks skipping`."""

from __future__ import annotations

import pytest
import torch

from benchmarks import skipping
from benchmarks.skipping import STAGES, WHOLE, Chain, Paths, Trained, judged, loss_ratios, skipping_spec
from peer.evaluate import Batch, evaluate
from protocols.stage_order import is_legal

SPEC = skipping_spec(seed=1, rounds=2)


def some_text(seed: int) -> Batch:
    ids_BL = torch.randint(1024, (8, 65), generator=torch.Generator().manual_seed(seed))
    return ids_BL[:, :-1], ids_BL[:, 1:]


@pytest.mark.parametrize(("length", "difference_max"), [(3, 2), (4, 1), (6, 1), (7, 1)])
def test_paths_are_legal_and_visit_all_stages_alike(length: int, difference_max: int):
    """Or some layers would train less than others; a path of 3 cannot begin with stages 5 to 7."""
    paths = Paths(SPEC)
    drawn = [paths.draw(length) for _ in range(70)]
    assert all(is_legal(order, STAGES, length, swaps_max=0, skip_width_max=4) for order in drawn)
    visits = [sum(stage in order for order in drawn) for stage in WHOLE[1:]]
    assert max(visits) - min(visits) <= difference_max
    assert len(set(drawn)) > 5
    assert paths.skipped_share == pytest.approx(1 - length / STAGES)


def test_a_quarter_is_skipped_both_ways():
    """Evenly or early: what P8 compares skips as much of the run."""
    for way in ("even", "early"):
        paths = Paths(SPEC)
        for length in skipping.WAYS[way]:
            for _ in range(7):
                paths.draw(length)
        assert paths.skipped_share == pytest.approx(0.25)


def test_a_skipped_stage_is_neither_run_nor_changed():
    """The chain computes what the model with these stages computes; its step leaves the others as they were."""
    chain, order = Chain(SPEC), (0, 2, 3, 6)
    before = {name: weight.clone() for name, weight in chain.model().state_dict().items()}
    (expected,) = evaluate(chain.model(), SPEC, [order], [some_text(0)])
    assert chain.train(*some_text(0), order) == pytest.approx(expected.loss, rel=1e-4)  # boundaries are bf16
    chain.step(0)
    changed = {
        int(name.split(".")[2])
        for name, weight in chain.model().state_dict().items()
        if name.startswith("model.layers.") and not torch.equal(weight, before[name])
    }
    assert changed == set(order)


def test_half_a_model_is_chosen_on_one_text_and_measured_on_another():
    """The best of many choices looks better than it is on the text that it was chosen by."""
    model = Chain(SPEC).model()
    found = judged(model, SPEC, [some_text(1)], [some_text(2)], skipped_share=0.0)
    choices = evaluate(model, SPEC, skipping.legal_choices(SPEC, 4), [some_text(1)])
    assert found.half == min(choices, key=lambda choice: choice.loss).stages
    whole, half = evaluate(model, SPEC, [WHOLE, found.half], [some_text(2)])
    assert found.loss == whole.loss
    assert found.half_ratio == pytest.approx(half.perplexity / whole.perplexity)


def test_ratios_pair_the_seeds():
    """Each seed against its own run without skips, then the mean."""

    def outcome(loss: float) -> Trained:
        return Trained(loss=loss, half=WHOLE[:4], half_ratio=1.0, skipped_share=0.25)

    found = {"all": [outcome(4.0), outcome(2.0)], "early": [outcome(4.4), outcome(2.0)]}
    assert loss_ratios(found, "early") == pytest.approx([1.1, 1.0])


def test_the_report_has_both_bars_and_tells_every_way(monkeypatch: pytest.MonkeyPatch):
    """Two rounds on the real text: numbers of an untrained model, but all of them."""
    monkeypatch.setattr(skipping, "ROUNDS_QUICK", 2)
    monkeypatch.setattr(skipping, "CHOOSE_TOKENS", 512)
    monkeypatch.setattr(skipping, "REPORT_TOKENS", 512)
    report = skipping.run(quick=True)
    assert [bar.id for bar in report.bars] == ["P8a", "P8b"]
    assert report.bars[0].value == pytest.approx(1.0, abs=0.02)
    facts = dict(report.facts)
    assert 6 < float(facts["all (0% skipped): validation loss, nats a token"]) < 8
    assert "even (25% skipped): loss / loss without skips" in facts
