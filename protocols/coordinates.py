"""Where a peer lies in the network: the latency between any two peers from a few numbers of each.

Vivaldi with heights (Dabek, Cox, Kaashoek and Morris 2004, sections 3.4 and 5.4): a round trip is the distance of two
points in a plane plus both heights, the plane for the core of the internet, a height for one's own line. After each
measured round trip a peer moves a little towards where it would have been exact. So a swarm of N peers publishes N
coordinates, not N x N latencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, hypot, isfinite, sin, tau
from typing import TYPE_CHECKING

from protocols.hashing import share_of

if TYPE_CHECKING:
    from protocols.swarm import PeerId

STEP = 0.25  # c_c and c_e of the paper
HEIGHT_MIN_S = 1e-5
ERROR_MAX = 1.0  # of one who knows nothing yet
ROUND_TRIP_MIN_S = 1e-5
ROUND_TRIP_MAX_S = 60.0
_PUBLISHED_DIGITS = 5  # seconds: 10 us


@dataclass(frozen=True, slots=True)
class Coordinate:
    """`error`: how far off its round trips are, as a share of them."""

    x_s: float = 0.0
    y_s: float = 0.0
    height_s: float = HEIGHT_MIN_S
    error: float = ERROR_MAX

    def published(self) -> Coordinate:
        """Rounded: what changes less is no news."""
        digits = _PUBLISHED_DIGITS
        return Coordinate(
            round(self.x_s, digits),
            round(self.y_s, digits),
            round(self.height_s, digits),
            round(self.error, 2),
        )


def round_trip_s(one: Coordinate, other: Coordinate) -> float:
    """There and back, as the coordinates have it."""
    return hypot(one.x_s - other.x_s, one.y_s - other.y_s) + one.height_s + other.height_s


def moved(mine: Coordinate, theirs: Coordinate, seconds: float, *, me: PeerId, other: PeerId) -> Coordinate:
    """`mine` after a round trip to `theirs` took `seconds`. Ids break the tie of two peers at one point."""
    if not isfinite(seconds):
        return mine
    seconds = min(max(seconds, ROUND_TRIP_MIN_S), ROUND_TRIP_MAX_S)
    expected_s = round_trip_s(mine, theirs)
    weight = mine.error / (mine.error + theirs.error) if mine.error + theirs.error > 0 else 0.5
    miss = abs(expected_s - seconds) / seconds
    error = min(ERROR_MAX, miss * STEP * weight + mine.error * (1 - STEP * weight))
    push_s = STEP * weight * (seconds - expected_s)
    dx_s, dy_s = mine.x_s - theirs.x_s, mine.y_s - theirs.y_s
    if hypot(dx_s, dy_s) < HEIGHT_MIN_S:
        angle = tau * share_of(f"{me}>{other}")
        dx_s, dy_s = HEIGHT_MIN_S * cos(angle), HEIGHT_MIN_S * sin(angle)
    heights_s = mine.height_s + theirs.height_s
    norm_s = hypot(dx_s, dy_s) + heights_s
    return Coordinate(
        x_s=mine.x_s + push_s * dx_s / norm_s,
        y_s=mine.y_s + push_s * dy_s / norm_s,
        height_s=max(HEIGHT_MIN_S, mine.height_s + push_s * heights_s / norm_s),
        error=error,
    )
