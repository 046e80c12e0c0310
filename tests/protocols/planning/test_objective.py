"""What plans are judged by."""

from __future__ import annotations

import pytest

from protocols.planning.objective import Objective
from protocols.planning.paths import in_turns
from protocols.planning.rows import first_rows
from tests.protocols.planning.published import published_instance
from tests.protocols.planning.small import stages_of

INSTANCE = published_instance("geo-distributed")
PATHS = in_turns(INSTANCE, first_rows(INSTANCE))


def test_orders_of_a_path_are_all_legal_ones_of_its_stages_fastest_first():
    objective = Objective(INSTANCE)
    found = objective.in_orders(PATHS[0])
    assert all(sorted(path) == sorted(PATHS[0]) and path[0] == PATHS[0][0] for path in found)
    assert [objective.trip_s(path) for path in found] == sorted(objective.trip_s(path) for path in found)
    assert len({stages_of(INSTANCE, path) for path in found}) == len(found)
    assert objective.in_orders((*PATHS[0][:3], PATHS[0][1])) == []  # twice the same stage


def test_a_score_is_the_makespan_first_and_what_is_cut_off_loses():
    objective = Objective(INSTANCE)
    score = objective.score(PATHS)
    assert score.makespan_s == max(score.finish_s)
    assert objective.score(PATHS, cutoff_s=score.makespan_s / 2) > score
    assert objective.score(PATHS, cutoff_s=score.makespan_s) == score


def test_with_jitter_the_score_is_the_mean_of_seeded_rounds_around_the_undisturbed_one():
    """Times vary by 20 % either way: the mean is near the undisturbed makespan, a little later, and repeatable."""
    plain = Objective(INSTANCE).score(PATHS)
    jittered = Objective(INSTANCE, jitter=0.2).score(PATHS)
    assert jittered.finish_s == plain.finish_s
    assert jittered.makespan_s == pytest.approx(plain.makespan_s, rel=0.15)
    assert jittered == Objective(INSTANCE, jitter=0.2).score(PATHS)
    assert jittered != Objective(INSTANCE, jitter=0.2, seed=1).score(PATHS)
