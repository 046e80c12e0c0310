"""The swarm's table of a simulation: real records in a MemoryDirectory, read by all, parsed once."""

from __future__ import annotations

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


class Table:
    """Stores and views, at once and without loss: a table that fails is the DHT's own tests' affair."""

    def __init__(self, clock: Clock, spec: RunSpec) -> None:
        self._clock = clock
        self._spec = spec
        self._directory = MemoryDirectory(self.now_unix_s)
        self._keys = roster_keys(spec.run_id)
        self._parsed: dict[bytes, PeerInfo | None] = {}
        self._last: SwarmView = SwarmView()
        self._num_stored = 0

    def now_unix_s(self) -> float:
        return EPOCH_UNIX_S + self._clock.now

    def store(self, info: PeerInfo, *, withdrawn: bool = False) -> None:
        self._num_stored += 1
        record = PeerRecord(
            info=info, sequence=self._num_stored, stored_unix_s=self.now_unix_s(), withdrawn=withdrawn
        )
        key = roster_key(self._spec.run_id, info.peer)
        data = encode_peer(record)
        self._directory.put_now(key, info.peer, data, ttl_s=self._spec.liveness.record_ttl_s)
        read = parse_peer(data, owner=info.peer)
        self._parsed[data] = None if read.withdrawn else read.info

    def view(self) -> SwarmView:
        """The same object as last time while nothing has changed."""
        found = self._directory.get_now(self._keys)
        infos = [self._parsed[data] for entries in found.values() for data in entries.values()]
        fresh = SwarmView(tuple(info for info in infos if info is not None))
        if fresh.peers != self._last.peers:
            self._last = fresh
        return self._last

    def claim(self, claimant: PeerId, stage: int) -> None:
        key = claim_key(self._spec.run_id, stage)
        data = encode_claim(ClaimRecord(stage=stage, claimed_unix_s=self.now_unix_s()))
        self._directory.put_now(key, claimant, data, ttl_s=CLAIM_TTL_S)

    def claims(self, stage: int) -> tuple[tuple[PeerId, float], ...]:
        key = claim_key(self._spec.run_id, stage)
        found = self._directory.get_now((key,)).get(key, {})
        now = self.now_unix_s()
        return tuple(
            (claimant, now - parse_claim(data).claimed_unix_s) for claimant, data in sorted(found.items())
        )


def renewed(info: PeerInfo, **changes: object) -> PeerInfo:
    """The own entry with what was announced."""
    return replace(info, **changes)  # type: ignore[arg-type]
