"""What one peer may cost us: rates, bytes in assembly, refusals, dials. Plain arithmetic over a given `now`.

Invariant: every quota is per peer or per lane, so that a peer which uses its own up delays or silences itself only.
Too much is answered by reading slower, never by losing what was sent; only nonsense is answered by hanging up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

REFUSALS_MAX = 20  # of one peer within
REFUSAL_WINDOW_S = 60.0
IGNORE_S = 60.0
BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 8.0
EMA_SHARE = 0.2  # of the newest sample


class Bucket:
    """Token bucket that runs into debt: a frame is read whole, then its sender waits."""

    def __init__(self, *, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def charge(self, amount: float, now: float) -> float:
        """Seconds until the sender is out of debt."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate) - amount
        self._at = now
        return max(0.0, -self._tokens / self._rate)


class Budget:
    """Bytes that a lane may hold in half-read tensors, over all peers; first come, first served."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()

    def take(self, amount: int) -> bool:
        """False: `wait` for it."""
        if self._waiting or amount > self._free:
            return False
        self._free -= amount
        return True

    def wait(self, amount: int, granted: Callable[[], object]) -> Callable[[], None]:
        """`granted` is called once the bytes are taken; the result forgets the request."""
        entry = (amount, granted)
        self._waiting.append(entry)
        return lambda: self._forget(entry)

    def give_back(self, amount: int) -> None:
        self._free += amount
        self._grant()

    def _forget(self, entry: tuple[int, Callable[[], object]]) -> None:
        if entry in self._waiting:
            self._waiting.remove(entry)
            self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            amount, granted = self._waiting.popleft()
            self._free -= amount
            granted()


class Offences:
    """Refused messages of one peer; REFUSALS_MAX of them in a minute and it is ignored for a minute."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=REFUSALS_MAX)
        self._ignored_until_s = 0.0

    def add(self, now: float) -> bool:
        """True: that was one too many."""
        self._times.append(now)
        if len(self._times) < REFUSALS_MAX or now - self._times[0] > REFUSAL_WINDOW_S:
            return False
        self._times.clear()
        self._ignored_until_s = now + IGNORE_S
        return True

    def ignored(self, now: float) -> bool:
        return now < self._ignored_until_s

    def clean(self, now: float) -> bool:
        """Nothing left to remember."""
        return not self.ignored(now) and (not self._times or now - self._times[-1] > REFUSAL_WINDOW_S)


class Backoff:
    """When to dial again, so that a dead peer costs little."""

    def __init__(self) -> None:
        self._failures = 0
        self._not_before_s = 0.0
        self.reason = ""  # of the last failure

    def failed(self, now: float, reason: str) -> None:
        self.reason = reason
        self._not_before_s = now + min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 16))
        self._failures += 1

    def clear(self) -> None:
        """It is alive."""
        self._failures, self._not_before_s = 0, 0.0

    def wait_s(self, now: float) -> float:
        return max(0.0, self._not_before_s - now)


class Average:
    """Smoothed measurement; None before the first."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + EMA_SHARE * (sample - self.value)
