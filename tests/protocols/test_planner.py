"""Paths: legal, balanced, the same for everybody."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from peer.simulator.swarm import tiny_spec
from protocols.costs import Costs
from protocols.messages import Hop
from protocols.planner import NoFeasiblePath, Planner
from protocols.stage_order import is_legal
from protocols.swarm import SwarmView
from tests.protocols.builders import EVERYBODY, SPEC, info, view_of


def stages(path) -> tuple[int, ...]:
    return tuple(hop.stage for hop in path)


def test_a_round_is_spread_over_equal_replicas():
    """Two microbatches, two replicas a stage: each replica gets one."""
    planner = Planner(run=SPEC, me="a1", costs=Costs("a1"))
    used = Counter(hop.peer for counter in range(2) for hop in planner.plan(EVERYBODY, counter)[1:])
    assert used == dict.fromkeys(("b1", "b2", "c1", "c2", "d1", "d2"), 1)


def test_a_slow_replica_gets_less():
    """b1 takes ten times longer: of six microbatches it gets none or one."""
    view = view_of("a1", info("b1", forward_s=0.5), info("b2", forward_s=0.05), "c1", "d1")
    planner = Planner(run=SPEC, me="a1", costs=Costs("a1"))
    used = Counter(hop.peer for counter in range(6) for hop in planner.plan(view, counter)[1:])
    assert used["b1"] <= 1
    assert used["b2"] >= 5


def test_load_is_counted_by_round():
    planner = Planner(run=SPEC, me="a1", costs=Costs("a1"))
    first = planner.plan(EVERYBODY, 0)
    planner.start_round(0)
    assert planner.plan(EVERYBODY, 0) == first


def test_a_near_replica_is_preferred():
    planner = Planner(run=SPEC, me="a1", costs=Costs("a1"))
    for peer in ("b1", "d1"):
        planner.costs.measured_round_trip(peer, SwarmView(), 0.5)
    for counter in range(2):
        planner.start_round(0)
        path = planner.plan(EVERYBODY, counter)
        assert Hop(1, "b2") in path
        assert Hop(3, "d2") in path


def test_one_missing_stage_is_skipped_and_two_are_not():
    """Crucible's rule: at most one stage, or a quarter of the path."""
    planner = Planner(run=SPEC, me="a1", costs=Costs("a1"))
    assert stages(planner.plan(view_of("a1", "b1", "d1"), 0)) == (0, 1, 3)
    assert planner.plan(view_of("a1", "b1"), 0) == NoFeasiblePath(empty_stages=(2, 3))


def test_a_path_has_a_relay():
    """Two stages, and the second has lost its last replica: there is nobody to send to. It ended in a crash."""
    planner = Planner(run=tiny_spec(2), me="a1", costs=Costs("a1"))
    assert planner.plan(view_of("a1"), 0) == NoFeasiblePath(empty_stages=(1,))
    assert stages(planner.plan(view_of("a1", "b1"), 1)) == (0, 1)


def test_a_run_may_forbid_skipping():
    strict = Planner(run=tiny_spec(4, paths={"missing_stages_max": 0}), me="a1", costs=Costs("a1"))
    assert strict.plan(view_of("a1", "b1", "d1"), 0) == NoFeasiblePath(empty_stages=(2,))


def test_skips_by_plan_visit_all_stages_equally():
    """SkipPipe: each microbatch runs 4 of 6 stages; over many, every middle stage has run alike."""
    spec = tiny_spec(6, paths={"path_stages": 4})
    view = view_of("a1", "b1", "c1", "d1", "e1", "f1")
    planner = Planner(run=spec, me="a1", costs=Costs("a1"))
    visits = Counter(stage for counter in range(100) for stage in stages(planner.plan(view, counter)))
    assert max(visits[stage] for stage in range(1, 6)) - min(visits[stage] for stage in range(1, 6)) <= 5


PEERS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.sampled_from((0.0, 0.01, 0.2))),
    min_size=4,
    max_size=16,
)


@given(PEERS, st.integers(0, 2), st.integers(3, 6), st.randoms(use_true_random=False))
def test_every_path_is_legal_and_the_same_for_all(peers, swaps_max, path_stages, random):
    """The path obeys the rules, runs on serving replicas, and does not depend on the order of the view."""
    rules = {"path_stages": path_stages, "swaps_max": swaps_max}
    spec = tiny_spec(6, paths=rules)
    infos = {
        f"{chr(97 + stage)}{number}": info(f"{chr(97 + stage)}{number}", forward_s=forward_s)
        for stage, number, forward_s in peers
    }
    members = [info("a1"), *infos.values()]
    view = view_of(*members)
    random.shuffle(members)
    one, other = (
        Planner(run=spec, me="a1", costs=Costs("a1")),
        Planner(run=spec, me="a1", costs=Costs("a1")),
    )
    for counter in range(4):
        path = one.plan(view, counter)
        assert path == other.plan(view_of(*members), counter)
        missing = view.empty_stages(6)
        if isinstance(path, NoFeasiblePath):
            assert path.empty_stages == missing
            continue
        length = min(path_stages, 6 - len(missing))
        width = max(spec.paths.skip_width_max, len(missing) + 1)
        assert is_legal(stages(path), 6, length, swaps_max=swaps_max, skip_width_max=width)
        assert all(hop.peer in view and ord(hop.peer[0]) - 97 == hop.stage for hop in path)


def test_a_share_of_the_training_leaves_out_one_stage_and_validation_none():
    """Every eighth microbatch, each stage as often as the others; the same choice whenever it is asked."""
    spec = tiny_spec(4, paths={"skip_train_share": 0.125})
    planner = Planner(run=spec, me="a1", costs=Costs("a1"))
    paths = [planner.plan(EVERYBODY, counter, index=counter) for counter in range(1600)]
    short = [stages(path) for path in paths if len(path) < 4]
    assert 150 < len(short) < 250
    left_out = Counter(next(iter({1, 2, 3} - set(path))) for path in short)
    assert min(left_out.values()) > 0.6 * max(left_out.values())
    again = Planner(run=spec, me="a1", costs=Costs("a1"))
    assert [stages(again.plan(EVERYBODY, counter, index=counter)) for counter in range(1600)] == [
        stages(path) for path in paths
    ]
    assert all(len(planner.plan(EVERYBODY, counter)) == 4 for counter in range(50))


def test_paths_grow_with_the_rounds_where_the_run_says_so():
    """SkipPipe early in training, whole paths later: what it saves then costs least."""
    spec = tiny_spec(5, paths={"growth": [[0, 3], [10, 4], [20, 5]], "planned": False})
    planner = Planner(run=spec, me="a1", costs=Costs("a1"))
    view = view_of(*EVERYBODY.peers, info("e1", stage=4))
    lengths = []
    for round_ in (0, 9, 10, 19, 20, 500):
        planner.start_round(round_)
        lengths.append(len(planner.plan(view, round_)))
    assert lengths == [3, 3, 4, 4, 5, 5]


def test_a_missing_stage_is_skipped_for_so_many_rounds_and_then_waited_for():
    """K_max: what nobody can take over must not be trained without for ever. Once it is back, all begins anew."""
    planner = Planner(run=tiny_spec(4, paths={"missing_rounds_max": 3}), me="a1", costs=Costs("a1"))
    without = view_of("a1", "b1", "d1")
    for round_ in range(10, 13):
        planner.start_round(round_)
        assert stages(planner.plan(without, round_)) == (0, 1, 3)
    planner.start_round(13)
    assert planner.plan(without, 13) == NoFeasiblePath(empty_stages=(2,))
    assert stages(planner.plan(view_of("a1", "b1", "c1", "d1"), 14)) == (0, 1, 2, 3)
    assert stages(planner.plan(without, 15)) == (0, 1, 3)
