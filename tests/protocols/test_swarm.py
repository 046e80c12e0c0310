"""The immutable view."""

from __future__ import annotations

from protocols.swarm import PeerState
from tests.protocols.builders import info, view_of


def test_a_view_is_sorted_whatever_it_was_made_from():
    """All peers iterate alike, or their plans and partners would differ."""
    assert view_of("b2", "a1", "b1") == view_of("b1", "b2", "a1")
    assert [each.peer for each in view_of("b2", "a1", "b1").peers] == ["a1", "b1", "b2"]


def test_only_those_that_serve_are_replicas():
    view = view_of("b1", info("b2", state=PeerState.CATCHING_UP), info("b3", state=PeerState.LEAVING))
    assert [each.peer for each in view.replicas(1)] == ["b1"]
    assert "b2" in view
    assert "b9" not in view


def test_empty_stages_are_middle_stages():
    """A swarm without a first stage has nobody who could skip anything."""
    assert view_of("b1", "d1").empty_stages(5) == (2, 4)


def test_without_leaves_the_old_view_alone():
    view = view_of("a1", "b1")
    assert view.without(["b1"]).replicas(1) == ()
    assert view.without([]) is view
    assert [each.peer for each in view.replicas(1)] == ["b1"]
