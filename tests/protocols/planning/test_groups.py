"""Large swarms in groups: everybody cuts alike, each group has its share of every stage, neighbours stay together."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import ConfigError
from protocols.planning import Crowd, PathRules, Timing, plan_crowd, plan_in_groups
from protocols.planning.groups import GROUP_PEERS_MAX, cut
from tests.protocols.planning.published import published_instance
from tests.protocols.planning.small import broken_rules

RULES = PathRules(num_stages=4, path_stages=3)
TOWNS_S = ((0.0, 0.0), (1.0, 0.2), (3.0, 0.1))


def crowd(num_peers: int, *, shuffle: int | None = None) -> Crowd:
    """Peers in three towns, a quarter of each for every stage."""
    order = list(range(num_peers))
    if shuffle is not None:
        random.Random(shuffle).shuffle(order)
    names = [f"p{number:04d}" for number in order]
    return Crowd(
        peers=tuple(names),
        stage_of={name: number // 3 % 4 for name, number in zip(names, order, strict=True)},
        forward_s=[0.5] * num_peers,
        coordinates_s=[TOWNS_S[number % 3] for number in order],
        access_s=[0.01] * num_peers,
        slots=3,
        rules=RULES,
        microbatches=3,
        timing=Timing(),
    )


def test_groups_are_small_complete_and_of_one_neighbourhood():
    plans = plan_crowd(crowd(180))
    members = [set(plan.stage_of) for plan in plans]
    assert sum(map(len, members)) == len(set().union(*members)) == 180
    for plan in plans:
        assert len(plan.stage_of) <= GROUP_PEERS_MAX
        assert broken_rules(plan) == []
        assert len({int(peer[1:]) % 3 for peer in plan.stage_of}) == 1


def test_the_order_of_the_table_changes_nothing():
    given_order, shuffled = plan_crowd(crowd(120)), plan_crowd(crowd(120, shuffle=4))
    assert [plan.microbatches for plan in given_order] == [plan.microbatches for plan in shuffled]


@given(st.integers(1, 4), st.integers(4, 400), st.integers(0, 9))
@settings(max_examples=50)
def test_every_group_has_every_stage_and_nobody_is_left_out(num_stages: int, num_peers: int, seed: int):
    draws = np.random.default_rng(seed)
    stage_of_N = np.concatenate((np.arange(num_stages), draws.integers(0, num_stages, num_peers)))
    coordinates_ND = draws.uniform(size=(len(stage_of_N), 3))
    groups = cut(stage_of_N, coordinates_ND, num_stages=num_stages)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(stage_of_N)))
    for group in groups:
        assert np.bincount(stage_of_N[group], minlength=num_stages).min() >= 1
    scarcest = int(np.bincount(stage_of_N).min())
    assert max(map(len, groups)) <= GROUP_PEERS_MAX or len(groups) == scarcest


def test_a_small_swarm_with_a_matrix_is_one_group():
    (only,) = plan_in_groups(published_instance("5-clusters"))
    assert len(only.stage_of) == 20


def test_a_stage_without_a_peer_cannot_be_cut():
    with pytest.raises(ConfigError, match="stage 1 has no peer"):
        cut(np.array([0, 0, 2]), np.zeros((3, 2)), num_stages=3)
