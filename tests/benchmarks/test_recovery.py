"""The recovery studies on a small scale; the values are `python -m benchmarks recovery`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks import recovery, recovery_outages, recovery_trainer
from benchmarks.failures import StageLoss
from benchmarks.recovery_base import last_validations
from benchmarks.recovery_churn import (
    ITERATION_S,
    REBUILD_S,
    Climbing,
    Rebuilding,
    RollingBack,
    course,
    draws,
    train_swapped,
    without_adjacent,
)
from benchmarks.recovery_findings import ratio, spread
from benchmarks.recovery_jumps import rounds_back
from benchmarks.recovery_rules import Ladder, Rule, Rung, rebuild
from benchmarks.recovery_sizes import INNER, LARGE, MIDDLE, STAGES
from benchmarks.recovery_trainer import Trainer, training_skips
from peer.evaluate import evaluate
from peer.model.llama import Llama
from peer.model.stage import renumbered
from protocols.checkfree import mix, swapped_order
from tests.benchmarks.small_trainer import SMALL, a_trainer, changed, weights


def as_model(trainer: Trainer) -> Llama:
    model = Llama(trainer.spec.model)
    model.load_state_dict({n: w for flat in trainer.flats for n, w in flat.by_name(flat.weights).items()})
    return model


# ---- the trainer ----


def test_the_trainer_computes_what_the_model_computes():
    """Whole, without a stage, and with two pairs exchanged."""
    trainer = a_trainer(2)
    batch = trainer.batch()
    orders = [trainer.order, (0, 1, 2, 4, 5, 6), swapped_order(STAGES)]
    for order, expected in zip(
        orders, evaluate(as_model(trainer), trainer.spec, orders, [batch]), strict=True
    ):
        assert trainer.accumulate(*batch, order, {}) == pytest.approx(expected.loss, rel=1e-5)
        for optimizer in trainer.optimizers:
            optimizer.forget_gradient()


def test_rows_that_skip_a_stage_compute_and_teach_as_without_it():
    """Half of the rows skip stage 3: the same gradients as two passes, one along each path."""
    skipping, apart = a_trainer(2), a_trainer(2)
    tokens_BL, targets_BL = skipping.batch()
    skipped_B = torch.arange(8) < 4
    skipping.accumulate(tokens_BL, targets_BL, skipping.order, {3: skipped_B})
    without = tuple(stage for stage in apart.order if stage != 3)
    apart.accumulate(tokens_BL[:4], targets_BL[:4], without, {})
    apart.accumulate(tokens_BL[4:], targets_BL[4:], apart.order, {})
    for stage in range(STAGES):
        assert skipping.optimizers[stage].rows == apart.optimizers[stage].rows
        torch.testing.assert_close(
            skipping.flats[stage].gradient, apart.flats[stage].gradient, atol=1e-5, rtol=1e-4
        )


def test_a_stage_that_all_rows_skip_keeps_its_weights():
    trainer = a_trainer(1)
    before = weights(trainer)
    trainer.train({4: torch.ones(8, dtype=torch.bool)})
    assert changed(trainer, before) == set(range(STAGES)) - {4}


def test_only_rows_that_ran_everything_are_kept_for_a_refit():
    trainer = a_trainer()
    trainer.train({4: torch.arange(8) < 3})
    trainer.train({4: torch.ones(8, dtype=torch.bool)})
    assert [len(kept[0]) for kept in trainer.kept] == [5]
    (pair,) = trainer.boundaries_of(3, 4)
    assert torch.equal(pair.in_BLD, trainer.kept[0][2])
    assert torch.equal(pair.out_BLD, trainer.kept[0][4])


def test_a_restored_trainer_goes_on_bit_for_bit():
    """Adam's moments, a ramp under way, the boosted rate and the text included."""
    trainer = a_trainer(3)
    rebuild(trainer, 3, Rule.CHECKFREE)
    trainer.train()
    saved = trainer.snapshot()
    trainer.train()
    expected = weights(trainer)
    for _ in range(3):
        trainer.train()
    trainer.restore(saved)
    trainer.train()
    assert changed(trainer, expected) == set()


def test_one_row_in_eight_skips_one_inner_stage_in_training():
    """Drawn from seed and round: every peer would draw the same; all inner stages alike."""
    spec = SMALL.spec(1)
    drawn = [training_skips(spec, round_, 1 / 8, INNER) for round_ in range(400)]
    assert all(len(skips) == 1 and int(next(iter(skips.values())).sum()) == 1 for skips in drawn)
    visits = [sum(stage in skips for skips in drawn) for stage in INNER]
    assert sum(visits) == 400
    assert min(visits) > 70
    again = training_skips(spec, 7, 1 / 8, INNER)
    assert again.keys() == drawn[7].keys()
    assert sum(int(mask.sum()) for mask in training_skips(spec, 0, 0.5, INNER).values()) == 4


def test_the_large_model_has_178_million_weights_and_needs_a_card(monkeypatch: pytest.MonkeyPatch):
    spec = LARGE.spec(0)
    model, layers = spec.model, spec.model.num_hidden_layers
    a_layer = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.intermediate_size
    assert layers * a_layer + 2 * model.vocab_size * model.hidden_size == pytest.approx(178e6, rel=0.01)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA" in recovery.run(quick=False, size="178m").skipped


def test_the_size_is_an_option_of_recovery_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main(["recovery", "--size", "178m"]) == 0
    assert "skipped: size 178m needs a CUDA card" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        program.main(["wire", "--size", "178m"])


# ---- rules ----


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("stage", [1, 3, 6])
def test_every_rule_rebuilds_the_lost_stage_alone_and_forgets_its_adam(rule: Rule, stage: int):
    trainer = a_trainer(3)
    before = weights(trainer)
    rebuild(trainer, stage, rule)
    assert changed(trainer, before) == {stage}
    optimizer = trainer.optimizers[stage]
    assert not optimizer.moment.any()
    assert optimizer.ramp_steps_left == 30
    assert (stage in trainer.boosted) == (rule in (Rule.CHECKFREE, Rule.CHECKFREE_PLUS))


def test_checkfree_is_the_formula_on_the_neighbours():
    trainer = a_trainer(3)
    sides = []
    for neighbour in (2, 4):
        flat = trainer.flats[neighbour]
        named = {name: weight.clone() for name, weight in flat.by_name(flat.weights).items()}
        sides.append(renumbered(trainer.spec, named, neighbour, 3))
    expected = mix(sides[0], sides[1], trainer.norms[2], trainer.norms[4])
    rebuild(trainer, 3, Rule.CHECKFREE)
    for name, weight in trainer.flats[3].by_name(trainer.flats[3].weights).items():
        assert torch.equal(weight, expected[name])


@pytest.mark.parametrize(("stage", "twin"), [(1, 2), (6, 5)])
def test_checkfree_plus_copies_the_twin_at_the_edge(stage: int, twin: int):
    trainer = a_trainer(3)
    rebuild(trainer, stage, Rule.CHECKFREE_PLUS)
    assert torch.equal(trainer.flats[stage].weights, trainer.flats[twin].weights)


def test_the_boosted_rate_is_of_the_rebuilt_stage_and_does_not_add_up():
    trainer = a_trainer(1)
    for _ in range(3):
        rebuild(trainer, 3, Rule.CHECKFREE)
    for _ in range(60):  # past the ramp and the warm-up
        for optimizer in trainer.optimizers:
            optimizer.rows = {False: 8, True: 8}
        trainer.step()
    rates = [optimizer._adamw.param_groups[0]["lr"] for optimizer in trainer.optimizers]
    assert rates[3] == pytest.approx(1.1 * rates[2])


def test_a_swapped_round_trains_every_stage_on_all_rows():
    trainer = a_trainer()
    before = weights(trainer)
    train_swapped(trainer)
    assert changed(trainer, before) == set(range(STAGES))
    assert [len(kept[0]) for kept in trainer.kept] == [4]  # the half in order


def test_checkfree_plus_brings_both_ends_back_bit_for_bit():
    """Embedding, final norm and head are kept after every round, so nothing of them is lost."""
    trainer = a_trainer()
    remedy = Rebuilding(trainer, Rule.CHECKFREE_PLUS)
    for _ in range(2):
        remedy.train()
    before = weights(trainer)
    trainer.flats[0].weights.normal_()
    remedy.repair([0])
    assert changed(trainer, before) == set()


# ---- the ladder ----


def a_ladder(rounds: int) -> tuple[Trainer, Ladder]:
    trainer = a_trainer()
    ladder = Ladder(trainer)
    for _ in range(rounds):
        trainer.train()
        ladder.refresh()
    return trainer, ladder


def test_a_lost_stage_comes_back_as_its_shadow():
    trainer, ladder = a_ladder(5)
    expected = trainer.flats[3].weights.clone()
    for _ in range(2):
        trainer.train()
        ladder.refresh()
    assert ladder.shadows[3].round == 5
    assert ladder.rebuild([3]) == [Rung.SHADOW]
    assert torch.equal(trainer.flats[3].weights, expected)


def test_a_shadow_goes_down_with_its_last_holder_until_the_next_refresh():
    """Peers of stages 3 and 2 hold stage 4: both gone with it, it is mixed and refitted."""
    trainer, ladder = a_ladder(6)
    assert ladder.rebuild([3, 4]) == [Rung.SHADOW] * 2
    assert ladder.rebuild([3]) == [Rung.SHADOW]  # what is lost twice has one holder less once
    assert ladder.rebuild([2, 3, 4]) == [Rung.SHADOW] * 2 + [Rung.MIX_REFIT]
    assert ladder.rebuild([4]) == [Rung.MIX_REFIT]
    for _ in range(4):
        trainer.train()
        ladder.refresh()
    assert ladder.rebuild([4]) == [Rung.SHADOW]


@pytest.mark.parametrize(
    ("lost", "rungs"),
    [([2], [Rung.MIX_REFIT]), ([1], [Rung.EDGE_REFIT]), ([6], [Rung.EDGE_REFIT]),
     ([3, 4], [Rung.PAIR_REFIT] * 2), ([1, 2], [Rung.PAIR_REFIT] * 2), ([5, 6], [Rung.PAIR_REFIT] * 2),
     ([2, 5], [Rung.MIX_REFIT] * 2), ([2, 3, 4], [Rung.PAIR_REFIT, Rung.PAIR_REFIT, Rung.MIX_REFIT])],
)  # fmt: skip
def test_every_rung_without_a_shadow(lost: list[int], rungs: list[Rung]):
    trainer, ladder = a_ladder(3)  # before the first shadow
    before = weights(trainer)
    assert ladder.rebuild(lost) == rungs
    assert changed(trainer, before) == set(lost)


# ---- churn ----


def test_a_rollback_repeats_the_rounds_and_the_text():
    trainer = a_trainer(5)
    remedy = RollingBack(trainer)
    at_checkpoint = weights(trainer)
    for _ in range(3):
        remedy.train()
    assert remedy.repair([2]) == REBUILD_S
    assert trainer.round == 5
    assert changed(trainer, at_checkpoint) == set()


def test_a_course_counts_losses_and_modelled_seconds():
    trainer = a_trainer()
    remedy = Climbing(trainer, Ladder(trainer))
    losses = [StageLoss(5, 3), StageLoss(7, 2), StageLoss(7, 5)]
    found = course(trainer, remedy, losses, rounds=9, looks={2, 9})
    assert [point.rounds for point in found.points] == [2, 9]
    assert found.num_losses == 3
    assert remedy.rungs == {Rung.SHADOW: 3}
    assert found.points[-1].modelled_s == pytest.approx(9 * ITERATION_S + 3 * REBUILD_S)


def test_draws_are_the_same_for_every_remedy_and_never_two_neighbours_at_once():
    losses = draws(0.3, 50, MIDDLE, seed=1)
    assert losses == draws(0.3, 50, MIDDLE, seed=1) != draws(0.3, 50, MIDDLE, seed=2)
    apart = without_adjacent(losses)
    assert len(apart) < len(losses)
    for left, right in itertools.pairwise(apart):
        assert left.round < right.round or right.stage - left.stage > 1


# ---- the report ----


def test_ratios_and_intervals():
    """No damage is no ratio: NaN fails a bar."""
    assert ratio(1.0, 4.0) == 0.25
    assert not ratio(1.0, 0.0) <= 1e9
    assert spread([1.0, 2.0, 3.0], 2) == "2.00 +- 2.48 (1.00, 2.00, 3.00)"
    assert spread([1.0], 1) == "1.0"
    assert last_validations(250, 10) == {250, 240, 230}


def test_ways_back_are_bounded():
    trainer = a_trainer(1)
    assert rounds_back(trainer, 0.0, 5) == 5
    assert rounds_back(trainer, 100.0, 5) == 0


def test_one_seed_gives_every_bar_and_its_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a model that has learnt nothing: no value means anything, but all of them are there."""
    monkeypatch.setattr(recovery_trainer, "VALIDATION_ROWS", 4)
    monkeypatch.setattr(recovery_outages, "SEEDS_AT_DEPTH", {4: 1})
    monkeypatch.setattr(recovery_outages, "MULTIPLES", (64,))
    size = replace(SMALL, base_rounds=7, target_rounds=6, churn_rounds=3, validate_every=1, tail_rounds=1,
                   crucible_rounds=3, refit_steps=1, validation_tokens=1)  # fmt: skip
    report = recovery.study(size, tmp_path)
    assert {bar.id for bar in report.bars} == {
        "A3a", "A3b", "A3c", "A3d", "A4a.1x", "A4b.1x", "A4a.2x", "A4b.2x", "A5a", "A5b", "A8.5", "A8.10", "A8.16",
        "A9a.4", "A9b.4", "A13a", "A13b",
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {recovery.COURSES_PNG, recovery.OUTAGES_PNG}
    assert any(name.startswith("to the target at 16 %, seed 0, CheckFree+") for name, _ in report.facts)
