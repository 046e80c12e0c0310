"""Which stage a joiner takes, and who would take over an empty one. Pure: everybody computes the same answer."""

from __future__ import annotations

from protocols.swarm import PeerId, PeerInfo, PeerState, SwarmView

_COUNTED = (PeerState.SERVING, PeerState.CATCHING_UP)


def choose_stage(view: SwarmView, num_stages: int) -> int:
    """The stage with the fewest replicas, those still catching up included; the lowest number among equals."""
    counts = [0] * num_stages
    for info in view.peers:
        if info.stage is not None and info.state in _COUNTED and info.stage < num_stages:
            counts[info.stage] += 1
    return min(range(num_stages), key=lambda stage: (counts[stage], stage))


def adopter(view: SwarmView, empty_stage: int, num_stages: int) -> PeerId | None:
    """Who leaves its stage for `empty_stage`: the lowest id of the middle stage with most replicas, two at least."""
    richest = _richest(view, empty_stage, num_stages)
    return richest[0].peer if len(richest) >= 2 else None


def _richest(view: SwarmView, empty_stage: int, num_stages: int) -> tuple[PeerInfo, ...]:
    stages = [stage for stage in range(1, num_stages) if stage != empty_stage]
    best = max(stages, key=lambda stage: (len(view.replicas(stage)), -stage), default=None)
    return () if best is None else view.replicas(best)
