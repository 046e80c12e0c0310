"""Serving side of a microbatch: slots, queue, stash lease, next and previous hop.

    WAITING -slot and round-> FORWARDING -ForwardDone-> STASHED -BoundaryGradient-> BACKWARD -BackwardDone-> gone
    validation: FORWARDING -ForwardDone-> gone
    any state -Release, lease, neighbour lost-> gone (+ DropStash, + admit the next waiter)

Invariant: entries that hold a slot never exceed `slots`, and every entry has a lease. Queues are first in, first out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protocols.actions import (
    Action,
    Count,
    DropStash,
    RunBackward,
    RunForward,
    Send,
)
from protocols.messages import (
    BoundaryActivation,
    BoundaryGradient,
    Path,
    TensorPacket,
    Undeliverable,
    WorkKey,
)
from protocols.rounds import RoundLedger
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId
from protocols.timers import Timers

WAITERS_MAX = 256


class EntryState(Enum):
    WAITING = "waiting"
    FORWARDING = "forwarding"
    STASHED = "stashed"
    BACKWARD = "backward"


@dataclass(slots=True)
class Entry:
    """One attempt in this relay's care."""

    key: WorkKey
    round: int
    path: Path
    hop: int
    train: bool
    state: EntryState
    packet: TensorPacket | None  # the boundary input, until the forward takes it

    @property
    def ahead(self) -> PeerId:
        """Who takes the activation and sends the gradient: the next hop, or the originator past the last."""
        return self.path[self.hop + 1].peer if self.hop + 1 < len(self.path) else self.path[0].peer


class Relay:
    """Invariant: num_holding <= slots; a waiter waits for a slot or for its round."""

    def __init__(self, me: PeerId, spec: RunSpec, ledger: RoundLedger) -> None:
        self._me = me
        self._slots = spec.rounds.slots
        self._staleness_max = spec.rounds.staleness_max
        self._lease_s = spec.liveness.lease_s
        self._ledger = ledger
        self._entries: dict[WorkKey, Entry] = {}
        self._waiting: list[WorkKey] = []
        self._num_holding = 0
        self._leases: Timers[WorkKey] = Timers()
        self.draining = False  # leaving: takes nothing new

    @property
    def is_idle(self) -> bool:
        return not self._entries

    @property
    def num_stashes(self) -> int:
        return self._num_holding

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def depends_on(self) -> set[PeerId]:
        """Neighbours and originators of what is held here."""
        return {hop.peer for entry in self._entries.values() for hop in entry.path}

    def next_deadline(self) -> float | None:
        return self._leases.next()

    def on_activation(self, message: BoundaryActivation, now: float) -> list[Action]:
        key = message.key
        if key in self._entries:
            return []  # a duplicate
        # closed: released before it came, or we had given its originator up for dead
        if self.draining or self._ledger.is_closed(key) or len(self._waiting) >= WAITERS_MAX:
            return self.refuse(key)
        self._entries[key] = Entry(
            key, message.round, message.path, message.hop, message.train, EntryState.WAITING, message.packet
        )
        self._leases.set(key, now + self._lease_s)
        self._waiting.append(key)
        if message.train:
            self._ledger.expect(key, message.round)
        return self.admit()

    def refuse(self, key: WorkKey) -> list[Action]:
        """Not here, not now: the originator shall go another way."""
        return [Send(to=key.originator, message=Undeliverable(key=key, unreachable=self._me))]

    def admit(self) -> list[Action]:
        """Start every waiter that has a slot and whose round has come, in order of arrival."""
        actions: list[Action] = []
        round_max = self._ledger.round + self._staleness_max
        for key in list(self._waiting):
            entry = self._entries[key]
            if self._num_holding >= self._slots:
                break
            if entry.train and entry.round > round_max:
                continue
            self._waiting.remove(key)
            self._num_holding += 1
            entry.state = EntryState.FORWARDING
            actions.append(RunForward(key=key, packet=entry.packet, train=entry.train))
            entry.packet = None
        return actions

    def on_forward_done(self, key: WorkKey, packet: TensorPacket) -> list[Action]:
        entry = self._entries.get(key)
        if entry is None or entry.state is not EntryState.FORWARDING:
            return []  # released meanwhile
        entry.state = EntryState.STASHED
        onward = BoundaryActivation(
            key=key, round=entry.round, path=entry.path, hop=entry.hop + 1, train=entry.train, packet=packet
        )
        actions: list[Action] = [Send(to=entry.ahead, message=onward)]
        if not entry.train:
            actions += self._drop(key)
        return actions

    def on_gradient(self, sender: PeerId, message: BoundaryGradient, now: float) -> list[Action]:
        entry = self._entries.get(message.key)
        if entry is None or entry.state is not EntryState.STASHED:
            return []  # released, expired or a duplicate: the originator has moved on
        if sender != entry.ahead or message.hop != entry.hop:
            return [Count(name="gradient-off-its-path", detail=f"{message.key} from {sender[-6:]}")]
        entry.state = EntryState.BACKWARD
        self._leases.set(message.key, now + self._lease_s)
        return [RunBackward(key=message.key, packet=message.packet)]

    def on_backward_done(self, key: WorkKey, packet: TensorPacket | None) -> list[Action]:
        entry = self._entries.get(key)
        if entry is None or packet is None:
            return []
        back = BoundaryGradient(key=key, hop=entry.hop - 1, packet=packet)
        return [Send(to=entry.path[entry.hop - 1].peer, message=back), *self._finish(key)]

    def on_release(self, keys: tuple[WorkKey, ...]) -> list[Action]:
        actions: list[Action] = []
        for key in keys:
            self._ledger.close(key)
            if key in self._entries:
                actions += self._drop(key)
        return actions

    def on_compute_failed(self, key: WorkKey) -> list[Action]:
        return self._give_back(key, unreachable=self._me)

    def on_undelivered(self, key: WorkKey, unreachable: PeerId) -> list[Action]:
        """The hop after (or before) us did not take it: the originator decides."""
        return self._give_back(key, unreachable=unreachable)

    def on_peer_lost(self, peer: PeerId) -> list[Action]:
        """Give back all that needs `peer`: as next or previous hop, or as originator (it may live, and must know)."""
        actions: list[Action] = []
        for key, entry in list(self._entries.items()):
            if peer in (key.originator, entry.ahead, entry.path[entry.hop - 1].peer):
                actions += self._give_back(key, unreachable=peer)
        return actions

    def on_deadline(self, now: float) -> list[Action]:
        """Leases that are over: the originator is gone or has forgotten; nothing may leak."""
        actions: list[Action] = []
        for key in self._leases.pop_due(now):
            self._ledger.close(key)
            actions += [Count(name="lease-expired", detail=str(key)), *self._drop(key)]
        return actions

    def drop_all(self) -> list[Action]:
        """The stage's weights are about to change under everything held here."""
        actions: list[Action] = []
        for key in list(self._entries):
            actions += self._give_back(key, unreachable=self._me)
        return actions

    def _give_back(self, key: WorkKey, *, unreachable: PeerId) -> list[Action]:
        if key not in self._entries:
            return []
        self._ledger.close(key)
        return [
            Send(to=key.originator, message=Undeliverable(key=key, unreachable=unreachable)),
            *self._drop(key),
        ]

    def _drop(self, key: WorkKey) -> list[Action]:
        return [DropStash(key=key), *self._finish(key)]

    def _finish(self, key: WorkKey) -> list[Action]:
        """Forget the entry, free its slot, admit who waits for it."""
        entry = self._entries.pop(key)
        self._leases.clear(key)
        if entry.train:
            self._ledger.close(key)
        if entry.state is EntryState.WAITING:
            self._waiting.remove(key)
            return []
        self._num_holding -= 1
        return self.admit()

    def check_invariants(self) -> None:
        holding = [entry for entry in self._entries.values() if entry.state is not EntryState.WAITING]
        assert self._num_holding == len(holding) <= self._slots, "slots do not add up"
        assert len(holding) + len(self._waiting) == len(self._entries), (
            "an entry is neither waiting nor holding"
        )
        assert all(key in self._leases for key in self._entries), "an entry without a lease"
        assert all(not self._ledger.is_closed(key) for key in self._entries), "a closed attempt is still held"
