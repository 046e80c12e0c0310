"""How long an originator's microbatches are under way, and how long it waits for one before it tries another path."""

from __future__ import annotations

from protocols.run_spec import LivenessSpec

TRIP_FACTOR = 8.0  # a deadline is so many times the usual trip: machines are shared and stall
TRIP_FLOOR_S = 5.0
TRIP_DECAY = 0.2


class Trips:
    """Smoothed trip time, from the first hop's send to the last gradient's return."""

    def __init__(self, liveness: LivenessSpec) -> None:
        self._attempt_s = liveness.attempt_s
        self._usual_s: float | None = None

    def measured(self, seconds: float) -> None:
        old_s = self._usual_s
        self._usual_s = seconds if old_s is None else old_s + TRIP_DECAY * (seconds - old_s)

    def limit_s(self, tries: int) -> float:
        """Doubles with each try: a relay that waits for its round is slow, not lost."""
        if self._usual_s is None:
            return self._attempt_s
        return min(self._attempt_s, max(TRIP_FLOOR_S, TRIP_FACTOR * self._usual_s) * 2 ** min(tries - 1, 8))
