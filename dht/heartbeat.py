"""Keeps the own record alive in the table, and takes it out on leave. Never on the training path.

What the swarm plans by (stage, state, outer step) is stored at once when it changes; numbers that drift with
every round ride with the next heartbeat, since a store costs some twenty small calls to others.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from dataclasses import replace

from dht.directory import PLAIN, Directory
from dht.records import TTL_MAX_S, PeerRecord, RunRecord, encode_peer, encode_run, roster_key, spec_key
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId

SPEC_RENEW_S = TTL_MAX_S / 3
_JITTER_SHARE = 0.2  # heartbeats of peers that started together drift apart
_RETRY_SHARE = 0.25  # of a heartbeat, after a store that failed
_FAREWELL_TRIES = 2

_log = logging.getLogger(__name__)


class Heartbeat:
    """Give it the own record by `announce`, run `run()` as a task, and end with `withdraw()`.

    Also keeps the RunSpec in the table, so that a joiner needs only an address and the run id.
    """

    def __init__(self, directory: Directory, peer: PeerId, spec: RunSpec, rng: random.Random) -> None:
        self._directory = directory
        self._spec = spec
        self._key = roster_key(spec.run_id, peer)
        self._rng = rng
        self._record: PeerRecord | None = None
        self._sequence = 0
        self._spec_due_unix_s = 0.0
        self._urgent = asyncio.Event()
        self._storing = asyncio.Lock()
        self._left = False
        self.num_stores = 0
        self.num_store_failures = 0

    def announce(self, record: PeerRecord) -> None:
        """What to say from now on; sequence and time of storing are filled in here."""
        if self._record is None or _plan_fields(self._record) != _plan_fields(record):
            self._urgent.set()
        self._record = record

    async def run(self) -> None:
        """Store the record until `withdraw`; the first time as soon as there is one."""
        while not self._left:
            pause_s: float | None = None
            if self._record is not None:
                self._urgent.clear()
                pause_s = self._pause_s(stored=await self._store(self._record))
                await self._renew_spec()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), pause_s)

    async def withdraw(self) -> bool:
        """Replace the record by its tombstone: whoever polls next sees this peer gone. Ends `run`."""
        self._left = True
        self._urgent.set()
        if self._record is None:
            return True
        for _ in range(_FAREWELL_TRIES):
            if await self._store(replace(self._record, withdrawn=True), farewell=True):
                return True
        return False

    def _pause_s(self, *, stored: bool) -> float:
        heartbeat_s = self._spec.liveness.heartbeat_s * (1 - _JITTER_SHARE * self._rng.random())
        return heartbeat_s if stored else heartbeat_s * _RETRY_SHARE

    async def _store(self, record: PeerRecord, *, farewell: bool = False) -> bool:
        async with self._storing:  # a tombstone must not be overtaken by a heartbeat still under way
            if self._left and not farewell:
                return False
            self._sequence += 1
            now = self._directory.now_unix_s()
            data = encode_peer(replace(record, sequence=self._sequence, stored_unix_s=now))
            ttl_s = self._spec.liveness.record_ttl_s
            stored = await self._directory.put(self._key, record.peer, data, ttl_s=ttl_s)
        self.num_stores += 1
        if not stored:
            self.num_store_failures += 1
            _log.debug("own record was not stored (%d of %d)", self.num_store_failures, self.num_stores)
        return stored

    async def _renew_spec(self) -> None:
        now = self._directory.now_unix_s()
        if now < self._spec_due_unix_s:
            return
        self._spec_due_unix_s = now + SPEC_RENEW_S
        # False is no failure here: somebody else's copy of the same bytes may live longer than ours would
        await self._directory.put(
            spec_key(self._spec.run_id), PLAIN, encode_run(RunRecord(self._spec)), ttl_s=TTL_MAX_S
        )


def _plan_fields(record: PeerRecord) -> tuple[object, ...]:
    info = record.info
    return (info.stage, info.state, info.outer_step, info.fresh, info.slots, record.maddrs)
