"""Chaos for a local swarm: peers killed, frozen and started again, at moments that a seed draws.

Which moments, which kinds of blow and how long a victim is away follow from the seed alone; who is struck follows from
a drawn number and from who lives then, so that a schedule fits every swarm. A killed peer is replaced by a new one,
which goes where the swarm needs it. Only a peer of the first stage comes back as itself, from its own checkpoint, as a
process manager would have it: nobody else could bring back the embedding once all of them are dead.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from peer.launch import LocalPeer, LocalSwarm
from protocols.swarm import PeerId, PeerState


class Blow(str, Enum):
    KILL = "kill"  # signal 9 to one peer
    EMPTY = "empty"  # signal 9 to every peer of a stage
    FREEZE = "freeze"  # SIGSTOP to one peer, and SIGCONT later


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One blow of a kind in each period of so many seconds, at a moment drawn from it; 0: none of that kind."""

    kill_every_s: float = 20.0
    empty_every_s: float = 120.0
    freeze_every_s: float = 60.0
    restart_s: tuple[float, float] = (1.0, 6.0)  # from a kill to the start of the successor
    freeze_s: tuple[float, float] = (1.0, 15.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosEvent:
    """`pick`, in [0, 1), says which of the peers that can be struck; `stage` is of EMPTY alone."""

    at_s: float  # since the start of the chaos
    blow: Blow
    pick: float
    away_s: float
    stage: int | None = None


def draw(seed: int, num_stages: int, rates: Rates) -> Iterator[ChaosEvent]:
    """Without end, in the order of time. EMPTY takes the stages in a drawn order, then again in another.

    Each kind has draws of its own: another rate of one leaves the moments of the others.
    """
    streams = (
        _stream(seed, Blow.KILL, rates.kill_every_s, rates.restart_s),
        _stream(seed, Blow.EMPTY, rates.empty_every_s, rates.restart_s, num_stages),
        _stream(seed, Blow.FREEZE, rates.freeze_every_s, rates.freeze_s),
    )
    return heapq.merge(*streams, key=lambda event: event.at_s)


def _stream(
    seed: int, blow: Blow, every_s: float, away_s: tuple[float, float], num_stages: int = 0
) -> Iterator[ChaosEvent]:
    rng = random.Random(f"chaos/{seed}/{blow.value}")
    stages: list[int] = []
    period = 0
    while every_s > 0:
        if num_stages and not stages:
            stages = rng.sample(range(num_stages), num_stages)
        yield ChaosEvent(
            at_s=(period + rng.random()) * every_s,
            blow=blow,
            pick=rng.random(),
            away_s=rng.uniform(*away_s),
            stage=stages.pop() if stages else None,
        )
        period += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """Who was struck, as it was then."""

    label: str
    name: str
    peer: PeerId
    stage: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A blow that has fallen; `at_s` is on the machine's monotonic clock, as all flight recorders are."""

    blow: Blow
    at_s: float
    round: int
    victims: tuple[Victim, ...]
    away_s: float

    @property
    def what(self) -> str:
        names = " and ".join(f"{victim.label} {victim.name}" for victim in self.victims)
        stage = self.victims[0].stage
        if self.blow is Blow.FREEZE:
            return f"stage {stage}: {names} frozen for {self.away_s:.1f} s"
        return f"stage {stage}: {names} killed{', all there were' if self.blow is Blow.EMPTY else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comeback:
    """What is due after a blow: to thaw `frozen`, or to start a peer, in the folder of the dead one or in a new one."""

    at_s: float
    frozen: LocalPeer | None = None
    data_dir: Path | None = None


class Chaos:
    """Carries events out on a swarm, in place of a `Schedule`. It strikes no process that the swarm did not start.

    Invariant: whoever was struck is in `_comebacks` until it is thawed or replaced. Somebody always lives.
    """

    def __init__(self, swarm: LocalSwarm, events: Iterator[ChaosEvent]) -> None:
        self._swarm = swarm
        self._events = events
        self._next = next(events, None)
        self._began_s: float | None = None
        self._comebacks: list[_Comeback] = []
        self._newcomers: list[LocalPeer] = []
        self.strikes: list[Strike] = []

    @property
    def is_over(self) -> bool:
        """For now: everybody is back and serves. After the last round there are no more blows."""
        return not self._comebacks and not self._newcomers

    def advance(self, now: float) -> list[str]:
        """Call after each poll, with `time.monotonic()`; lines about what has just happened."""
        if self._began_s is None:
            self._began_s = now
        news = self._bring_back(now)
        while self._next is not None and self._began_s + self._next.at_s <= now:
            event, self._next = self._next, next(self._events, None)
            if self._round() < self._swarm.spec.rounds.total_rounds:
                news.append(self._strike(event, now))
        return news

    def _round(self) -> int:
        statuses = [peer.status for peer in self._swarm.peers if peer.is_alive and peer.status]
        return max((status.round for status in statuses if status.stage == 0), default=0)

    # ---- blows ----

    def _strike(self, event: ChaosEvent, now: float) -> str:
        struck = self._chosen(event)
        if not struck:
            return f"chaos: nobody to {event.blow.value}"
        strike = Strike(
            blow=event.blow,
            at_s=now,
            round=self._round(),
            victims=tuple(_as_victim(peer) for peer in struck),
            away_s=event.away_s,
        )
        for peer in struck:
            if event.blow is Blow.FREEZE:
                self._swarm.freeze(peer)
                self._comebacks.append(_Comeback(at_s=now + event.away_s, frozen=peer))
            else:
                self._kill(peer, now + event.away_s)
        self.strikes.append(strike)
        return f"round {strike.round}: {strike.what}"

    def _chosen(self, event: ChaosEvent) -> Sequence[LocalPeer]:
        """Those to strike; none when too few are left."""
        living = [peer for peer in self._swarm.peers if peer.is_alive and peer.status]
        serving = [peer for peer in living if _serves(peer) and not peer.is_frozen]
        if event.blow is Blow.EMPTY:
            struck = [peer for peer in living if peer.status and peer.status.stage == event.stage]
            return struck if any(peer not in struck for peer in serving) else ()
        return serving[int(event.pick * len(serving)) :][:1] if len(serving) > 1 else ()

    def _kill(self, peer: LocalPeer, back_s: float) -> None:
        assert peer.status is not None, "chosen by it"
        reads_text = peer.status.stage == 0
        self._swarm.kill_peer(peer)
        self._swarm.forget(peer)
        self._comebacks = [comeback for comeback in self._comebacks if comeback.frozen is not peer]
        self._newcomers = [newcomer for newcomer in self._newcomers if newcomer is not peer]
        self._comebacks.append(_Comeback(at_s=back_s, data_dir=peer.config.data_dir if reads_text else None))

    # ---- what follows ----

    def _bring_back(self, now: float) -> list[str]:
        due = [comeback for comeback in self._comebacks if comeback.at_s <= now]
        self._comebacks = [comeback for comeback in self._comebacks if comeback.at_s > now]
        self._newcomers = [peer for peer in self._newcomers if peer.is_alive and not _serves(peer)]
        return [self._end(comeback) for comeback in due]

    def _end(self, comeback: _Comeback) -> str:
        if comeback.frozen is not None:
            self._swarm.thaw(comeback.frozen)
            return f"{comeback.frozen.name} goes on"
        started = self._swarm.add(data_dir=comeback.data_dir)
        self._newcomers.append(started)
        return f"{started.label} {'joins' if comeback.data_dir is None else 'comes back with its checkpoint'}"


def _serves(peer: LocalPeer) -> bool:
    return peer.status is not None and peer.status.state is PeerState.SERVING


def _as_victim(peer: LocalPeer) -> Victim:
    assert peer.status is not None, "chosen by it"
    return Victim(label=peer.label, name=peer.status.name, peer=peer.status.peer, stage=peer.status.stage)
