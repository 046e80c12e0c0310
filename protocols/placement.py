"""Which stage a joiner takes, and who would take over an empty one. Pure: everybody computes the same answer."""

from __future__ import annotations

from collections.abc import Iterable

from protocols.swarm import PeerId, PeerInfo, PeerState, SwarmView

_COUNTED = (PeerState.SERVING, PeerState.CATCHING_UP)


def choose_stage(view: SwarmView, num_stages: int, me: PeerId) -> int:
    """The stage for a joiner: the one with the fewest replicas, those still catching up included.

    Joiners that have no stage yet choose in the order of their ids, each as if those before it had arrived: so a
    crowd that sees the same view spreads. Among equal stages the lowest middle one, then the first.
    """
    counts = [0] * num_stages
    for info in view.peers:
        if info.stage is not None and info.state in _COUNTED and info.stage < num_stages:
            counts[info.stage] += 1
    joiners = {info.peer for info in view.peers if info.stage is None} | {me}
    stages = (*range(1, num_stages), 0)
    for joiner in sorted(joiners):
        stage = min(stages, key=lambda stage: counts[stage])
        if joiner == me:
            return stage
        counts[stage] += 1
    raise AssertionError("me is among the joiners")


def first_claim(claims: Iterable[tuple[PeerId, float]], settle_s: float) -> PeerId | None:
    """Whose claim won: the lowest id among the oldest ones, where claims within `settle_s` of each other compete."""
    ages_s = dict(claims)
    oldest_s = max(ages_s.values(), default=0.0)
    return min((peer for peer, age_s in ages_s.items() if age_s > oldest_s - settle_s), default=None)


def adopter(view: SwarmView, empty_stage: int, num_stages: int) -> PeerId | None:
    """Who leaves its stage for `empty_stage`: the lowest id of the stage with most replicas, two at least.

    A middle stage gives before the first, whose peers hold the text.
    """
    for stages in (range(1, num_stages), (0,)):
        richest = _richest(view, stages, empty_stage)
        if len(richest) >= 2:
            return richest[0].peer
    return None


def _richest(view: SwarmView, stages: Iterable[int], empty_stage: int) -> tuple[PeerInfo, ...]:
    candidates = (view.replicas(stage) for stage in stages if stage != empty_stage)
    return max(candidates, key=len, default=())
