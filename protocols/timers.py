"""Named deadlines: a heap with lazy deletion, so that setting, clearing and asking are cheap."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Timers(Generic[Name]):
    """Deadlines by name. Setting a name again moves it; equal deadlines come due in the order they were set."""

    def __init__(self) -> None:
        self._order_of: dict[Name, int] = {}
        self._live: set[int] = (
            set()
        )  # orders; asked for the earliest one much more often than anything is set
        self._heap: list[tuple[float, int, Name]] = []
        self._num_set = 0

    def set(self, name: Name, deadline_s: float) -> None:
        self._live.discard(self._order_of.get(name, 0))
        self._num_set += 1
        self._order_of[name] = self._num_set
        self._live.add(self._num_set)
        heapq.heappush(self._heap, (deadline_s, self._num_set, name))

    def clear(self, name: Name) -> None:
        self._live.discard(self._order_of.pop(name, 0))

    def names(self) -> list[Name]:
        """In the order in which they were first set."""
        return list(self._order_of)

    def __contains__(self, name: object) -> bool:
        return name in self._order_of

    def next(self) -> float | None:
        """The earliest deadline, None when there is none."""
        heap = self._heap
        while heap:
            if heap[0][1] in self._live:
                return heap[0][0]
            heapq.heappop(heap)
        return None

    def pop_due(self, now: float) -> list[Name]:
        """Remove and return the names whose deadline has passed, earliest first."""
        due: list[Name] = []
        while (deadline_s := self.next()) is not None and deadline_s <= now:
            name = heapq.heappop(self._heap)[2]
            self.clear(name)
            due.append(name)
        return due
