"""Claims, measurements, and which of the two is believed."""

from __future__ import annotations

import pytest

from protocols.coordinates import Coordinate
from protocols.costs import LINKS_MAX, TRIPS_KEPT, Costs, claimed_latency_s
from protocols.hashing import number_of
from protocols.swarm import SwarmView
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
    costs.measured_round_trip("b1", SwarmView((liar,)), 1.0)
    assert costs.latency_s(me, liar) == costs.latency_s(liar, me) == 0.5
    assert costs.contradicted((me, liar)) == {"b1": 0.5}
    assert costs.latency_s(liar, info("c1", coordinate=NEAR)) == 0.005  # a link that we have not measured


def test_noise_is_no_contradiction():
    """A round trip half as long again as foretold is the usual weather, and everybody's table stays the same."""
    costs = Costs("a1")
    me, other = info("a1", coordinate=NEAR), info("b1", coordinate=NEAR)
    costs.measured_round_trip("b1", SwarmView((other,)), 0.015)
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


def test_links_that_coordinates_get_wrong_are_named_and_believed():
    """A plane cannot hold every network: what c1 has measured to b1 goes before where both say that they lie."""
    costs = Costs("c1")
    view = SwarmView((info("b1", coordinate=NEAR), info("c1", coordinate=NEAR), info("d1")))
    for _ in range(60):
        costs.measured_round_trip("b1", view, 0.4)
        costs.measured_round_trip("a1", SwarmView((info("a1", coordinate=FAR),)), 0.02)
        costs.measured_round_trip("b1", view, 0.4)
    told = costs.published()
    mine = info("c1", coordinate=told.coordinate, links=told.links)
    assert claimed_latency_s(mine, info("b1", coordinate=NEAR)) == claimed_latency_s(info("b1"), mine) == 0.2
    assert claimed_latency_s(mine, info("e1", coordinate=told.coordinate)) < 0.2


def test_of_two_that_name_a_link_the_slower_is_believed():
    """A false claim costs its author work, and nobody else a slow path."""
    named = {peer: number_of(peer) for peer in ("b1", "c1")}
    slow = info("b1", coordinate=NEAR, links=((named["c1"], 0.3),))
    quick = info("c1", coordinate=NEAR, links=((named["b1"], 0.001),))
    assert claimed_latency_s(slow, quick) == claimed_latency_s(quick, slow) == 0.3


def test_a_record_names_only_the_worst_links():
    costs = Costs("a1")
    far = [info(f"p{number:02d}", coordinate=NEAR) for number in range(2 * LINKS_MAX)]
    view = SwarmView(tuple(far))
    for number, other in enumerate(far):
        costs.measured_round_trip(other.peer, view, 1.0 if number % 2 else 0.01)
    assert len(costs.published().links) == LINKS_MAX
    assert {number for number, _ in costs.published().links} < {number_of(other.peer) for other in far}


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
    costs.measured_round_trip("b1", SwarmView(), 1.0)
    costs.forget(view_of("a1", "c1"))
    assert costs.latency_s(info("a1"), info("b1")) == 0.0
