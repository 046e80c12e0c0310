"""What a plan is compared with: the published figures come out of our round model."""

from __future__ import annotations

import pytest

from peer.comparison import full_pipeline, ours, pipeline_paths, published, routes
from peer.plan_file import MatrixFile, PublishedPlan, published_matrix, published_plan
from protocols.planning import plan


def known(setting: str) -> tuple[MatrixFile, PublishedPlan]:
    matrix = published_matrix(setting)
    found = published_plan(matrix)
    assert found is not None
    return matrix, found


@pytest.mark.parametrize(
    ("setting", "whole_s", "coarse_s"),
    [
        ("geo-distributed", 215.0, 71.593),
        ("5-clusters", 187.6, 70.667),
        ("single-cluster", 131.0, 54.866),
    ],
)
def test_published_settings_have_their_published_seconds(setting: str, whole_s: float, coarse_s: float):
    matrix, coarse = known(setting)
    instance = matrix.instance(coarse.arrangement)
    assert full_pipeline(instance, coarse.arrangement).round.makespan_s == pytest.approx(whole_s, abs=0.05)
    assert published(matrix, coarse).round.makespan_s == pytest.approx(coarse_s, abs=1e-3)


def test_the_full_pipeline_runs_every_stage_and_deals_microbatches_over_its_chains():
    matrix, coarse = known("geo-distributed")
    instance = matrix.instance(coarse.arrangement)
    paths = pipeline_paths(instance)
    assert instance.stage_of is not None
    assert {tuple(instance.stage_of[list(path)].tolist()) for path in paths} == {(0, 1, 2, 3, 4, 5)}
    assert sorted(paths.count(path) for path in set(paths)) == [10, 10, 10]


def test_routes_gather_what_goes_the_same_way():
    matrix, coarse = known("single-cluster")
    found = plan(matrix.instance(coarse.arrangement))
    shown = routes(found)
    assert sum(route.microbatches for route in shown) == 30
    assert max(route.done_s for route in shown) == found.makespan_s == ours(found).round.makespan_s
    assert [route.path[0] for route in shown] == sorted(route.path[0] for route in shown)
