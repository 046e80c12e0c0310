"""Who takes over an empty stage: watch, confirm, claim. One peer does it, alone.

The peer that would adopt a thinly served stage calls its replicas directly at each poll of the table. When all are
gone K polls running (no record, or nobody listens at their address), it claims the stage in the table, waits, reads
all claims, and goes only if its own is the first. Views may differ; the claim decides. A replica that is merely slow
or frozen is not gone: it stops renewing its record, and is given up when that lapses.
"""

from __future__ import annotations

from protocols.actions import (
    Action,
    CallPeer,
    Count,
    PutClaim,
    ReadClaims,
)
from protocols.events import ClaimsRead, PingDone
from protocols.placement import adopter, first_claim
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, PeerState, SwarmView
from protocols.timers import Timers

THIN_REPLICAS = 2  # a stage with no more than that is watched
CLAIM_SETTLE_S = 1.5  # claims written within that time of each other compete; an older one has won


class Adoption:
    """Invariant: at most one claim of ours at a time, and it has a deadline."""

    def __init__(self, me: PeerId, spec: RunSpec) -> None:
        self._me = me
        self._spec = spec
        self._gone: set[PeerId] = set()  # at whose address nobody listened at the last call
        self._empty_polls: dict[int, int] = {}
        self._claimed: int | None = None
        self._timers: Timers[str] = Timers()

    def next_deadline(self) -> float | None:
        return self._timers.next()

    def on_view(self, view: SwarmView, now: float) -> list[Action]:
        """At each poll: call the replicas of the stages that I would adopt; claim one that is confirmed empty."""
        calls: list[Action] = []
        watched: set[PeerId] = set()
        for stage in range(self._spec.num_stages):
            replicas = view.replicas(stage)
            mine = len(replicas) <= THIN_REPLICAS and adopter(view, stage, self._spec.num_stages) == self._me
            if not mine or self._is_coming(view, stage):
                self._empty_polls.pop(stage, None)
                continue
            watched.update(info.peer for info in replicas)
            calls += [CallPeer(peer=info.peer) for info in replicas]
            empty = all(info.peer in self._gone for info in replicas)
            self._empty_polls[stage] = self._empty_polls.get(stage, 0) + 1 if empty else 0
        self._gone &= watched
        return [*calls, *self._claim(now)]

    def _is_coming(self, view: SwarmView, stage: int) -> bool:
        """Somebody is fetching weights for the stage already."""
        return any(info.stage == stage and info.state is PeerState.CATCHING_UP for info in view.peers)

    def on_ping(self, event: PingDone) -> None:
        if event.is_gone:
            self._gone.add(event.peer)
        elif event.ok:
            self._gone.discard(event.peer)

    def _claim(self, now: float) -> list[Action]:
        confirm = self._spec.liveness.empty_confirm
        empty = [stage for stage, polls in sorted(self._empty_polls.items()) if polls >= confirm]
        if self._claimed is not None or not empty:
            return []
        self._claimed = empty[0]
        self._timers.set("settle", now + CLAIM_SETTLE_S)
        claimed = Count(name="stage-claimed", detail=f"stage {empty[0]} has no replica", notable=True)
        return [claimed, PutClaim(stage=empty[0])]

    def on_deadline(self, now: float) -> list[Action]:
        if self._timers.pop_due(now) and self._claimed is not None:
            return [ReadClaims(stage=self._claimed)]
        return []

    def on_claims(self, event: ClaimsRead) -> int | None:
        """The stage to adopt now, None when another peer's claim came first or the table is unreachable."""
        if event.stage != self._claimed:
            return None
        self._claimed = None
        self._empty_polls.pop(event.stage, None)
        return event.stage if first_claim(event.claims, CLAIM_SETTLE_S) == self._me else None
