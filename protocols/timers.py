"""Named deadlines: a heap with lazy deletion, so that setting, clearing and asking are cheap."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Timers(Generic[Name]):
    """Deadlines by name. Setting a name again moves it; equal deadlines come due in the order they were set."""

    def __init__(self) -> None:
        self._current: dict[Name, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Name]] = []
        self._num_set = 0

    def set(self, name: Name, deadline_s: float) -> None:
        self._num_set += 1
        self._current[name] = (deadline_s, self._num_set)
        heapq.heappush(self._heap, (deadline_s, self._num_set, name))

    def clear(self, name: Name) -> None:
        self._current.pop(name, None)

    def names(self) -> list[Name]:
        """In the order in which they were first set."""
        return list(self._current)

    def __contains__(self, name: object) -> bool:
        return name in self._current

    def next(self) -> float | None:
        """The earliest deadline, None when there is none."""
        while self._heap:
            deadline_s, order, name = self._heap[0]
            if self._current.get(name) == (deadline_s, order):
                return deadline_s
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> list[Name]:
        """Remove and return the names whose deadline has passed, earliest first."""
        due: list[Name] = []
        while (deadline_s := self.next()) is not None and deadline_s <= now:
            name = heapq.heappop(self._heap)[2]
            del self._current[name]
            due.append(name)
        return due
