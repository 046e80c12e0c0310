"""Serving one's own weights: a snapshot, then its chunks one by one as the receiver asks for them.

The receiver pulls, so a slow or dead one costs the donor nothing; the snapshot keeps the chunks consistent while
training goes on. Invariant: at most SNAPSHOTS_MAX snapshots of a kind are kept, each with a lease.
"""

from __future__ import annotations

from collections.abc import Iterator

from protocols.actions import (
    Action,
    Count,
    Send,
    TakeSnapshot,
)
from protocols.events import SnapshotTaken
from protocols.messages import WeightsChunk, WeightsKind, WeightsRequest
from protocols.swarm import PeerId
from protocols.timers import Timers

SNAPSHOTS_MAX = 2  # of a kind
SNAPSHOT_LEASE_S = 30.0  # after the last request for it
SERVED_LEASE_S = 3.0  # after the last chunk: another may want the same
SNAPSHOT_FRESH_ROUNDS = 4  # a second joiner is served from the same snapshot while it is so young
WAITERS_MAX = 16


class Donor:
    """Answers WeightsRequest for the stage that this peer serves."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._snapshots: dict[str, SnapshotTaken] = {}
        self._waiting: dict[WeightsKind, list[PeerId]] = {}
        self._taking: dict[WeightsKind, str] = {}  # the snapshot that is being taken for them
        self._leases: Timers[str] = Timers()
        # Own round when it was taken. The runtime's is older after rounds without work, though the weights are not:
        # by that a joiner would be left behind where it begins, and begin again for ever.
        self._since: dict[str, int] = {}
        self._num_taken = 0
        self.stage: int | None = None
        self.round = 0

    def next_deadline(self) -> float | None:
        return self._leases.next()

    def on_request(self, sender: PeerId, request: WeightsRequest, now: float) -> list[Action]:
        if request.stage != self.stage:
            return [Send(to=sender, message=request.refusal())]
        if request.snapshot:
            return [self._serve(sender, request, now)]
        young = next(self._young(request.kind), None)
        if young is not None:
            return [self._chunk(sender, young, 0, now)]
        waiters = self._waiting.setdefault(request.kind, [])
        kept = sum(taken.kind is request.kind for taken in self._snapshots.values())
        if len(waiters) >= WAITERS_MAX or (not waiters and kept >= SNAPSHOTS_MAX):
            return [Send(to=sender, message=request.refusal())]
        waiters.append(sender)
        if len(waiters) > 1:
            return []  # the snapshot is being taken
        self._num_taken += 1
        self._taking[request.kind] = f"{self._me[-8:]}-{self._num_taken}"
        return [TakeSnapshot(kind=request.kind, snapshot=self._taking[request.kind])]

    def _young(self, kind: WeightsKind) -> Iterator[SnapshotTaken]:
        for taken in self._snapshots.values():
            if taken.kind is kind and self.round - self._since[taken.snapshot] <= SNAPSHOT_FRESH_ROUNDS:
                yield taken

    def _serve(self, sender: PeerId, request: WeightsRequest, now: float) -> Send:
        taken = self._snapshots.get(request.snapshot)
        if taken is None or not 0 <= request.index < len(taken.packets):
            return Send(to=sender, message=request.refusal())
        return self._chunk(sender, taken, request.index, now)

    def _chunk(self, sender: PeerId, taken: SnapshotTaken, index: int, now: float) -> Send:
        assert self.stage is not None, "a snapshot without a stage"
        is_last = index + 1 == len(taken.packets)
        self._leases.set(taken.snapshot, now + (SERVED_LEASE_S if is_last else SNAPSHOT_LEASE_S))
        chunk = WeightsChunk(
            kind=taken.kind,
            stage=self.stage,
            snapshot=taken.snapshot,
            index=index,
            count=len(taken.packets),
            sha256=taken.sha256,
            round=self._since[taken.snapshot],
            outer_step=taken.outer_step,
            packet=taken.packets[index],
        )
        return Send(to=sender, message=chunk)

    def on_taken(self, taken: SnapshotTaken, now: float) -> list[Action]:
        if self._taking.get(taken.kind) != taken.snapshot:
            return []  # of the stage that was left meanwhile
        del self._taking[taken.kind]
        self._snapshots[taken.snapshot] = taken
        self._since[taken.snapshot] = self.round
        waiters = self._waiting.pop(taken.kind, [])
        self._leases.set(taken.snapshot, now + SNAPSHOT_LEASE_S)
        served: list[Action] = [self._chunk(waiter, taken, 0, now) for waiter in waiters]
        return [Count(name="snapshot-taken", detail=taken.kind.value), *served]

    def on_failed(self) -> None:
        """The snapshot could not be taken: the waiters' own deadlines send them elsewhere."""
        self._waiting.clear()
        self._taking.clear()

    def on_deadline(self, now: float) -> None:
        for snapshot in self._leases.pop_due(now):
            self._snapshots.pop(snapshot, None)
            self._since.pop(snapshot, None)

    def forget(self) -> None:
        """The stage is about to change."""
        for snapshot in list(self._snapshots):
            self._leases.clear(snapshot)
        self._snapshots.clear()
        self._since.clear()
        self.on_failed()

    def check_invariants(self) -> None:
        assert len(self._snapshots) <= len(WeightsKind) * (SNAPSHOTS_MAX + 1), "snapshots pile up"
        assert all(snapshot in self._leases for snapshot in self._snapshots), "a snapshot without a lease"
