"""Counters of training and of validation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocols.microbatch import VALIDATION_BASE, validation_batch, validation_counters
from protocols.run_spec import RoundSpec

ROUNDS = RoundSpec(total_rounds=50, eval_every=20, eval_microbatches=4)


def test_validation_comes_every_so_often_and_at_the_end():
    due = [round_ for round_ in range(51) if validation_counters(ROUNDS, round_, ["a1"], "a1")]
    assert due == [0, 20, 40, 50]


def test_validation_can_be_off():
    never = RoundSpec(total_rounds=50, eval_every=0)
    assert validation_counters(never, 50, ["a1"], "a1") == []


@given(st.integers(1, 9), st.integers(1, 20))
def test_all_originators_together_run_each_batch_once(num_originators: int, num_batches: int):
    """And every validation has the same batches, or its losses could not be compared."""
    rounds = RoundSpec(total_rounds=50, eval_every=10, eval_microbatches=num_batches)
    names = [f"a{number}" for number in range(num_originators)]
    for round_ in (10, 20):
        counters = [each for me in names for each in validation_counters(rounds, round_, names, me)]
        assert sorted(map(validation_batch, counters)) == list(range(num_batches))
        assert min(counters) >= VALIDATION_BASE
