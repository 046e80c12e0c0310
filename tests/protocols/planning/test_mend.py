"""Changes to single microbatches: uneven visits are levelled, overloads spill over, lost hops are replaced."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protocols.planning.instance import Instance
from protocols.planning.mend import GONE, Mend
from protocols.planning.objective import Objective
from protocols.planning.paths import in_turns
from protocols.planning.rows import first_rows
from tests.protocols.planning.published import published_instance
from tests.protocols.planning.small import instances, keeps, stages_of


def mend_of(instance: Instance) -> Mend:
    return Mend(instance, Objective(instance), in_turns(instance, first_rows(instance)))


@given(instances())
def test_every_step_leaves_legal_paths_and_does_not_make_visits_less_even(instance: Instance):
    mend = mend_of(instance)
    before, originators = mend.unevenness, [path[0] for path in mend.paths]
    mend.level()
    mend.spill()
    assert mend.unevenness <= max(1, before)
    assert [path[0] for path in mend.paths] == originators
    assert all(keeps(instance.rules, stages_of(instance, path)) for path in mend.paths)
    changed = [index for index in range(len(mend.paths)) if index in mend.changed]
    assert set(changed) <= set(mend.touched())


def test_visits_of_four_originators_are_levelled_to_within_one():
    """Twelve visits of whole rows do not divide by five stages; 72 of microbatches leave two stages with 15."""
    instance = published_instance("geo-distributed")
    instance = instance.subset(np.delete(np.arange(20), 0))
    mend = mend_of(instance)
    assert mend.unevenness == 6
    mend.level()
    assert sorted(mend.visits.values()) == [14, 14, 14, 15, 15]


def test_what_is_too_much_for_one_relay_spills_over_to_another():
    """Two replicas of stage 1 for three rows of six: 12 and 6 become 9 and 9, though both have room for 6 only."""
    instance = published_instance("geo-distributed").subset(np.delete(np.arange(20), 8))
    mend = mend_of(instance)
    relays = instance.replicas(1).tolist()
    assert sorted(mend.loads[relay] for relay in relays) == [6, 12]
    mend.spill()
    assert [mend.loads[relay] for relay in relays] == [9, 9]
    assert len(mend.changed) == 3


@given(st.integers(0, 19), st.booleans())
def test_lost_hops_are_replaced_within_their_stage(lost: int, whole_paths: bool):
    """As repair does it: the peer is gone from the instance, and its hops are marked."""
    whole = published_instance("geo-distributed")
    assert whole.stage_of is not None
    if whole.stage_of[lost] == 0:
        return
    paths = in_turns(whole, first_rows(whole))
    instance = whole.subset(np.delete(np.arange(20), lost))
    left = [tuple(GONE if hop == lost else hop - (hop > lost) for hop in path) for path in paths]
    mend = Mend(instance, Objective(instance), left)
    mend.replace_lost(int(whole.stage_of[lost]), whole_paths=whole_paths)
    assert all(keeps(instance.rules, stages_of(instance, path)) for path in mend.paths)
    assert mend.changed == {index for index, path in enumerate(left) if GONE in path}
    assert mend.unevenness == 0
    if whole_paths:
        assert len({mend.paths[index] for index in mend.changed}) == 1


def test_a_path_that_cannot_be_mended_is_made_anew():
    """No stage may be skipped, and the path had skipped one before it lost another: no order of the rest is legal."""
    whole = published_instance("geo-distributed")
    rules = replace(whole.rules, skip_width_max=1, swaps_max=0, path_stages=4)
    narrow = replace(whole, rules=replace(rules.without(4).without(5), skip_width_max=1))
    kept = np.flatnonzero((narrow.stage_of != 4) & (narrow.stage_of != 5))
    instance = narrow.subset(kept)
    originator, first, last = (int(instance.replicas(stage)[0]) for stage in (0, 1, 3))
    mend = Mend(instance, Objective(instance), [(originator, first, GONE, last)])
    mend.replace_lost(2)
    assert stages_of(instance, mend.paths[0]) == (0, 1, 2, 3)
