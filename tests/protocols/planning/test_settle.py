"""What shares relays is polished together, what does not keeps its times, and no plan waits for itself for good."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from protocols.planning.instance import Instance
from protocols.planning.mend import Mend
from protocols.planning.objective import Objective
from protocols.planning.paths import evened, in_turns
from protocols.planning.rows import first_rows
from protocols.planning.settle import Thoroughness, settle
from tests.protocols.planning.published import arranged_instance, published_instance
from tests.protocols.planning.small import broken_rules, instances

NO_TIME = Thoroughness(operations_max=0)


def test_paths_that_wait_for_each_other_for_good_are_put_in_order():
    """Two originators use two relays crosswise, one slot each; without any time to polish, order alone must help."""
    instance = arranged_instance([1.0] * 4, [[1.0] * 4] * 4, [[0, 1], [2], [3]], path_stages=3)
    instance = replace(instance, slots=instance.slots.clip(max=1))
    objective = Objective(instance)
    mend = Mend(instance, objective, [(0, 2, 3), (1, 3, 2)])
    mend.touch_all()
    found = settle(instance, mend, objective.score(mend.paths).finish_s, NO_TIME)
    assert found.paths == ((0, 2, 3), (1, 2, 3))
    assert max(found.finish_s) < 60


def test_what_nobody_touched_keeps_its_path_and_its_time():
    """Rows without a common relay: a change to one originator's microbatch concerns its own six only."""
    instance = published_instance("geo-distributed")
    objective = Objective(instance)
    mend = evened(instance, objective, in_turns(instance, first_rows(instance)))
    finish_s = objective.score(mend.paths).finish_s
    mend.changed.add(0)
    own = [index for index, path in enumerate(mend.paths) if path[0] == mend.paths[0][0]]
    assert mend.touched() == own
    found = settle(instance, mend, finish_s, Thoroughness(operations_max=2_000))
    for index in set(range(30)) - set(own):
        assert found.paths[index] == mend.paths[index]
        assert found.finish_s[index] == finish_s[index]
    assert max(found.finish_s[index] for index in own) <= max(finish_s[index] for index in own)


def test_a_tangle_too_large_to_polish_is_timed_as_it_is():
    instance = published_instance("5-clusters")
    objective = Objective(instance)
    mend = evened(instance, objective, in_turns(instance, first_rows(instance)))
    mend.touch_all()
    found = settle(instance, mend, [0.0] * 30, Thoroughness(operations_max=9_999, touched_max=29))
    assert list(found.paths) == mend.paths
    assert found.finish_s == objective.score(mend.paths).finish_s


@given(instances())
@settings(max_examples=25)
def test_polishing_makes_no_plan_longer_and_breaks_no_rule(instance: Instance):
    objective = Objective(instance)
    mend = evened(instance, objective, in_turns(instance, first_rows(instance, fine=True)))
    mend.touch_all()
    before = objective.score(mend.paths)
    found = settle(instance, mend, before.finish_s, Thoroughness(operations_max=2_000, shakes=2))
    assert found.makespan_s <= before.makespan_s
    assert broken_rules(found) == []
    assert found.makespan_s == objective.score(found.paths).makespan_s
