"""Deadlines by name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocols.timers import Timers


def test_due_names_come_earliest_first_and_once():
    timers: Timers[str] = Timers()
    timers.set("late", 3.0)
    timers.set("early", 1.0)
    timers.set("far", 9.0)
    assert timers.pop_due(3.0) == ["early", "late"]
    assert timers.pop_due(3.0) == []
    assert timers.next() == 9.0


def test_setting_again_moves_a_deadline():
    """A lease that is renewed does not end at its first moment."""
    timers: Timers[str] = Timers()
    timers.set("lease", 1.0)
    timers.set("lease", 5.0)
    assert timers.pop_due(4.0) == []
    assert timers.pop_due(5.0) == ["lease"]


def test_a_cleared_deadline_never_comes():
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.clear("a")
    timers.clear("never set")
    assert timers.next() is None
    assert timers.pop_due(10.0) == []
    assert "a" not in timers


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.none() | st.floats(0, 100))), st.floats(0, 100))
def test_agrees_with_a_plain_dict(changes: list[tuple[str, float | None]], now: float):
    """Whatever is set, moved and cleared: due are exactly those whose last deadline has passed."""
    timers: Timers[str] = Timers()
    plain: dict[str, float] = {}
    for name, deadline_s in changes:
        if deadline_s is None:
            timers.clear(name)
            plain.pop(name, None)
        else:
            timers.set(name, deadline_s)
            plain[name] = deadline_s
    assert timers.next() == min(plain.values(), default=None)
    due = timers.pop_due(now)
    assert sorted(due) == sorted(name for name, deadline_s in plain.items() if deadline_s <= now)
    assert [plain[name] for name in due] == sorted(plain[name] for name in due)
