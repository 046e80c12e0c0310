"""Who is in the swarm: an immutable snapshot, sorted by peer id so that all peers iterate alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from protocols.coordinates import Coordinate

PeerId: TypeAlias = str


class PeerState(str, Enum):
    """What a peer says about itself in its record."""

    JOINING = "joining"  # in the table, has no stage yet
    CATCHING_UP = "catching-up"  # fetching the weights of its stage
    SERVING = "serving"  # takes microbatches
    LEAVING = "leaving"  # finishes what it holds, takes nothing new


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """What others may know of a peer; all of it from its signed record."""

    peer: PeerId
    stage: int | None
    state: PeerState
    round: int = 0  # inner steps that its weights have seen
    outer_step: int = 0
    slots: int = 1
    forward_s: float = 0.0  # measured seconds of a forward pass; 0: not yet measured
    backward_s: float = 0.0
    upload_bytes_per_s: float = 0.0  # of its access line, as fast as anything went lately
    download_bytes_per_s: float = 0.0
    coordinate: Coordinate | None = None
    links: tuple[
        tuple[int, float], ...
    ] = ()  # that its coordinate gets wrong: number of a peer's id, seconds one way
    grad_norm: float = 0.0  # smoothed, before clipping: CheckFree's weight
    started_unix_s: float = 0.0  # tells one life of a peer from the next
    fresh: bool = False  # rebuilt, not yet trained


@dataclass(frozen=True, slots=True)
class SwarmView:
    """All peers known now, by id."""

    peers: tuple[PeerInfo, ...] = ()
    _by_id: dict[PeerId, PeerInfo] = field(init=False, repr=False, compare=False)
    _replicas: dict[int, tuple[PeerInfo, ...]] = field(init=False, repr=False, compare=False)
    lives: frozenset[tuple[PeerId, float]] = field(
        init=False, repr=False, compare=False
    )  # peer, when it started

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.peers, key=lambda info: info.peer))
        replicas: dict[int, list[PeerInfo]] = {}
        for info in ordered:
            if info.stage is not None and info.state is PeerState.SERVING:
                replicas.setdefault(info.stage, []).append(info)
        object.__setattr__(self, "peers", ordered)
        object.__setattr__(self, "lives", frozenset((info.peer, info.started_unix_s) for info in ordered))
        object.__setattr__(self, "_by_id", {info.peer: info for info in ordered})
        object.__setattr__(self, "_replicas", {stage: tuple(infos) for stage, infos in replicas.items()})

    def get(self, peer: PeerId) -> PeerInfo | None:
        return self._by_id.get(peer)

    def __contains__(self, peer: object) -> bool:
        return peer in self._by_id

    def replicas(self, stage: int) -> tuple[PeerInfo, ...]:
        """Serving peers of a stage, by id."""
        return self._replicas.get(stage, ())

    def originators(self) -> tuple[PeerInfo, ...]:
        return self.replicas(0)

    def empty_stages(self, num_stages: int) -> tuple[int, ...]:
        """Middle stages without a serving replica."""
        return tuple(stage for stage in range(1, num_stages) if stage not in self._replicas)

    def without(self, peers: Iterable[PeerId]) -> SwarmView:
        """The same view minus `peers`, as seen by someone who suspects them."""
        left_out = frozenset(peers)
        return (
            SwarmView(tuple(info for info in self.peers if info.peer not in left_out)) if left_out else self
        )
