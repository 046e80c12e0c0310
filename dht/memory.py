"""The table in a dict, for the simulator and for tests: same rules, a given clock, no network and no
signatures.

One object is the table of a whole simulated swarm. Simulated peers are named `a1`, `c2`: no keys stand behind
such names, so everything is checked but the signature.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from dht.directory import next_expiry
from dht.validators import check_place
from protocols.errors import RemoteProtocolError


class MemoryDirectory:
    """A Directory; the `_now` methods are its synchronous core, for drivers without an event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[str, dict[str, tuple[bytes, float]]] = {}
        self.refusals: Counter[str] = Counter()

    def put_now(self, key: str, subkey: str, value: bytes, *, ttl_s: float) -> bool:
        now = self._clock()
        held = self._entries.get(key, {}).get(subkey)
        expiry = next_expiry(now, ttl_s, None if held is None else held[1])
        try:
            check_place(key, subkey, value, expiry, now_unix_s=now)
        except RemoteProtocolError as error:
            self.refusals[error.reason] += 1
            return False
        self._entries.setdefault(key, {})[subkey] = (value, expiry)
        return True

    def get_now(self, keys: Iterable[str]) -> dict[str, dict[str, bytes]]:
        now = self._clock()
        found: dict[str, dict[str, bytes]] = {}
        for key in keys:
            live = {name: entry for name, entry in self._entries.pop(key, {}).items() if entry[1] > now}
            if live:
                self._entries[key] = live
                found[key] = {name: value for name, (value, _) in sorted(live.items())}
        return found

    async def put(self, key: str, subkey: str, value: bytes, *, ttl_s: float) -> bool:
        return self.put_now(key, subkey, value, ttl_s=ttl_s)

    async def get_many(self, keys: Iterable[str]) -> dict[str, dict[str, bytes]]:
        return self.get_now(keys)

    def now_unix_s(self) -> float:
        return self._clock()

    async def close(self) -> None:
        """Nothing is held."""
