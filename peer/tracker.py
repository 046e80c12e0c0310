"""What a peer has done, for its status: losses, tokens and their rate, counters, the last notable events."""

from __future__ import annotations

import time
from collections import Counter, deque

from peer.status import EVENTS_MAX, VALIDATION_MAX, ValidationPoint
from protocols.actions import Count, MicrobatchFinished, OuterFinished

RATE_WINDOW_S = 30.0
DECAY = 0.2  # of what is told of averaging: weight of the newest step


class Tracker:
    """Fed by the daemon with the core's reports. Bounded in everything."""

    def __init__(self, tokens_per_microbatch: int) -> None:
        self._tokens_per_microbatch = tokens_per_microbatch
        self._round_losses: deque[tuple[int, float]] = deque(maxlen=256)
        self._validation: dict[int, list[float]] = {}
        self._finished: deque[tuple[float, int]] = deque()  # (when, tokens) within the rate window
        self._started_s = time.monotonic()
        self.tokens = 0
        self.apart = self.cosine = self.outer_wait_s = 0.0  # decayed means over outer steps with a partner
        self.counters: Counter[str] = Counter()
        self.events: deque[str] = deque(maxlen=EVENTS_MAX)

    def finished(self, event: MicrobatchFinished) -> None:
        if event.loss is None:
            self.counters["microbatches_given_up"] += 1
            return
        if not event.train:
            self._validation.setdefault(event.round, []).append(event.loss)
            while len(self._validation) > VALIDATION_MAX:
                del self._validation[min(self._validation)]
            return
        self.counters["microbatches"] += 1
        self.counters["stages_skipped"] += len(event.skipped)
        self.tokens += self._tokens_per_microbatch
        self._finished.append((time.monotonic(), self._tokens_per_microbatch))
        self._round_losses.append((event.round, event.loss))

    def averaged(self, event: OuterFinished) -> None:
        self.counters["outer_steps_averaged" if event.with_partner else "outer_steps_alone"] += 1
        if not event.with_partner:
            return
        weight = 1.0 if self.counters["outer_steps_averaged"] == 1 else DECAY
        self.apart += weight * (event.apart - self.apart)
        self.cosine += weight * (event.cosine - self.cosine)
        self.outer_wait_s += weight * (event.waited_s - self.outer_wait_s)

    def count(self, event: Count) -> None:
        self.counters[event.name] += 1
        if event.notable:
            self.note(f"{event.name} {event.detail}".rstrip())

    def note(self, text: str) -> None:
        """A line that a person would want to read later, with the time since the start."""
        self.events.append(f"{time.strftime('%H:%M:%S')} {text}")

    @property
    def loss(self) -> float | None:
        """Mean over the own microbatches of the newest round."""
        if not self._round_losses:
            return None
        newest = self._round_losses[-1][0]
        losses = [loss for round_, loss in self._round_losses if round_ == newest]
        return sum(losses) / len(losses)

    @property
    def tokens_per_s(self) -> float:
        """Over the last half minute, or since the start while that is shorter."""
        now = time.monotonic()
        while self._finished and now - self._finished[0][0] > RATE_WINDOW_S:
            self._finished.popleft()
        span_s = min(RATE_WINDOW_S, now - self._started_s)
        return sum(tokens for _, tokens in self._finished) / span_s if span_s > 0 else 0.0

    def validation(self) -> tuple[ValidationPoint, ...]:
        return tuple(
            ValidationPoint(round=round_, loss=sum(losses) / len(losses), num_microbatches=len(losses))
            for round_, losses in sorted(self._validation.items())
        )
