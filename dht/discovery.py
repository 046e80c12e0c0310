"""From the table to an immutable SwarmView, poll by poll.

A record once seen stands until it lapses, even if a poll misses it: a replica of the roster that answers late
must not make a peer flicker. What ends it early is its tombstone. A record whose (life, sequence) went back
is ignored. Reads only what `dht.records` accepts; counts the rest by reason.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from dht.directory import PLAIN, Directory, DirectoryUnavailable
from dht.records import (
    ClaimRecord,
    PeerRecord,
    claim_key,
    encode_claim,
    parse_claim,
    parse_peer,
    parse_run,
    roster_keys,
    spec_key,
)
from protocols.errors import RemoteProtocolError
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, SwarmView

PEERS_MAX = 4096  # records that a view holds
CLAIM_TTL_S = 30.0
_JITTER_SHARE = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    record: PeerRecord
    lapses_unix_s: float

    @property
    def version(self) -> tuple[float, int]:
        return (self.record.info.started_unix_s, self.record.sequence)


class Discovery:
    """Reads the roster and the claims of one run."""

    def __init__(self, directory: Directory, spec: RunSpec, me: PeerId, rng: random.Random) -> None:
        self._directory = directory
        self._spec = spec
        self._run_id = spec.run_id
        self._me = me
        self._rng = rng
        self._known: dict[PeerId, _Known] = {}
        self._own_claims: dict[int, float] = {}  # stage -> when we claimed it
        self.refusals: Counter[str] = Counter()
        self.num_polls = 0
        self.num_poll_failures = 0

    @property
    def records(self) -> dict[PeerId, PeerRecord]:
        """The records behind the last view, by peer id."""
        return {
            peer: known.record for peer, known in sorted(self._known.items()) if not known.record.withdrawn
        }

    async def views(self) -> AsyncIterator[SwarmView]:
        """A view at every poll that the table answered, changed or not."""
        while True:
            view = await self.poll()
            if view is not None:
                yield view
            await asyncio.sleep(self._spec.liveness.view_poll_s * (1 - _JITTER_SHARE * self._rng.random()))

    async def poll(self) -> SwarmView | None:
        """Read the roster once; None when the table did not answer, which says nothing about the peers."""
        self.num_polls += 1
        try:
            found = await self._directory.get_many(roster_keys(self._run_id))
        except DirectoryUnavailable as error:
            self.num_poll_failures += 1
            _log.debug("roster not read: %s", error)
            return None
        now = self._directory.now_unix_s()
        self._known = {peer: known for peer, known in self._known.items() if known.lapses_unix_s > now}
        for entries in found.values():
            for owner, data in entries.items():
                self._take(owner, data, now)
        return SwarmView(tuple(record.info for record in self.records.values()))

    async def claims(self, stage: int) -> tuple[tuple[PeerId, float], ...]:
        """Everybody's live claims on `stage`, by peer id, with the seconds since they were made."""
        try:
            found = await self._directory.get_many((claim_key(self._run_id, stage),))
        except DirectoryUnavailable as error:
            _log.debug("claims on stage %d not read: %s", stage, error)
            return ()
        now = self._directory.now_unix_s()
        ages_s: dict[PeerId, float] = {}
        for owner, data in sorted(found.get(claim_key(self._run_id, stage), {}).items()):
            try:
                claim = parse_claim(data)
            except RemoteProtocolError as error:
                self.refusals[error.reason] += 1
                continue
            if claim.stage != stage:
                self.refusals["claim-stage"] += 1
            elif now - claim.claimed_unix_s < CLAIM_TTL_S:
                ages_s[owner] = max(0.0, now - claim.claimed_unix_s)
        return tuple(ages_s.items())

    async def put_claim(self, stage: int) -> bool:
        """Claim `stage` for CLAIM_TTL_S. Claiming again meanwhile makes the claim neither younger nor
        longer."""
        now = self._directory.now_unix_s()
        claimed_unix_s = self._own_claims.get(stage, now)
        if not 0 <= now - claimed_unix_s < CLAIM_TTL_S:
            claimed_unix_s = now
        self._own_claims[stage] = claimed_unix_s
        data = encode_claim(ClaimRecord(stage=stage, claimed_unix_s=claimed_unix_s))
        ttl_s = claimed_unix_s + CLAIM_TTL_S - now
        return await self._directory.put(claim_key(self._run_id, stage), self._me, data, ttl_s=ttl_s)

    def _take(self, owner: PeerId, data: bytes, now_unix_s: float) -> None:
        try:
            record = parse_peer(data, owner=owner)
            if record.info.stage is not None and record.info.stage >= self._spec.num_stages:
                raise RemoteProtocolError("record-stage")
        except RemoteProtocolError as error:
            self.refusals[error.reason] += 1
            return
        # a clock ahead of ours must not make its owner immortal
        lapses_unix_s = min(record.stored_unix_s, now_unix_s) + self._spec.liveness.record_ttl_s
        known, fresh = self._known.get(owner), _Known(record, lapses_unix_s)
        if known is None and len(self._known) >= PEERS_MAX:
            self.refusals["view-full"] += 1
        elif known is not None and fresh.version < known.version:
            self.refusals["record-sequence"] += 1
        elif lapses_unix_s > now_unix_s:
            self._known[owner] = fresh


async def fetch_run_spec(directory: Directory, run_id: str) -> RunSpec | None:
    """The RunSpec behind a run id, as peers of that run keep it in the table; None: nobody does."""
    entries = (await directory.get_many((spec_key(run_id),))).get(spec_key(run_id), {})
    try:
        return parse_run(entries[PLAIN], run_id=run_id).spec if PLAIN in entries else None
    except RemoteProtocolError as error:
        _log.warning("the RunSpec of %s in the table is not usable: %s", run_id, error)
        return None
