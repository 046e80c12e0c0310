"""Looks on from outside while a simulated swarm loses peers: when is a stage without a replica, who adopts it?

A replica counts while it lives, runs and takes new work. While the swarm is split each side counts for itself. A gap
is a time in which a stage, on one side, has no replica; with it goes what was in the adopters' way, because that is
what its bound depends on (`benchmarks.swarm_churn`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peer.simulator.member import Member
from peer.simulator.network import LinkSettings
from peer.simulator.table import Sides
from protocols.actions import Action, Count, RecoverySource
from protocols.download import CHUNK_LIMIT_S
from protocols.recovery import RecoveryState
from protocols.swarm import PeerId

CLAIM_APART_S = 1.5  # claims that are written within this time compete: they cost no time of their own
DONOR_LIMIT_S = {"silent": CHUNK_LIMIT_S, "lost": LinkSettings().ack_s, "cannot serve": 1.0}


@dataclass(slots=True, kw_only=True)
class Gap:
    """A stage without a replica, on one side of the swarm."""

    stage: int
    side: int
    began_s: float
    ended_s: float | None = None
    neighbours: int = 0  # other gaps on this side meanwhile: adopters take one after another
    blows_s: list[float] = field(
        default_factory=list
    )  # when an adopter or the next in turn was hit, or links were cut
    claims_s: list[float] = field(default_factory=list)  # when the stage was claimed
    donors_s: float = 0.0  # that failed donors may have cost, each no more than its limit
    failed_donors: int = 0
    source: RecoverySource | None = None

    @property
    def claims_spent(self) -> int:
        """Claims after the first since the way was free, which came too late to compete with it."""
        spent, last_s = 0, None
        for at_s in (each for each in self.claims_s if each >= self.way_is_free_s):
            if last_s is None or at_s > last_s + CLAIM_APART_S:
                spent, last_s = spent + 1, at_s
        return max(0, spent - 1)

    @property
    def way_is_free_s(self) -> float:
        """Since when nothing has been in the adopters' way."""
        return max(self.blows_s, default=self.began_s)

    @property
    def blows(self) -> int:
        return len(set(self.blows_s))

    @property
    def is_calm(self) -> bool:
        return not (self.blows or self.claims_spent or self.neighbours or self.failed_donors)


@dataclass(slots=True, kw_only=True)
class Adoption:
    """A peer on its way to an empty middle stage."""

    peer: PeerId
    stage: int
    began_s: float
    ended_s: float = 0.0
    source: RecoverySource | None = None  # None: died, or another stage in the end


class Witness:
    """A `Watcher`. Stage 0 is left out: nobody can adopt it."""

    def __init__(self, num_stages: int) -> None:
        self.on_claim: Callable[[PeerId], None] | None = None
        self.gaps: list[Gap] = []
        self.adoptions: list[Adoption] = []
        self.has_begun = False  # before that stages are empty because nobody has started yet
        self._num_stages = num_stages
        self._serving: list[set[PeerId]] = [set() for _ in range(num_stages)]
        self._stage_of: dict[PeerId, int] = {}
        self._sides: Sides | None = None
        self._open: dict[tuple[int, int], Gap] = {}
        self._adopting: dict[PeerId, Adoption] = {}
        self._claimants: dict[PeerId, int] = {}

    @property
    def open_gaps(self) -> list[Gap]:
        return list(self._open.values())

    def end(self, now: float) -> None:
        """Adoptions that are under way end here."""
        for peer in list(self._adopting):
            self._end_adoption(now, peer, None)

    # ---- as a Watcher ----

    def happened(self, now: float, member: Member, actions: Sequence[Action]) -> None:
        for action in actions:
            if type(action) is Count:
                self._counted(now, member, action)
        self._look(now, member)

    def befell(self, now: float, member: Member) -> None:
        is_down = not member.is_alive or member.is_stopped
        if is_down and self._open:
            side = self._side(member.peer)
            hit = {gap.stage for gap in self._open.values() if self._is_in_its_way(member.peer, gap)}
            for gap in self._open.values():
                if gap.side == side and gap.stage in hit:
                    gap.blows_s.append(now)
        if not member.is_alive:
            self._end_adoption(now, member.peer, None)
            self._claimants.pop(member.peer, None)
        self._look(now, member)

    def split(self, now: float, sides: Sides | None) -> None:
        before, self._open = self._open, {}
        self._sides = sides
        for stage in range(1, self._num_stages):
            for side in self._all_sides():
                if self._is_served(stage, side):
                    continue
                old = before.get((stage, side)) or before.get((stage, 0))
                began_s = now if old is None else old.began_s
                gap = Gap(stage=stage, side=side, began_s=began_s, blows_s=[now])
                if old is not None:
                    gap.blows_s = [*old.blows_s, now]
                    gap.claims_s, gap.failed_donors, gap.neighbours = (
                        list(old.claims_s),
                        old.failed_donors,
                        old.neighbours,
                    )
                    gap.donors_s = old.donors_s
                self._open[stage, side] = gap
        for key, gap in before.items():
            if key not in self._open:
                self._close(now, gap)

    # ---- what it makes of it ----

    def _counted(self, now: float, member: Member, counted: Count) -> None:
        recovery, peer = member.core.recovery, member.peer
        match counted.name:
            case "stage-claimed":
                self._claimants[peer] = stage = int(counted.detail.split()[1])
                for gap in self._of(stage, peer):
                    gap.claims_s.append(now)
                if self.on_claim is not None:
                    self.on_claim(peer)
            case "stage-adopted":
                stage = int(counted.detail.rpartition(" ")[2])
                self._adopting[peer] = Adoption(peer=peer, stage=stage, began_s=now)
            case "donor-failed" if recovery.stage is not None:
                for gap in self._of(recovery.stage, peer):
                    gap.failed_donors += 1
                    gap.donors_s += DONOR_LIMIT_S[counted.detail.split(maxsplit=1)[1]]
            case "recovery-done":
                assert recovery.stage is not None, "recovered without a stage"
                self._end_adoption(now, peer, recovery.source)
                for gap in self._of(recovery.stage, peer):
                    gap.source = recovery.source
            case _:
                pass

    def _end_adoption(self, now: float, peer: PeerId, source: RecoverySource | None) -> None:
        adoption = self._adopting.pop(peer, None)
        if adoption is not None:
            adoption.ended_s, adoption.source = now, source
            self.adoptions.append(adoption)

    def _look(self, now: float, member: Member) -> None:
        """Does it serve a stage now, another than before?"""
        core = member.core
        is_serving = (
            member.is_alive
            and not member.is_stopped
            and core.recovery.state is RecoveryState.SERVING
            and not core.relay.draining
        )
        stage = core.stage if is_serving else None
        before = self._stage_of.get(member.peer)
        if stage == before:
            return
        if before is not None:
            del self._stage_of[member.peer]
            self._serving[before].discard(member.peer)
            self._changed(now, before, member.peer)
        if stage is not None:
            self._stage_of[member.peer] = stage
            self._serving[stage].add(member.peer)
            self._changed(now, stage, member.peer)

    def _changed(self, now: float, stage: int, peer: PeerId) -> None:
        side = self._side(peer)
        is_served, gap = self._is_served(stage, side), self._open.get((stage, side))
        if is_served and gap is not None:
            del self._open[stage, side]
            self._close(now, gap)
        elif not is_served and gap is None and stage != 0 and self.has_begun:
            others = [each for each in self._open.values() if each.side == side]
            for each in others:
                each.neighbours += 1
            self._open[stage, side] = Gap(stage=stage, side=side, began_s=now, neighbours=len(others))

    def _close(self, now: float, gap: Gap) -> None:
        gap.ended_s = now
        self.gaps.append(gap)

    def _is_in_its_way(self, peer: PeerId, gap: Gap) -> bool:
        """It is about to adopt the stage, or it is the one who would."""
        adopting = self._adopting.get(peer)
        if adopting is not None and adopting.stage == gap.stage:
            return True
        return self._claimants.get(peer) == gap.stage or self._next_in_turn(gap.side) == peer

    def _next_in_turn(self, side: int) -> PeerId | None:
        """Who would adopt, by what is true: the lowest id of the stage with most replicas."""
        here = [
            [peer for peer in self._serving[stage] if self._side(peer) == side]
            for stage in range(1, self._num_stages)
        ]
        return min(max(here, key=len), default=None)

    def _of(self, stage: int, peer: PeerId) -> list[Gap]:
        gap = self._open.get((stage, self._side(peer)))
        return [] if gap is None else [gap]

    def _side(self, peer: PeerId) -> int:
        return 0 if self._sides is None else self._sides(peer)

    def _all_sides(self) -> tuple[int, ...]:
        return (0,) if self._sides is None else (0, 1)

    def _is_served(self, stage: int, side: int) -> bool:
        return any(self._side(peer) == side for peer in self._serving[stage])


def overlaps_s(adoptions: Sequence[Adoption]) -> list[float]:
    """For how long two peers were at the adoption of one stage: each pair that overlapped."""
    found: list[float] = []
    for index, one in enumerate(adoptions):
        for other in adoptions[index + 1 :]:
            if one.stage == other.stage:
                both_s = min(one.ended_s, other.ended_s) - max(one.began_s, other.began_s)
                found += [both_s] if both_s > 0 else []
    return found
