"""Rows: what the search starts from is already a legal plan with even visits, and rows become paths and back."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protocols.planning.instance import Instance
from protocols.planning.paths import in_turns
from protocols.planning.rows import ABSENT, first_rows, rows_of_paths
from protocols.planning.stage_sets import stage_sets
from tests.protocols.planning.published import published_instance
from tests.protocols.planning.small import instances, keeps, stages_of


@given(instances(), st.booleans())
def test_first_rows_are_legal_paths_of_all_microbatches_with_even_visits(instance: Instance, fine: bool):
    rows = first_rows(instance, fine=fine)
    paths = in_turns(instance, rows)
    assert Counter(path[0] for path in paths) == dict.fromkeys(
        instance.replicas(0).tolist(), instance.microbatches
    )
    assert all(keeps(instance.rules, stages_of(instance, path)) for path in paths)
    visits = Counter(stage for path in paths for stage in stages_of(instance, path)[1:])
    counts = [visits[stage] for stage in instance.rules.relayed_stages]
    assert max(counts) - min(counts) <= (1 if fine else instance.microbatches)
    loads = Counter(peer for path in paths for peer in path[1:])
    assert rows.loads_N(instance.num_peers).tolist() == [loads[peer] for peer in range(instance.num_peers)]


@given(instances())
def test_rows_of_paths_are_those_paths_again(instance: Instance):
    """Repair starts from the paths of a plan, and whoever relays nothing sits on the bench."""
    paths = in_turns(instance, first_rows(instance, fine=True))
    rows = rows_of_paths(instance, paths)
    found = [
        tuple(holders[holders != ABSENT].tolist())
        for holders, weight in zip(rows.holders_AK, rows.weights_A.tolist(), strict=True)
        for _ in range(weight)
    ]
    assert sorted(map(sorted, found)) == sorted(map(sorted, paths))
    assert set(rows.holders_AK[rows.holders_AK != ABSENT].tolist()) == set(range(instance.num_peers))


def test_in_the_published_swarm_no_relay_is_in_two_rows():
    """Five originators, three relays of each of five stages: each originator gets three relays for itself."""
    instance = published_instance("geo-distributed")
    rows = first_rows(instance)
    assert rows.weights_A.tolist() == [6] * 5
    relays = rows.holders_AK[:, 1:]
    assert sorted(relays[relays != ABSENT].tolist()) == np.flatnonzero(instance.stage_of != 0).tolist()
    assert (rows.sets_A(stage_sets(instance.rules)) != ABSENT).all()
