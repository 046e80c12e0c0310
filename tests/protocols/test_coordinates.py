"""Coordinates find out from round trips alone who lies near whom."""

from __future__ import annotations

from math import hypot
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from protocols.coordinates import Coordinate, moved, round_trip_s

# Three towns and the lines of four people: seconds.
PLACES = {
    "lisbon": (0.0, 0.0, 0.004),
    "porto": (0.003, 0.0, 0.010),
    "oslo": (0.02, 0.025, 0.002),
    "perth": (0.14, -0.05, 0.02),
}


def true_round_trip_s(one: str, other: str) -> float:
    (x1, y1, h1), (x2, y2, h2) = PLACES[one], PLACES[other]
    return hypot(x1 - x2, y1 - y2) + h1 + h2


def settled(rounds: int) -> dict[str, Coordinate]:
    """Each calls the others in turn."""
    known = dict.fromkeys(PLACES, Coordinate())
    for _ in range(rounds):
        for me in PLACES:
            for other in PLACES:
                if other != me:
                    seconds = true_round_trip_s(me, other)
                    known[me] = moved(known[me], known[other], seconds, me=me, other=other)
    return known


def test_round_trips_of_strangers_are_foretold():
    """After some calls the coordinates give every pair's round trip to within a tenth."""
    known = settled(60)
    misses = [
        abs(round_trip_s(known[one], known[other]) / true_round_trip_s(one, other) - 1)
        for one in PLACES for other in PLACES if one < other
    ]  # fmt: skip
    assert median(misses) < 0.05
    assert max(misses) < 0.15
    assert all(coordinate.error < 0.2 for coordinate in known.values())


@given(
    st.builds(Coordinate, st.floats(-60, 60), st.floats(-60, 60), st.floats(1e-5, 60), st.floats(0, 1)),
    st.floats(allow_nan=True, allow_infinity=True),
)
def test_no_claim_and_no_measurement_makes_a_coordinate_wild(theirs, seconds):
    """A peer may publish any coordinate that a record admits, and a clock may jump."""
    after = moved(Coordinate(), theirs, seconds, me="a", other="b")
    assert hypot(after.x_s, after.y_s) < 120
    assert 0 < after.height_s < 120
    assert 0 <= after.error <= 1
    assert after.published().height_s > 0
