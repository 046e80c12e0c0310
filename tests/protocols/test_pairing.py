"""Matchings: the same for everybody, legal for any number of replicas, and what each schedule promises."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.pairing import partners
from protocols.run_spec import PairSchedule

SCHEDULES = tuple(PairSchedule)


def replicas(count: int) -> list[str]:
    return [f"peer-{number:03d}" for number in range(count)]


def matching(
    count: int, outer_step: int, *, pair_round: int = 0, stage: int = 1, fragment: int = 0, seed: int = 0,
    rounds: int = 2, schedule: PairSchedule = PairSchedule.RANDOM,
) -> dict[str, str]:  # fmt: skip
    return partners(
        replicas(count), outer_step=outer_step, stage=stage, fragment=fragment, pair_round=pair_round,
        rounds=rounds, seed=seed, schedule=schedule,
    )  # fmt: skip


@given(
    count=st.integers(0, 33),
    outer_step=st.integers(0, 1000),
    pair_round=st.integers(0, 1),
    schedule=st.sampled_from(SCHEDULES),
)
def test_every_matching_is_legal(count: int, outer_step: int, pair_round: int, schedule: PairSchedule):
    """Nobody with itself, nobody with two, and no more than one sits out."""
    found = matching(count, outer_step, pair_round=pair_round, schedule=schedule)
    assert set(found) <= set(replicas(count))
    assert all(found[other] == me and other != me for me, other in found.items())
    num_paired = count - count % 2
    is_over = pair_round and (
        count == 2 or (num_paired == 2 and schedule is PairSchedule.HYPERCUBE)
    )  # nobody new
    assert len(found) == (0 if is_over else num_paired)


@given(count=st.integers(4, 33), outer_step=st.integers(0, 1000), schedule=st.sampled_from(SCHEDULES))
def test_the_second_round_never_repeats_a_partner(count: int, outer_step: int, schedule: PairSchedule):
    """To average twice with the same one would be a message for nothing."""
    first, second = (matching(count, outer_step, pair_round=r, schedule=schedule) for r in (0, 1))
    assert all(second[me] != other for me, other in first.items() if me in second)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_everyone_computes_the_same_from_the_same_set(schedule: PairSchedule):
    """Whatever order the table gave them in, and however often it named one."""
    names = replicas(9)
    expected = matching(9, 5, schedule=schedule)
    for shuffled in (names[::-1], names[3:] + names[:5], set(names)):
        found = partners(
            shuffled, outer_step=5, stage=1, fragment=0, pair_round=0, rounds=2, seed=0, schedule=schedule
        )
        assert found == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_fragments_and_runs_pair_apart(schedule: PairSchedule):
    """One dead peer then costs its partners of one stage and one fragment, and traffic takes many links."""
    same = {"count": 16, "outer_step": 3, "schedule": schedule}
    found = [
        matching(**same),
        matching(**same, stage=2),
        matching(**same, fragment=1),
        matching(**same, seed=1),
    ]
    assert all(left != right for left, right in combinations(found, 2))


def test_random_pairs_are_uniform_in_both_rounds():
    """Every pair of 8 occurs in 700 outer steps, 100 times but for chance (chi-square, 27 degrees, 0.1 %)."""
    for pair_round in (0, 1):
        counts = Counter(
            pair
            for outer_step in range(700)
            for pair in matching(8, outer_step, pair_round=pair_round).items()
            if pair[0] < pair[1]
        )
        assert len(counts) == 28
        assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 55.5


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("count", [2, 4, 8, 16, 64])
def test_a_power_of_two_has_the_exact_mean_after_log2_rounds(count: int, rounds: int):
    """From whichever round on: what anybody knew is then an equal share of what everybody knows."""
    num_rounds = count.bit_length() - 1
    for start in range(0, 2 * num_rounds, rounds if count == 2 else 1):
        shares = {me: {me: Fraction(1)} for me in replicas(count)}
        for turn in range(start, start + num_rounds):
            outer_step, pair_round = divmod(turn, rounds)
            found = matching(
                count, outer_step, pair_round=pair_round, rounds=rounds, schedule=PairSchedule.HYPERCUBE
            )
            shares = {me: mean_of(shares[me], shares[found[me]]) for me in shares}
        assert all(len(known) == count for known in shares.values())
        assert {share for known in shares.values() for share in known.values()} == {Fraction(1, count)}


def mean_of(left: dict[str, Fraction], right: dict[str, Fraction]) -> dict[str, Fraction]:
    return {
        name: (left.get(name, Fraction(0)) + right.get(name, Fraction(0))) / 2 for name in {*left, *right}
    }
