"""Suspicion is a local opinion that ends."""

from __future__ import annotations

from protocols.outlook import Outlook
from tests.protocols.builders import info, view_of


def an_outlook() -> Outlook:
    outlook = Outlook(suspect_s=15.0)
    outlook.see(view_of("a1", "b1", "b2"))
    return outlook


def visible(outlook: Outlook) -> list[str]:
    return [each.peer for each in outlook.visible.peers]


def test_a_suspect_is_out_of_sight_until_it_speaks():
    outlook = an_outlook()
    assert outlook.suspect("b1", 1.0)
    assert not outlook.suspect("b1", 2.0)
    assert visible(outlook) == ["a1", "b2"]
    outlook.trust("b1")
    assert visible(outlook) == ["a1", "b1", "b2"]


def test_a_suspicion_ends_by_itself():
    """The peer may never have a reason to speak to us."""
    outlook = an_outlook()
    outlook.suspect("b1", 1.0)
    assert outlook.next_deadline() == 16.0
    outlook.on_deadline(16.0)
    assert visible(outlook) == ["a1", "b1", "b2"]


def test_a_new_life_is_not_under_the_old_suspicion():
    """Killed and started again within seconds: its record shows a later start."""
    outlook = an_outlook()
    outlook.suspect("b1", 1.0)
    outlook.see(view_of("a1", "b1", "b2"))
    assert visible(outlook) == ["a1", "b2"]
    outlook.see(view_of("a1", info("b1", started_unix_s=5.0), "b2"))
    assert visible(outlook) == ["a1", "b1", "b2"]


def test_a_refusal_holds_until_the_next_look_at_the_table():
    outlook = an_outlook()
    outlook.avoid("b2")
    assert visible(outlook) == ["a1", "b1"]
    outlook.see(outlook.view)
    assert visible(outlook) == ["a1", "b1", "b2"]


def test_originators_are_the_visible_ones():
    outlook = an_outlook()
    assert outlook.originators == ("a1",)
    outlook.suspect("a1", 0.0)
    assert outlook.originators == ()
