"""The swarm's table of a simulation: real records in a MemoryDirectory, read by all, parsed once.

While the swarm is split, a peer reads what its own side stores, and of the other side what was there before, until
that lapses. A store, a look or a claim may get lost as a message may.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from dht.discovery import CLAIM_TTL_S
from dht.memory import MemoryDirectory
from dht.records import (
    ClaimRecord,
    PeerRecord,
    claim_key,
    encode_claim,
    encode_peer,
    parse_claim,
    parse_peer,
    roster_key,
    roster_keys,
)
from peer.simulator.clock import Clock
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, PeerInfo, SwarmView

EPOCH_UNIX_S = 1_700_000_000.0  # the table's clock is a wall clock
Sides = Callable[[PeerId], int]  # which side of a split a peer is on


class Table:
    """Stores and views. `reading_s`: a view is no older than that, so that many who look at once share one."""

    def __init__(
        self, clock: Clock, spec: RunSpec, seed: int, *, loss_share: float = 0.0, reading_s: float = 0.0
    ) -> None:
        self._clock = clock
        self._run_id = spec.run_id
        self._ttl_s = spec.liveness.record_ttl_s
        self._rng = random.Random(f"table/{seed}")
        self._loss_share = loss_share
        self._reading_s = reading_s
        self._directory = MemoryDirectory(self.now_unix_s)
        self._keys = roster_keys(self._run_id)
        self._parsed: dict[bytes, PeerRecord] = {}
        self._latest: dict[PeerId, bytes] = {}
        self._claimed: dict[tuple[PeerId, int], float] = {}
        self._sides: Sides | None = None
        self._split_unix_s = 0.0
        self._before: dict[PeerId, bytes] = {}  # what was known when the swarm was split
        self._views: dict[int, tuple[float, SwarmView]] = {}  # of each side: when it was read, and what
        self._num_stored = 0

    def now_unix_s(self) -> float:
        return EPOCH_UNIX_S + self._clock.now

    def split(self, sides: Sides) -> None:
        self._sides, self._split_unix_s = sides, self.now_unix_s()
        self._before = self._entries()
        self._views.clear()

    def heal(self) -> None:
        self._sides, self._before = None, {}
        self._views.clear()

    def store(self, info: PeerInfo, *, withdrawn: bool = False) -> bool:
        """False: it got lost on the way."""
        if self._is_lost():
            return False
        self._num_stored += 1
        record = PeerRecord(
            info=info, sequence=self._num_stored, stored_unix_s=self.now_unix_s(), withdrawn=withdrawn
        )
        data = encode_peer(record)
        self._directory.put_now(roster_key(self._run_id, info.peer), info.peer, data, ttl_s=self._ttl_s)
        last = self._parsed.get(self._latest.get(info.peer, b""))
        if info.peer not in self._before:
            self._parsed.pop(self._latest.get(info.peer, b""), None)
        read = parse_peer(data, owner=info.peer)
        is_old = last is not None and last.info == read.info  # views compare fast where nothing has changed
        self._parsed[data] = replace(read, info=last.info) if is_old and last is not None else read
        self._latest[info.peer] = data
        return True

    def look(self, reader: PeerId) -> SwarmView | None:
        """None: the table did not answer."""
        return None if self._is_lost() else self.view(reader)

    def view(self, reader: PeerId = "") -> SwarmView:
        """The same object as last time while nothing has changed."""
        side = 0 if self._sides is None else self._sides(reader)
        read_s, last = self._views.get(side, (-1.0, SwarmView()))
        if 0 <= self._clock.now - read_s < self._reading_s:
            return last
        records = [self._parsed[data] for data in self._visible(side)]
        fresh = SwarmView(tuple(record.info for record in records if not record.withdrawn))
        if fresh.peers == last.peers:
            fresh = last
        self._views[side] = (self._clock.now, fresh)
        return fresh

    def _entries(self) -> dict[PeerId, bytes]:
        found = self._directory.get_now(self._keys)
        return {owner: data for entries in found.values() for owner, data in entries.items()}

    def _visible(self, side: int) -> list[bytes]:
        entries = self._entries()
        if self._sides is None:
            return list(entries.values())
        earliest_unix_s = self.now_unix_s() - self._ttl_s
        own = [data for owner, data in entries.items() if self._sides(owner) == side]
        others = [data for owner, data in self._before.items() if self._sides(owner) != side]
        return [*own, *(data for data in others if self._parsed[data].stored_unix_s > earliest_unix_s)]

    def claim(self, claimant: PeerId, stage: int) -> None:
        """Claiming again makes a claim neither younger nor longer, as in `dht.discovery`."""
        if self._is_lost():
            return
        now = self.now_unix_s()
        claimed_unix_s = self._claimed.get((claimant, stage), 0.0)
        if now - claimed_unix_s >= CLAIM_TTL_S:
            claimed_unix_s = now
        self._claimed[claimant, stage] = claimed_unix_s
        key = claim_key(self._run_id, stage)
        data = encode_claim(ClaimRecord(stage=stage, claimed_unix_s=claimed_unix_s))
        self._directory.put_now(key, claimant, data, ttl_s=claimed_unix_s + CLAIM_TTL_S - now)

    def claims(self, reader: PeerId, stage: int) -> tuple[tuple[PeerId, float], ...]:
        if self._is_lost():
            return ()
        key = claim_key(self._run_id, stage)
        found = self._directory.get_now((key,)).get(key, {})
        claimed = [(claimant, parse_claim(data).claimed_unix_s) for claimant, data in sorted(found.items())]
        now = self.now_unix_s()
        return tuple((claimant, now - at) for claimant, at in claimed if self._is_seen(reader, claimant, at))

    def _is_seen(self, reader: PeerId, writer: PeerId, at_unix_s: float) -> bool:
        return (
            self._sides is None
            or self._sides(reader) == self._sides(writer)
            or at_unix_s <= self._split_unix_s
        )

    def _is_lost(self) -> bool:
        return self._loss_share > 0.0 and self._rng.random() < self._loss_share
