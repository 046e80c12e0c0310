"""Which stage a joiner takes, and who moves to an empty one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocols.placement import adopter, choose_stage
from protocols.swarm import PeerInfo, PeerState, SwarmView
from tests.protocols.builders import info, view_of


def test_a_joiner_takes_the_stage_with_fewest_replicas():
    assert choose_stage(view_of("a1", "b1", "b2", "c1", "d1", "d2"), 4, "z") == 2
    assert choose_stage(view_of("b1", "b2", "c1", "d1", "d2"), 4, "z") == 0
    assert choose_stage(view_of(), 4, "z") == 1


def test_a_joiner_counts_those_that_are_still_catching_up():
    """Ten peers that join at once must not all take the same stage."""
    coming = info("c1", state=PeerState.CATCHING_UP)
    assert choose_stage(view_of("a1", "b1", coming, "d1"), 4, "z") == 1
    assert choose_stage(view_of("a1", "a2", "b1", "b2", coming, "d1", "d2"), 4, "z") == 2


def test_a_crowd_of_joiners_that_sees_the_same_view_spreads_over_the_stages():
    """Containers of one compose file start together; three of five took the first stage, and the last stayed empty."""
    crowd = [
        PeerInfo(peer=name, stage=None, state=PeerState.JOINING) for name in ("p1", "p2", "p3", "p4", "p5")
    ]
    view = SwarmView((*view_of("a1").peers, *crowd))
    assert [choose_stage(view, 5, joiner.peer) for joiner in crowd] == [1, 2, 3, 4, 1]


def test_the_lowest_id_of_the_richest_stage_moves():
    view = view_of("a1", "a2", "b1", "b2", "d1", "d2", "d3")
    assert adopter(view, 2, 4) == "d1"


def test_nobody_leaves_a_stage_empty_to_fill_another():
    assert adopter(view_of("a1", "b1", "d1"), 2, 4) is None


def test_first_stage_peers_move_only_when_no_middle_stage_can_spare_one():
    """They hold the data and the head; but a run without a stage waits for ever."""
    assert adopter(view_of("a1", "a2", "a3", "b1", "b2", "d1"), 2, 4) == "b1"
    assert adopter(view_of("a1", "a2", "a3", "b1", "d1"), 2, 4) == "a1"
    assert adopter(view_of("a1", "b1", "d1"), 2, 4) is None


@given(st.permutations(["a1", "b1", "b2", "c1", "d1", "d2"]))
def test_everybody_computes_the_same_adopter(order: list[str]):
    assert adopter(view_of(*order), 2, 4) == "b1"
