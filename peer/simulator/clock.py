"""Virtual time: one heap of calls, ordered by time and then by when they were asked for. Nothing ever waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """`now` moves only in `step`, never back. Equal times run in the order of their asking, so a seed fixes all."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_asked = 0

    def at(self, when_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._num_asked += 1
        heapq.heappush(self._heap, (max(when_s, self.now), self._num_asked, call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay_s, call, *arguments)

    def next_s(self) -> float | None:
        """When something happens next."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> bool:
        """Run the next call; False when nothing is left."""
        if not self._heap:
            return False
        self.now, _, call, arguments = heapq.heappop(self._heap)
        call(*arguments)
        return True
