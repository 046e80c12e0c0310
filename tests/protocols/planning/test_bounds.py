"""Lower bounds: below every plan that there is, and not absurdly far below."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from protocols.planning.bounds import lower_bounds
from protocols.planning.instance import Instance
from protocols.planning.round_model import RoundModel
from tests.protocols.planning.published import SETTINGS, published_instance
from tests.protocols.planning.small import instances, legal_paths


@pytest.mark.parametrize(("setting", "bound_s"), list(zip(SETTINGS, (58.2, 59.8, 45.6), strict=True)))
def test_an_originators_slots_bind_in_the_published_settings(setting: str, bound_s: float):
    bounds = lower_bounds(published_instance(setting))
    assert bounds.largest_s == bounds.originator_slots_s == pytest.approx(bound_s, abs=0.05)
    assert bounds.originator_work_s == pytest.approx(31.0, abs=0.05)
    assert bounds.stage_work_s == pytest.approx(27.9, abs=0.1)


@given(instances(peers_max=6))
@settings(max_examples=40)
def test_nothing_is_faster_than_the_bounds(instance: Instance):
    """By trying every path: the longest trip that cannot be avoided, and no bound above a plan of nothing but such."""
    model = RoundModel(instance)
    bounds = lower_bounds(instance)
    plans_s = []
    for originator in instance.replicas(0).tolist():
        fastest = min(legal_paths(instance, originator), key=lambda path: model.simulate([path]).makespan_s)
        plans_s.append(
            (
                model.simulate([fastest]).makespan_s,
                model.simulate([fastest] * instance.microbatches).makespan_s,
            )
        )
    assert bounds.longest_trip_s == pytest.approx(max(one_s for one_s, _ in plans_s), abs=1e-4)
    assert bounds.originator_slots_s <= max(all_s for _, all_s in plans_s) + 1e-4
