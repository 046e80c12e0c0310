"""Claims, measurements, and which of the two is believed."""

from __future__ import annotations

import pytest

from protocols.coordinates import Coordinate
from protocols.costs import TRIPS_KEPT, Costs
from tests.protocols.builders import info, view_of

NEAR = Coordinate(0.0, 0.0, 0.005, 0.1)
FAR = Coordinate(0.2, 0.0, 0.005, 0.1)
MEGABYTE = 1_000_000


def test_a_link_is_the_narrower_line_and_half_the_round_trip():
    costs = Costs("a1")
    slow = info("b1", coordinate=FAR, upload_bytes_per_s=1e6, download_bytes_per_s=8e6)
    fast = info("c1", coordinate=NEAR, upload_bytes_per_s=1e8, download_bytes_per_s=1e8)
    assert costs.link_s(slow, fast, MEGABYTE) == pytest.approx(0.105 + 1.0)
    assert costs.link_s(fast, slow, MEGABYTE) == pytest.approx(0.105 + 0.125)


def test_a_coordinate_that_own_calls_contradict_is_not_believed():
    """b1 says that it lies next to everybody; its answers take a second."""
    costs = Costs("a1")
    me, liar = info("a1", coordinate=NEAR), info("b1", coordinate=NEAR)
    costs.measured_round_trip("b1", liar, 1.0)
    assert costs.latency_s(me, liar) == costs.latency_s(liar, me) == 0.5
    assert costs.contradicted((me, liar)) == {"b1": 0.5}
    assert costs.latency_s(liar, info("c1", coordinate=NEAR)) == 0.005  # a link that we have not measured


def test_noise_is_no_contradiction():
    """A round trip half as long again as foretold is the usual weather, and everybody's table stays the same."""
    costs = Costs("a1")
    me, other = info("a1", coordinate=NEAR), info("b1", coordinate=NEAR)
    costs.measured_round_trip("b1", other, 0.015)
    assert costs.contradicted((me, other)) == {}


def test_a_claimed_speed_that_no_trip_bears_out_is_not_believed():
    """Every trip through b1 takes five times what its record promises; c1 was on some of them, and on quick ones."""
    costs = Costs("a1")
    boaster, honest = info("b1", forward_s=0.01), info("c1", forward_s=0.01)
    for _ in range(TRIPS_KEPT):
        costs.measured_trip(("b1", "c1"), 5.0)
        costs.measured_trip(("c1", "d1"), 1.2)
    assert costs.forward_s(boaster) == costs.believed(boaster).forward_s == pytest.approx(0.05)
    assert costs.forward_s(honest) == 0.01
    assert costs.believed(honest) is honest


def test_a_queue_is_not_taken_for_a_slow_peer():
    """The shortest of several trips counts, and a few trips tell nothing."""
    costs = Costs("a1")
    for took in (9.0, 9.0, 1.1, 9.0, 9.0, 9.0, 9.0, 9.0):
        costs.measured_trip(("b1",), took)
    for _ in range(TRIPS_KEPT - 1):
        costs.measured_trip(("c1",), 9.0)
    assert costs.forward_s(info("b1", forward_s=0.01)) == 0.01
    assert costs.forward_s(info("c1", forward_s=0.01)) == 0.01


def test_what_is_published_is_rounded_and_decays():
    costs = Costs("a1")
    for seconds in (0.1, 0.2, 0.2):
        costs.measured_forward(seconds)
    costs.measured_backward(0.25)
    costs.measured_access(1.23456e7, 0.0)
    told = costs.published()
    assert (told.forward_s, told.backward_s) == (0.14, 0.25)
    assert (told.upload_bytes_per_s, told.download_bytes_per_s) == (1.2e7, 0.0)


def test_those_that_left_the_table_are_forgotten():
    costs = Costs("a1")
    costs.measured_round_trip("b1", None, 1.0)
    costs.forget(view_of("a1", "c1"))
    assert costs.latency_s(info("a1"), info("b1")) == 0.0
