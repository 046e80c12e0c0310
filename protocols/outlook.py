"""Whom a peer counts on: the table's view, less those that it could not reach or that refused it.

A suspicion is a local opinion: it ends when the peer speaks, shows a new life in the table, or after a while; what
was refused is forgotten at the next look at the table. Invariant: `visible` is `view` without both.
"""

from __future__ import annotations

from protocols.swarm import PeerId, SwarmView
from protocols.timers import Timers


class Outlook:
    """Plans use `visible`; confirmations use `view`."""

    def __init__(self, suspect_s: float) -> None:
        self.view = SwarmView()
        self.visible = SwarmView()
        self.originators: tuple[PeerId, ...] = ()  # those that are visible
        self._suspect_s = suspect_s
        self._suspects: Timers[PeerId] = Timers()
        self._avoided: set[PeerId] = set()

    def next_deadline(self) -> float | None:
        return self._suspects.next()

    def see(self, view: SwarmView) -> None:
        """A fresh view from the table."""
        for peer in self._suspects.names():
            old, new = self.view.get(peer), view.get(peer)
            if new is None or (old is not None and new.started_unix_s > old.started_unix_s):
                self._suspects.clear(peer)
        self.view = view
        self._avoided.clear()
        self._look()

    def suspect(self, peer: PeerId, now: float) -> bool:
        """We could not reach it. True when that is news."""
        is_news = peer not in self._suspects
        self._suspects.set(peer, now + self._suspect_s)
        if is_news:
            self._look()
        return is_news

    def trust(self, peer: PeerId) -> None:
        """It spoke: it lives."""
        if peer in self._suspects:
            self._suspects.clear(peer)
            self._look()

    def avoid(self, peer: PeerId) -> None:
        """It may live, but a microbatch did not get through it."""
        self._avoided.add(peer)
        self._look()

    def on_deadline(self, now: float) -> None:
        if self._suspects.pop_due(now):
            self._look()

    def _look(self) -> None:
        self.visible = self.view.without([*self._suspects.names(), *self._avoided])
        self.originators = tuple(info.peer for info in self.visible.originators())
