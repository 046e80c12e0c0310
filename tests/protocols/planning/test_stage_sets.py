"""Which stages a path may run: the published 22 orders, and rows that visit all stages alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import ConfigError
from protocols.planning.instance import PathRules
from protocols.planning.stage_sets import orders_by_set, stage_sets
from tests.protocols.planning.small import keeps

PUBLISHED = PathRules(num_stages=6, path_stages=4)


def test_the_published_rules_leave_22_orders():
    orders = [order for orders in orders_by_set(PUBLISHED).values() for order in orders]
    assert len(set(orders)) == len(orders) == 22
    assert all(keeps(PUBLISHED, order) for order in orders)
    assert len(stage_sets(PUBLISHED).masks_S) == 10


@given(st.integers(2, 7), st.data())
def test_rows_visit_all_stages_alike(num_stages: int, data: st.DataObject):
    """Single microbatches to within one; whole rows of six to within six."""
    path_stages = data.draw(st.integers(2, num_stages))
    rules = PathRules(num_stages=num_stages, path_stages=path_stages, skip_width_max=num_stages)
    weight = data.draw(st.sampled_from([1, 6]))
    rows = data.draw(st.integers(1, 20))
    sets = stage_sets(rules)
    chosen = sets.spread(rows, np.full(num_stages, 5))
    visits = (sets.members_SK[chosen].sum(axis=0) * weight)[1:]
    assert visits.sum() == weight * rows * (path_stages - 1)
    assert visits.max() - visits.min() <= weight


def test_a_stage_that_nobody_serves_is_on_no_path_and_the_others_are_reached():
    rules = PUBLISHED.without(2)
    orders = [order for orders in orders_by_set(rules).values() for order in orders]
    assert orders
    assert {stage for order in orders for stage in order} == {0, 1, 3, 4, 5}


def test_rules_that_leave_no_path_say_so():
    with pytest.raises(ConfigError, match="allow wider skips, or longer paths"):
        stage_sets(PathRules(num_stages=6, path_stages=2, skip_width_max=4))
