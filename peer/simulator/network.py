"""Seeded links between simulated peers, with the manners of `peer.transport`: two ordered lanes a pair, and an ack.

A send whose ack does not come fails after a time limit, even where the message itself has arrived: that is the case
that real networks produce and tests by hand forget. A killed peer's sessions break at once for all who had one; a
stopped peer's kernel still takes bytes, which it finds when it goes on, long after the senders gave up.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from peer.simulator.clock import Clock
from protocols.messages import Message, OuterExchange, WeightsChunk
from protocols.swarm import PeerId

BROKEN_S = 0.1  # from a peer's death until its neighbours see their sessions break
SMALL_BYTES = 200  # an envelope without a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    latency_s: float = 0.02  # one way, the mean over pairs
    jitter_share: float = 0.3
    bytes_per_s: float = 12.5e6  # a sender's uplink, per lane
    loss_share: float = 0.0  # of sends; half of them arrive all the same, only the ack is lost
    ack_s: float = 5.0  # a send without an ack fails then


class Network:
    """Carries messages. Tells the swarm through `deliver(to, sender, message)` and `fail(sender, to, message)`."""

    def __init__(
        self,
        clock: Clock,
        seed: int,
        links: LinkSettings,
        *,
        deliver: Callable[[PeerId, PeerId, Message], None],
        fail: Callable[[PeerId, PeerId, Message | None], None],
    ) -> None:
        self._clock = clock
        self._seed = seed
        self._rng = random.Random(f"network/{seed}")
        self._links = links
        self._deliver = deliver
        self._fail = fail
        self._died_s: dict[PeerId, float] = {}
        self._stopped: dict[PeerId, list[tuple[PeerId, Message]]] = {}
        self._cuts: set[frozenset[PeerId]] = set()
        self._sides: Callable[[PeerId], int] | None = None
        self._sessions: dict[PeerId, dict[PeerId, None]] = {}
        self._latency_s: dict[tuple[PeerId, PeerId], float] = {}
        self._uplink_free_s: dict[tuple[PeerId, bool], float] = {}
        self._lane_last_s: dict[tuple[PeerId, PeerId, bool], float] = {}

    # ---- weather ----

    def kill(self, victim: PeerId) -> None:
        """SIGKILL: whoever had a session with it is told, each at its own moment."""
        self._died_s[victim] = self._clock.now
        self._stopped.pop(victim, None)
        for other in self._sessions.pop(victim, {}):
            if not self._is_cut(other, victim):
                self._clock.after(BROKEN_S * (0.5 + self._rng.random()), self._fail, other, victim, None)

    def stop(self, victim: PeerId) -> None:
        """SIGSTOP: nobody is told anything."""
        self._stopped.setdefault(victim, [])

    def resume(self, peer: PeerId) -> None:
        for sender, message in self._stopped.pop(peer, []):
            self._deliver(peer, sender, message)

    def cut(self, one: PeerId, other: PeerId) -> None:
        self._cuts.add(frozenset((one, other)))

    def heal(self, one: PeerId, other: PeerId) -> None:
        self._cuts.discard(frozenset((one, other)))

    def split(self, sides: Callable[[PeerId], int] | None) -> None:
        """Peers reach only those of their own side; None: all reach all again."""
        self._sides = sides

    def revive(self, peer: PeerId) -> None:
        """A peer that was killed has started again under its old identity."""
        self._died_s.pop(peer, None)

    # ---- traffic ----

    def send(self, sender: PeerId, to: PeerId, message: Message, num_bytes: int) -> None:
        now = self._clock.now
        if to in self._died_s and not self._is_cut(sender, to):
            self._clock.after(BROKEN_S, self._fail, sender, to, message)
            return
        self._sessions.setdefault(sender, {})[to] = None
        self._sessions.setdefault(to, {})[sender] = None
        if self._is_lost(sender, to, message):
            return
        is_bulk = isinstance(message, OuterExchange | WeightsChunk)
        departs_s = (
            max(now, self._uplink_free_s.get((sender, is_bulk), 0.0)) + num_bytes / self._links.bytes_per_s
        )
        self._uplink_free_s[sender, is_bulk] = departs_s
        lane = (sender, to, is_bulk)
        arrives_s = max(departs_s + self._trip_s(sender, to), self._lane_last_s.get(lane, 0.0))
        self._lane_last_s[lane] = arrives_s
        self._clock.at(arrives_s, self._arrive, sender, to, message, departs_s)

    def call(
        self, caller: PeerId, to: PeerId, limit_s: float, done: Callable[[PeerId, bool, float], None]
    ) -> None:
        """A direct call: `done(to, ok, seconds)`."""
        round_trip_s = self._trip_s(caller, to) + self._trip_s(to, caller)
        if self.is_refused(caller, to):
            self._clock.after(BROKEN_S, done, to, False, BROKEN_S)
        elif to in self._stopped or self._is_cut(caller, to) or round_trip_s > limit_s:
            self._clock.after(limit_s, done, to, False, limit_s)
        else:
            self._clock.after(round_trip_s, done, to, True, round_trip_s)

    def is_refused(self, caller: PeerId, to: PeerId) -> bool:
        """Its machine answers that nobody listens."""
        return to in self._died_s and not self._is_cut(caller, to)

    def _is_cut(self, one: PeerId, other: PeerId) -> bool:
        if self._sides is not None and self._sides(one) != self._sides(other):
            return True
        return bool(self._cuts) and frozenset((one, other)) in self._cuts

    def _is_lost(self, sender: PeerId, to: PeerId, message: Message) -> bool:
        if self._is_cut(sender, to):
            self._clock.after(self._links.ack_s, self._fail, sender, to, message)
            return True
        if self._links.loss_share == 0.0 or self._rng.random() >= self._links.loss_share:
            return False
        self._clock.after(self._links.ack_s, self._fail, sender, to, message)
        return self._rng.random() < 0.5

    def _arrive(self, sender: PeerId, to: PeerId, message: Message, departs_s: float) -> None:
        if self._died_s.get(sender, departs_s) < departs_s:
            return  # it died while the bytes were still with it
        if to in self._died_s:
            self._clock.after(BROKEN_S, self._fail, sender, to, message)
        elif to in self._stopped:
            self._stopped[to].append((sender, message))
            self._clock.after(self._links.ack_s, self._fail_if_stopped, sender, to, message)
        else:
            self._deliver(to, sender, message)

    def _fail_if_stopped(self, sender: PeerId, to: PeerId, message: Message) -> None:
        if to in self._stopped or to in self._died_s:
            self._fail(sender, to, message)

    def _trip_s(self, sender: PeerId, to: PeerId) -> float:
        latency_s = self._latency_s.get((sender, to))
        if latency_s is None:  # the same both ways
            drawn = random.Random(f"link/{self._seed}/{min(sender, to)}/{max(sender, to)}").random()
            latency_s = self._latency_s[sender, to] = self._links.latency_s * (0.5 + drawn)
        return latency_s * (1 + self._links.jitter_share * self._rng.random())
