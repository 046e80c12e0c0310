"""One plan for the group, the same for everybody, and what an originator does with its part."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from peer.simulator.swarm import tiny_spec
from protocols import group_plan
from protocols.actions import Count, MakePlan
from protocols.coordinates import Coordinate
from protocols.costs import Costs
from protocols.events import PlanMade
from protocols.group_plan import DRIFT_AFTER_S, GroupPlan, group_of, solve
from protocols.swarm import SwarmView
from tests.protocols.builders import info, view_of

SPEC = tiny_spec(4, paths={"planned": True}, rounds={"microbatches": 2})
NAMES = ("a1", "a2", "b1", "b2", "c1", "c2", "d1", "d2")


def swarm(*names: str, **changes: object) -> SwarmView:
    """Odd numbers live in one town, even ones in another; `changes` are fields of b1."""
    infos = []
    for name in names:
        place = Coordinate(0.0 if name[1] == "1" else 0.1, 0.0, 0.001, 0.1)
        told = {"forward_s": 0.01, "backward_s": 0.02, "slots": 3, "coordinate": place}
        infos.append(info(name, **{**told, **(changes if name == "b1" else {})}))
    random.Random(len(names)).shuffle(infos)
    return view_of(*infos)


def asked(group: GroupPlan, view: SwarmView, now: float = 0.0) -> MakePlan:
    (action,) = group.want(view, now)
    assert isinstance(action, MakePlan)
    return action


def planned(group: GroupPlan, view: SwarmView, now: float = 0.0) -> PlanMade:
    action = asked(group, view, now)
    made = solve(action.problem, action.previous)
    group.on_made(made)
    return made


def originator(me: str) -> GroupPlan:
    return GroupPlan(SPEC, me, Costs(me))


def test_originators_agree_and_stay_in_their_town():
    """Each computes the plan by itself; the paths of both are those of one plan, and nobody crosses the sea."""
    view = swarm(*NAMES)
    one, two = originator("a1"), originator("a2")
    plans = [planned(group, view).plan for group in (one, two)]
    assert plans[0].microbatches == plans[1].microbatches
    for group, town in ((one, "1"), (two, "2")):
        for index in range(2):
            path = group.path(index, view)
            assert path is not None
            assert [hop.peer for hop in path] == [f"{stage}{town}" for stage in "abcd"]
        assert group.path(2, view) is None  # a round has no third microbatch


def test_nothing_is_asked_for_twice():
    """Not while a plan is being made, not for the same members, not for costs that have hardly moved."""
    group = originator("a1")
    action = asked(group, swarm(*NAMES))
    assert group.want(swarm(*NAMES), 0.5) == []
    group.on_made(solve(action.problem, None))
    assert group.want(swarm(*NAMES, forward_s=0.011), DRIFT_AFTER_S + 1) == []
    assert group.want(swarm(*NAMES, forward_s=0.05), DRIFT_AFTER_S - 1) == []
    assert asked(group, swarm(*NAMES, forward_s=0.05), DRIFT_AFTER_S + 1).problem.members


def test_a_lost_relay_is_repaired_around():
    """b1 is gone: its paths go through b2, all others are as they were, and no plan is made anew."""
    group = originator("a1")
    first = planned(group, swarm(*NAMES)).plan
    left = [name for name in NAMES if name != "b1"]
    assert group.path(0, swarm(*left)) is None  # until the repair is there, the fastest path is taken
    action = asked(group, swarm(*left), 1.0)
    assert action.previous is first
    group.on_made(solve(action.problem, action.previous))
    path = group.path(0, swarm(*left))
    assert path is not None
    assert [hop.peer for hop in path] == ["a1", "b2", "c1", "d1"]


def test_an_answer_to_an_older_question_is_dropped():
    group = originator("a1")
    old = asked(group, swarm(*NAMES))
    made = solve(old.problem, None)
    group.on_made(made)
    newer = asked(group, swarm("a1", "b1", "c1", "d1"), 1.0)
    assert group.on_made(made) == []
    assert group.on_made(solve(newer.problem, newer.previous))


def test_a_failed_plan_is_counted():
    group = originator("a1")
    action = asked(group, swarm(*NAMES))
    (counted,) = group.on_made(PlanMade(problem=action.problem, plan=None, reason="why not"))
    assert counted == Count(name="plan-failed", detail="why not", notable=True)
    assert group.path(0, swarm(*NAMES)) is None


def test_large_swarms_are_cut_into_groups_of_neighbours_alike_by_everybody():
    """Seventy-two peers in two towns: each originator plans with its own town, and both towns have every stage."""
    infos = tuple(
        sorted(
            (
                info(f"{stage}{number:02d}", coordinate=Coordinate(0.1 * (number % 2), 0.0, 0.001, 0.1))
                for stage in "abcd" for number in range(18)
            ),
            key=lambda each: each.peer,
        )
    )  # fmt: skip
    groups = {group_of(each.peer, infos) for each in infos}
    assert len(groups) == 2
    for group in groups:
        assert len({each.coordinate for each in group}) == 1
        assert Counter(each.stage for each in group) == {0: 9, 1: 9, 2: 9, 3: 9}
    joiners = group_of("z", infos)
    assert joiners in groups
    assert group_of("a00", infos[:40]) == infos[:40]


def test_a_stage_that_nobody_serves_does_not_stop_the_cut():
    infos = tuple(info(f"{stage}{number:02d}") for stage in "abd" for number in range(24))
    assert {each.stage for each in group_of("a00", infos)} == {0, 1, 3}


@pytest.mark.parametrize(
    "nonsense",
    [
        {"forward_s": 1e6},
        {"forward_s": 1e-300},
        {"backward_s": 1e6},
        {"slots": 0},
        {"upload_bytes_per_s": 1e-9},
        {"coordinate": Coordinate(3600.0, -3600.0, 1.0, 0.0)},
    ],
)
def test_nonsense_in_one_record_does_not_cost_the_others_their_plan(nonsense: dict[str, object]):
    """Records are signed, not true: what they claim may be anything that their format admits."""
    made = planned(originator("a1"), swarm(*NAMES, **nonsense))
    assert made.plan is not None, made.reason
    assert len(made.plan.microbatches) == 4


def test_a_coordinate_at_the_end_of_the_world_that_calls_contradict_costs_nobody_the_plan():
    """Claimed over an hour away, answered in 20 ms: what was measured counts, and no link becomes negative."""
    costs = Costs("a1")
    view = swarm(*NAMES, coordinate=Coordinate(3600.0, -3600.0, 3600.0, 0.0))
    me = view.get("a1")
    costs.measured_round_trip("b1", view, 0.02)
    made = planned(GroupPlan(SPEC, "a1", costs), view)
    assert me is not None
    assert made.plan is not None, made.reason
    links = made.problem.instance().link_s
    assert links.min() >= 0
    names = made.problem.instance().peers
    assert links[names.index("a1"), names.index("b1")] < 0.1


def test_a_search_that_breaks_answers_all_the_same(monkeypatch: pytest.MonkeyPatch):
    """A fault of ours in the search costs the plan; a question without an answer would cost all plans to come."""
    action = asked(originator("a1"), swarm(*NAMES))
    monkeypatch.setattr(group_plan, "find_paths", lambda *_, **__: 1 // 0)
    made = solve(action.problem, None)
    assert made.plan is None
    assert made.reason == "ZeroDivisionError: integer division or modulo by zero"
