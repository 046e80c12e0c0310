"""What shall happen to a local swarm and when, and what came of it: kills, joins and leaves by round.

An event is over when the swarm has dealt with it: after the loss of one replica of several, when rounds go on; after
the loss of a stage, when somebody serves it again; after a join, when the newcomer serves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from peer.launch import LocalPeer, LocalSwarm
from peer.status import PeerStatus
from protocols.errors import ConfigError
from protocols.swarm import PeerState

ROUNDS_GO_ON = 2  # rounds finished after a loss: one of them may have been all but finished before it

_EVENT = re.compile(
    r"(?P<verb>kill|leave|join)(?:\s+stage=(?P<stage>\d+))?(?:\s+replica=(?P<replica>\d+))?\s+at\s+round=(?P<round>\d+)"
)


class Misfortunes(Protocol):
    """What shall happen to a swarm, as its follower sees it: a `Schedule`, or `peer.chaos.Chaos`."""

    @property
    def is_over(self) -> bool:
        """Nothing that has happened is still to be dealt with."""
        ...

    def advance(self, now: float) -> list[str]:
        """Called after each poll; lines about what has just happened."""
        ...


class Verb(str, Enum):
    KILL = "kill"  # signal 9
    LEAVE = "leave"  # as after Ctrl-C
    JOIN = "join"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmEvent:
    """`replica` None: all of the stage. `stage` None (join only): where the swarm needs one."""

    verb: Verb
    round: int
    stage: int | None = None
    replica: int | None = None


def parse_events(text: str) -> tuple[SwarmEvent, ...]:
    """`kill stage=2 replica=1 at round=40; join at round=100`, in the order of their rounds."""
    events = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _EVENT.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"event {part!r}: write `kill stage=2 replica=1 at round=40`, `kill stage=3 at round=80`, "
                "`leave stage=1 replica=0 at round=90` or `join at round=100`, with semicolons between"
            )
        verb = Verb(match["verb"])
        stage = None if match["stage"] is None else int(match["stage"])
        replica = None if match["replica"] is None else int(match["replica"])
        if (verb is Verb.JOIN and replica is not None) or (verb is not Verb.JOIN and stage is None):
            raise ConfigError(f"event {part!r}: a join names no replica, and all others name a stage")
        events.append(SwarmEvent(verb=verb, round=int(match["round"]), stage=stage, replica=replica))
    return tuple(sorted(events, key=lambda event: event.round))


@dataclass(slots=True)
class Incident:
    """An event that has happened. `seconds` is set when the swarm has dealt with it."""

    event: SwarmEvent
    round: int
    began_s: float
    what: str
    touched: list[LocalPeer]
    outcome: str = "not over yet"
    seconds: float | None = None


class Schedule:
    """Carries events out on a swarm as its rounds come, and watches what the swarm makes of them."""

    def __init__(self, swarm: LocalSwarm, events: Sequence[SwarmEvent]) -> None:
        self._swarm = swarm
        self._due = list(events)
        self.incidents: list[Incident] = []

    @property
    def is_over(self) -> bool:
        return not self._due and all(incident.seconds is not None for incident in self.incidents)

    def advance(self, now: float) -> list[str]:
        """Call after each poll; lines about what has just happened."""
        statuses = [peer.status for peer in self._swarm.peers if peer.is_alive and peer.status is not None]
        round_ = max((status.round for status in statuses if status.stage == 0), default=0)
        due = [event for event in self._due if event.round <= round_]
        self._due = self._due[len(due) :]
        news = [self._begin(event, round_, now) for event in due]
        for incident in self.incidents:
            if incident.seconds is None:
                outcome = self._outcome(incident, statuses, round_)
                if outcome is not None:
                    incident.outcome, incident.seconds = outcome, now - incident.began_s
                    news.append(f"{incident.what}: {outcome} after {incident.seconds:.1f} s")
        return news

    def _begin(self, event: SwarmEvent, round_: int, now: float) -> str:
        if event.verb is Verb.JOIN:
            touched = [self._swarm.add(event.stage)]
            what = f"{touched[0].label} joins"
        else:
            assert event.stage is not None, "parse_events demands it"
            touched = self._swarm.replicas(event.stage)
            if event.replica is not None:
                touched = touched[event.replica : event.replica + 1]
            for peer in touched:
                (self._swarm.kill_peer if event.verb is Verb.KILL else _ask_to_leave)(peer)
            done = "killed" if event.verb is Verb.KILL else "leaving"
            what = f"stage {event.stage}: {' and '.join(peer.name for peer in touched) or 'nobody'} {done}"
        self.incidents.append(Incident(event=event, round=round_, began_s=now, what=what, touched=touched))
        return f"round {round_}: {what}"

    def _outcome(self, incident: Incident, statuses: Sequence[PeerStatus], round_: int) -> str | None:
        if incident.event.verb is Verb.JOIN:
            [joiner] = incident.touched
            if joiner.status is None or joiner.status.state is not PeerState.SERVING:
                return None
            return f"{joiner.status.name} serves stage {joiner.status.stage}"
        gone = {peer.status.peer for peer in incident.touched if peer.status}
        stage = incident.event.stage
        left = [
            s for s in statuses if s.stage == stage and s.state is PeerState.SERVING and s.peer not in gone
        ]
        goes_on = round_ >= incident.round + ROUNDS_GO_ON
        if not left or not goes_on or any(peer.is_alive for peer in incident.touched):
            return None
        if incident.event.replica is None:
            return f"{' and '.join(s.name for s in left)} took the stage over"
        return f"training went on with {len(left)} replica{'s' if len(left) > 1 else ''} of the stage"


def _ask_to_leave(peer: LocalPeer) -> None:
    peer.process.terminate()
