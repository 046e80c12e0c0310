"""What a simulation has seen: the books of all microbatches, the digest of all events, and the story for a reader."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from protocols.actions import (
    Action,
    Announce,
    Count,
    MicrobatchFinished,
    RunOuterStep,
    Send,
)
from protocols.events import Event
from protocols.messages import BoundaryActivation, WorkKey
from protocols.swarm import PeerId

DIGEST_CHARS = 12
TOLD_FROM_S = 0.2  # how a swarm starts is always the same story


class InvariantBroken(AssertionError):
    """A protocol invariant does not hold: a bug. Carries what is needed to see it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome. `lost`: given up, or forgotten by a living originator. `leaked`: slots and stashes left behind."""

    seed: int
    finished: int
    lost: int
    leaked: int
    held: int  # still open at a living originator: no path was feasible when the time was over
    orphaned: int  # their originator died with them
    skipped: int  # finished without a stage that nobody served
    events: int
    seconds: float  # virtual
    rounds: int
    digest: str
    counters: dict[str, int]
    story: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        return self.lost == 0 and self.leaked == 0

    def summary(self) -> str:
        notable = ", ".join(f"{name} {count}" for name, count in sorted(self.counters.items()))
        return (
            f"finished {self.finished} lost {self.lost} leaked {self.leaked} held {self.held} skipped {self.skipped} "
            f"rounds {self.rounds} events {self.events} simulated {self.seconds:.1f} s digest {self.digest}\n{notable}"
        )


class Tell(Enum):
    """How much of the story is kept."""

    NOTHING = "nothing"
    PEERS = "peers"  # what befalls peers and stages
    ALL = "all"  # and every microbatch's way


class Books:
    """Every microbatch from its fetch to its end, exactly once."""

    def __init__(self) -> None:
        self._open: set[tuple[PeerId, int]] = set()
        self._over: set[tuple[PeerId, int]] = set()
        self.finished = 0
        self.given_up = 0
        self.skipped = 0

    def fetched(self, key: WorkKey) -> None:
        if key.microbatch in self._over or key.microbatch in self._open:
            raise InvariantBroken(f"{key} is fetched again")
        self._open.add(key.microbatch)

    def over(self, action: MicrobatchFinished, num_stages_skippable: int) -> None:
        microbatch = action.key.microbatch
        if microbatch in self._over:
            raise InvariantBroken(f"{action.key} is finished twice")
        self._open.discard(microbatch)
        self._over.add(microbatch)
        if action.loss is None:
            self.given_up += 1
        elif action.train:
            self.finished += 1
            self.skipped += len(action.skipped) > num_stages_skippable

    def open_of(self, originator: PeerId) -> set[int]:
        return {counter for owner, counter in self._open if owner == originator}


class Chronicle:
    """Digest, counters and, when wanted, the story."""

    def __init__(self, tell: Tell) -> None:
        self._hash = hashlib.sha256()
        self._tell = tell is not Tell.NOTHING
        self._tell_all = tell is Tell.ALL
        self._said: dict[PeerId, tuple[object, ...]] = {}
        self.counters: Counter[str] = Counter()
        self.story: list[str] = []
        self.events = 0

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()[:DIGEST_CHARS]

    def happened(self, now: float, who: PeerId, event: Event) -> None:
        self.events += 1
        key = getattr(event, "key", None) or getattr(getattr(event, "message", None), "key", "")
        self._hash.update(f"{now:.9f} {who} {type(event).__name__} {key}\n".encode())

    def weather(self, now: float, text: str) -> None:
        self._hash.update(f"{now:.9f} {text}\n".encode())
        if self._tell:
            self.story.append(f"{now:7.2f}  --  {text}")

    def decided(self, now: float, who: PeerId, actions: Sequence[Action]) -> None:
        for action in actions:
            if type(action) is Count:
                self.counters[action.name] += 1
            if self._tell:
                self._note(now, who, action)

    def _note(self, now: float, who: PeerId, action: Action) -> None:
        line = self._line(who, action)
        if line and now >= TOLD_FROM_S:
            self.story.append(f"{now:7.2f}  {who}  {line}")

    def _line(self, who: PeerId, action: Action) -> str:
        match action:
            case Count(notable=True) if self._tell_all or action.name != "retry":
                return f"{action.name}: {action.detail}"
            case RunOuterStep():
                which = f"{action.outer_step}{'.2' if action.pair_round else ''}"
                return f"outer step {which} {'alone' if action.packet is None else 'with its partner'}"
            case MicrobatchFinished(loss=None):
                return f"{action.key} given up"
            case Announce() if self._said.get(who) != (action.stage, action.state, action.fresh):
                self._said[who] = (action.stage, action.state, action.fresh)
                fresh = " (fresh)" if action.fresh else ""
                return f"is {action.state.value} stage {action.stage} at round {action.round}{fresh}"
            case _:
                return _about_microbatch(action) if self._tell_all else ""


def _about_microbatch(action: Action) -> str:
    match action:
        case Send(message=BoundaryActivation(hop=1) as message):
            hops = " -> ".join(hop.peer for hop in message.path[1:])
            return f"{message.key}{'' if message.train else ' (validation)'} -> {hops}"
        case MicrobatchFinished():
            skipped = f", stage {', '.join(map(str, action.skipped))} skipped" if action.skipped else ""
            return f"{action.key} done{skipped}"
        case _:
            return ""
