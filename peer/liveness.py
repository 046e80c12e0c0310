"""Own calls: to the peers that work of ours depends on, since a frozen peer gives no other sign; and to the others in
turn, which tells how far everybody is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from peer.transport import PeerUnreachable, Transport
from protocols.core import PeerCore
from protocols.events import Event, PingDone, SendFailed
from protocols.swarm import PeerId

OTHERS_CALLED = 3  # each time: a swarm of dozens is measured within a minute or two


class Liveness:
    """Calls them every `heartbeat_s`; `ping_misses_max` misses in a row make a peer unreachable."""

    def __init__(self, core: PeerCore, transport: Transport, post: Callable[[Event], None]) -> None:
        self._core = core
        self._transport = transport
        self._post = post
        self._misses: dict[PeerId, int] = {}
        self._turn = 0

    async def run(self) -> None:
        limits = self._core.spec.liveness
        while True:
            await asyncio.sleep(limits.heartbeat_s)
            needed = self._core.depends_on()
            self._misses = {peer: misses for peer, misses in self._misses.items() if peer in needed}
            await asyncio.gather(
                *(self._ping(peer, limits.ping_s) for peer in sorted({*needed, *self._next()}))
            )
            for peer, misses in list(self._misses.items()):
                if peer in needed and misses >= limits.ping_misses_max:
                    del self._misses[peer]
                    self._post(SendFailed(peer=peer))
            self._post(self._transport.access())

    def _next(self) -> tuple[PeerId, ...]:
        """A few more peers of the view, others each time."""
        others = [info.peer for info in self._core.visible.peers if info.peer != self._core.me]
        self._turn += OTHERS_CALLED
        return (
            tuple(others[(self._turn + index) % len(others)] for index in range(OTHERS_CALLED))
            if others
            else ()
        )

    async def _ping(self, peer: PeerId, limit_s: float) -> None:
        try:
            seconds = await self._transport.ping(peer, limit_s)
        except PeerUnreachable:
            self._misses[peer] = self._misses.get(peer, 0) + 1
        else:
            self._misses.pop(peer, None)
            self._post(PingDone(peer=peer, ok=True, seconds=seconds))
