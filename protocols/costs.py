"""What a hop costs: seconds of compute, and of link for n bytes. Measured, decayed, published as a few numbers a peer.

Each peer measures itself (passes, access rates) and where it lies (`coordinates`), and names the few links about which
coordinates err most; others take that from its record. What one has measured oneself goes before what a record claims,
where the two differ by more than noise would explain: links by own round trips, compute by the trips of own
microbatches.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import floor, log10
from typing import Any, TypeAlias

from protocols.coordinates import Coordinate, moved, round_trip_s
from protocols.hashing import number_of
from protocols.swarm import PeerId, PeerInfo, SwarmView

FORWARD_DEFAULT_S = 0.05  # of a peer while nobody has measured anything
BACKWARD_FACTOR = 2.0  # of a forward, while nobody has measured
RATE_DEFAULT_BYTES_PER_S = 12.5e6  # 100 Mbit/s
DECAY = 0.2  # weight of the newest measurement
CONTRADICTION = 2.0  # a claim is believed within this factor of what was measured
TRIPS_KEPT = 8  # the shortest of the last trips through a peer tells its speed from its queue
REMEMBERED_MAX = 4096  # peers
LINKS_MAX = 16  # named in a record
LINK_ERROR_MIN = 0.05  # of a coordinate about a link that is named, as a share of the link


Links: TypeAlias = "tuple[tuple[int, float], ...]"  # number of the other peer's id, seconds one way


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a peer publishes of itself; 0 and None: not yet measured."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    upload_bytes_per_s: float = 0.0
    download_bytes_per_s: float = 0.0
    coordinate: Coordinate | None = None
    links: Links = ()

    def fields(self) -> dict[str, Any]:
        """As fields of a PeerInfo."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Costs:
    """Measurements of one peer, and its estimates of everybody's costs."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._forward_s = self._backward_s = 0.0
        self._upload_bytes_per_s = self._download_bytes_per_s = 0.0
        self._coordinate = Coordinate()
        self._round_trip_s: dict[PeerId, float] = {}
        self._links: Links = ()
        self._slowness: dict[PeerId, deque[float]] = {}  # of recent trips: took / predicted

    # ---- own measurements ----

    def measured_forward(self, seconds: float) -> None:
        self._forward_s = _decayed(self._forward_s, seconds)

    def measured_backward(self, seconds: float) -> None:
        self._backward_s = _decayed(self._backward_s, seconds)

    def measured_access(self, upload_bytes_per_s: float, download_bytes_per_s: float) -> None:
        """The fastest that anything went out or came in lately."""
        self._upload_bytes_per_s, self._download_bytes_per_s = upload_bytes_per_s, download_bytes_per_s

    def measured_round_trip(self, peer: PeerId, view: SwarmView, seconds: float) -> None:
        """A call was answered; `view` tells what is known of who answered."""
        if len(self._round_trip_s) < REMEMBERED_MAX or peer in self._round_trip_s:
            self._round_trip_s[peer] = _decayed(self._round_trip_s.get(peer, 0.0), seconds)
        info = view.get(peer)
        if info is not None and info.coordinate is not None:
            self._coordinate = moved(self._coordinate, info.coordinate, seconds, me=self._me, other=peer)
            self._links = self._misplaced(view)

    def _misplaced(self, view: SwarmView) -> Links:
        """The own links that coordinates get wrong by most seconds."""
        found: list[tuple[float, PeerId, float]] = []
        for peer, round_s in self._round_trip_s.items():
            info = view.get(peer)
            if info is not None and info.coordinate is not None:
                error_s = abs(round_trip_s(self._coordinate, info.coordinate) - round_s) / 2
                if error_s > LINK_ERROR_MIN * round_s / 2:
                    found.append((error_s, peer, round_s / 2))
        worst = sorted(found, reverse=True)[:LINKS_MAX]
        return tuple(sorted((_number(peer), _two_digits(seconds)) for _, peer, seconds in worst))

    def measured_trip(self, relays: tuple[PeerId, ...], took: float) -> None:
        """A microbatch came back; `took` is its seconds over those predicted for an empty swarm."""
        for relay in relays:
            if len(self._slowness) < REMEMBERED_MAX or relay in self._slowness:
                self._slowness.setdefault(relay, deque(maxlen=TRIPS_KEPT)).append(took)

    def forget(self, view: SwarmView) -> None:
        """Those that are in the table no more."""
        for known in (self._round_trip_s, self._slowness):
            for peer in [peer for peer in known if peer not in view]:
                del known[peer]

    def published(self) -> Measured:
        """For the own record, rounded so that noise is no news."""
        return Measured(
            forward_s=_two_digits(self._forward_s),
            backward_s=_two_digits(self._backward_s),
            upload_bytes_per_s=_two_digits(self._upload_bytes_per_s),
            download_bytes_per_s=_two_digits(self._download_bytes_per_s),
            coordinate=self._coordinate.published(),
            links=self._links,
        )

    # ---- estimates ----

    def forward_s(self, info: PeerInfo) -> float:
        claimed_s = (
            info.forward_s or self._forward_s or FORWARD_DEFAULT_S
        )  # a newcomer is taken to be like us
        trips = self._slowness.get(info.peer)
        slowness = min(trips) if trips is not None and len(trips) == TRIPS_KEPT else 1.0
        return claimed_s * slowness if slowness > CONTRADICTION else claimed_s

    def believed(self, info: PeerInfo) -> PeerInfo:
        """Its record, with compute times as we believe them."""
        if not info.forward_s:
            return info
        forward_s = self.forward_s(info)
        return info if forward_s == info.forward_s else replace(info, forward_s=_two_digits(forward_s))

    def link_s(self, source: PeerInfo, target: PeerInfo, num_bytes: int) -> float:
        """One way."""
        return self.latency_s(source, target) + transfer_s(source, target, num_bytes)

    def latency_s(self, source: PeerInfo, target: PeerInfo) -> float:
        claimed_s = claimed_latency_s(source, target)
        if self._me not in (source.peer, target.peer):
            return claimed_s
        measured_s = self._round_trip_s.get(target.peer if source.peer == self._me else source.peer)
        if measured_s is None:
            return claimed_s
        is_near = claimed_s / CONTRADICTION <= measured_s / 2 <= claimed_s * CONTRADICTION
        return claimed_s if is_near else measured_s / 2

    def contradicted(self, peers: tuple[PeerInfo, ...]) -> dict[PeerId, float]:
        """Own latency to those whose coordinates are wrong about it."""
        mine = next((info for info in peers if info.peer == self._me), None)
        if mine is None:
            return {}
        latencies_s = {
            info.peer: (self.latency_s(mine, info), claimed_latency_s(mine, info)) for info in peers
        }
        return {
            peer: believed_s
            for peer, (believed_s, claimed_s) in latencies_s.items()
            if believed_s != claimed_s
        }


def claimed_latency_s(source: PeerInfo, target: PeerInfo) -> float:
    """One way, as both records have it: the link by its name, else by where they lie; 0 while one does not know.

    Where both name it, the slower counts: a false claim then can only cost its author work.
    """
    if source.peer == target.peer:
        return 0.0
    named_s = max(_named_s(source, target.peer), _named_s(target, source.peer))
    if named_s > 0:
        return named_s
    if source.coordinate is None or target.coordinate is None:
        return 0.0
    return round_trip_s(source.coordinate, target.coordinate) / 2


def _named_s(info: PeerInfo, other: PeerId) -> float:
    number = _number(other) if info.links else 0
    return next((seconds for named, seconds in info.links if named == number), 0.0)


@lru_cache(maxsize=REMEMBERED_MAX)
def _number(peer: PeerId) -> int:
    return number_of(peer)


def transfer_s(source: PeerInfo, target: PeerInfo, num_bytes: int) -> float:
    """Through the narrower of the two access lines."""
    up = source.upload_bytes_per_s or RATE_DEFAULT_BYTES_PER_S
    down = target.download_bytes_per_s or up
    return num_bytes / max(1.0, min(up, down))


def _decayed(old: float, new: float) -> float:
    return old + DECAY * (new - old) if old else new


def _two_digits(value: float) -> float:
    return round(value, 1 - floor(log10(value))) if value > 0 else 0.0
