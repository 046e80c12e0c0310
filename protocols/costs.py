"""What a hop costs: seconds of compute from the peers' records, seconds of link from own measurements, with decay."""

from __future__ import annotations

from protocols.swarm import PeerId, PeerInfo

FORWARD_DEFAULT_S = 0.05  # of a peer that nobody has measured yet
LINK_DEFAULT_S = 0.02
DECAY = 0.2  # weight of the newest measurement


class Costs:
    """Estimates kept by one originator."""

    def __init__(self) -> None:
        self._round_trip_s: dict[PeerId, float] = {}

    def measured_round_trip(self, peer: PeerId, seconds: float) -> None:
        old_s = self._round_trip_s.get(peer)
        self._round_trip_s[peer] = seconds if old_s is None else old_s + DECAY * (seconds - old_s)

    def forward_s(self, info: PeerInfo) -> float:
        return info.forward_s or FORWARD_DEFAULT_S

    def link_s(self, source: PeerId, target: PeerId) -> float:
        """One way. Only links from here are measured; a stranger's link counts as half of what reaching both takes."""
        del source  # first form: access links dominate, so the target's counts
        round_trip_s = self._round_trip_s.get(target)
        return LINK_DEFAULT_S if round_trip_s is None else round_trip_s / 2
