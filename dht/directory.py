"""Directory: the few verbs through which the swarm's table is used; the simulator and the network both have
them.

Entries live under (key, subkey) until their expiry. The table's one rule of precedence: what expires later
wins. So a put never expires earlier than the writer's put before it, or it would be refused in silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from protocols.errors import GossamerError

EXPIRY_STEP_S = (
    0.001  # a later put expires at least so much later, also when the clock stood still or went back
)

PLAIN = ""  # the subkey of an entry that has none


class DirectoryUnavailable(GossamerError):
    """The table did not answer in time. Says nothing about who is in it."""


class Directory(Protocol):
    """Values are bytes as `dht.records` encodes them; signatures are the directory's own affair."""

    async def put(self, key: str, subkey: str, value: bytes, *, ttl_s: float) -> bool:
        """Store; False when the table refused it or could not be reached. Never raises for the network."""
        ...

    async def get_many(self, keys: Iterable[str]) -> dict[str, dict[str, bytes]]:
        """Valid, unexpired entries by key, then subkey; a key without any is absent. May raise
        DirectoryUnavailable."""
        ...

    def now_unix_s(self) -> float: ...

    async def close(self) -> None: ...


def next_expiry(now_unix_s: float, ttl_s: float, previous_unix_s: float | None) -> float:
    """When the next put of the same entry must expire (unix seconds)."""
    fresh = now_unix_s + ttl_s
    return fresh if previous_unix_s is None else max(fresh, previous_unix_s + EXPIRY_STEP_S)
