"""Where it is free who serves which stage: peers near each other share a path, or a stage where averaging counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from protocols.planning import plan
from protocols.planning.instance import make_instance
from protocols.planning.plan import worst_stage_link_s
from tests.protocols.planning.published import official, published_instance
from tests.protocols.planning.small import broken_rules, problems


@pytest.mark.parametrize(("setting", "share"), [("5-clusters", 0.78), ("single-cluster", 1.0)])
def test_own_arrangements_beat_the_published_ones(setting: str, share: float):
    """P2: five clusters of four peers each hold a whole path of four stages."""
    found = plan(replace(published_instance(setting), stage_of=None))
    assert broken_rules(found) == []
    assert found.makespan_s <= share * official(setting)["runs"]["ca_coarse"]["expected_time_s"] + 1e-9
    assert sorted(found.stage_of.values()) == sorted([0] * 5 + [1, 2, 3, 4, 5] * 3)


@given(problems(peers_max=8, microbatches_max=2))
@settings(max_examples=8)
def test_every_arrangement_has_the_asked_sizes_and_legal_paths(problem: dict[str, Any]):
    sizes = [list(problem["stage_of"].values()).count(stage) for stage in range(problem["rules"].num_stages)]
    found = plan(make_instance(**problem | {"stage_of": None, "stage_sizes": sizes}))
    assert list(found.instance.stage_sizes) == sizes
    counts = [list(found.stage_of.values()).count(stage) for stage in range(len(sizes))]
    assert counts == sizes
    assert broken_rules(found) == []


def test_averaging_counts_when_it_is_asked_for():
    """Replicas of a stage move together as far as that saves more than it costs the paths between them."""
    instance = replace(published_instance("geo-distributed"), stage_of=None)
    factor = 16.0  # half a gibibyte over the worst link of a stage, in transfers of 32 MiB
    ignoring, counting = plan(instance), plan(replace(instance, averaging_factor=factor))
    assert counting.averaging_s == pytest.approx(factor * worst_stage_link_s(counting.instance))
    ignored_s = factor * worst_stage_link_s(ignoring.instance)
    assert counting.makespan_s + counting.averaging_s < 0.95 * (ignoring.makespan_s + ignored_s)
