"""Virtual time."""

from __future__ import annotations

from peer.simulator.clock import Clock


def test_calls_run_in_time_and_then_in_the_order_of_their_asking():
    clock, log = Clock(), []
    clock.at(2.0, log.append, "late")
    clock.at(1.0, log.append, "first")
    clock.at(1.0, log.append, "second")
    while clock.step():
        pass
    assert log == ["first", "second", "late"]
    assert clock.now == 2.0


def test_time_never_goes_back():
    clock, log = Clock(), []
    clock.at(5.0, lambda: clock.at(1.0, lambda: log.append(clock.now)))
    clock.step()
    clock.step()
    assert log == [5.0]
    assert clock.next_s() is None
