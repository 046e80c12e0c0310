"""Getting a stage's weights: first start, catch-up of a joiner, adoption of an empty stage.

    JOINING -view-> COLLECTING (sibling or neighbours alive) | MERGING (nobody has trained: initial weights)
    SERVING -stage seen empty K times, direct calls failed, claim won-> LEAVING -drained-> COLLECTING
    COLLECTING -all donors' states whole-> MERGING -RecoveryDone-> SERVING
    COLLECTING -donor silent, refusing or gone-> COLLECTING with the next donor, or again after a pause

Invariant: the weights change only in MERGING, by one job that does all or nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from protocols.actions import (
    Action,
    Count,
    DonorState,
    RecoverySource,
    RunRecovery,
    Send,
)
from protocols.messages import TensorPacket, WeightsChunk, WeightsKind, WeightsRequest
from protocols.outlook import Outlook
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, PeerInfo, SwarmView
from protocols.timers import Timers

CHUNK_LIMIT_S = 20.0  # a donor's silence
RETRY_S = 2.0


class RecoveryState(Enum):
    JOINING = "joining"
    SERVING = "serving"
    LEAVING = "leaving"
    COLLECTING = "collecting"
    MERGING = "merging"


@dataclass(slots=True)
class Download:
    """What has come from one donor."""

    donor: PeerInfo
    kind: WeightsKind
    stage: int
    first: WeightsChunk | None = None
    packets: list[TensorPacket] = field(default_factory=list[TensorPacket])

    @property
    def is_whole(self) -> bool:
        return self.first is not None and len(self.packets) == self.first.count

    def expects(self, chunk: WeightsChunk) -> bool:
        """It is the next one; False: a late answer to an older question."""
        return chunk.index == len(self.packets) and (
            self.first is None or chunk.snapshot == self.first.snapshot
        )

    def add(self, chunk: WeightsChunk) -> None:
        assert chunk.packet is not None, "a refusal is no part of a state"
        self.first = self.first or chunk
        self.packets.append(chunk.packet)

    def request(self) -> Send:
        snapshot = self.first.snapshot if self.first is not None else ""
        wanted = WeightsRequest(kind=self.kind, stage=self.stage, snapshot=snapshot, index=len(self.packets))
        return Send(to=self.donor.peer, message=wanted)

    def state(self) -> DonorState:
        assert self.first is not None, "a state without a chunk"
        return DonorState(
            donor=self.donor.peer,
            stage=self.stage,
            round=self.first.round,
            outer_step=self.first.outer_step,
            sha256=self.first.sha256,
            grad_norm=self.donor.grad_norm,
            packets=tuple(self.packets),
        )


class Recovery:
    """One peer's way to the weights of its stage. `adoption` decides when to change stage; this does it."""

    def __init__(self, me: PeerId, spec: RunSpec) -> None:
        self._me = me
        self._spec = spec
        self.state = RecoveryState.JOINING
        self.stage: int | None = None
        self.source = RecoverySource.INITIAL
        self.fresh = False
        self.target = (0, 0)  # round and outer step of the weights that are being put in place
        self.own: tuple[int, int] = (0, 0)  # of the own checkpoint, in place until the first recovery
        self._downloads: dict[PeerId, Download] = {}
        self._failed: set[PeerId] = set()
        self._timers: Timers[str] = Timers()

    def next_deadline(self) -> float | None:
        return self._timers.next()

    def begin(self, stage: int, outlook: Outlook, now: float) -> list[Action]:
        """Get weights for `stage` from the best source in sight; initial ones only where nobody ever had others."""
        self.stage = stage
        self.state = RecoveryState.COLLECTING
        self._timers.clear("chunk")
        self._timers.clear("retry")
        siblings = self._willing(self._siblings(stage, outlook.visible))
        if siblings:
            newest = max(info.round for info in siblings)
            equal = [info for info in siblings if info.round >= newest - 1]
            donor = equal[zlib.crc32(self._me.encode()) % len(equal)]  # joiners spread over equal donors
            return self._collect(RecoverySource.CATCH_UP, [donor], WeightsKind.FULL, now)
        if self.own[0] > 0:  # what those ahead had is gone with them, once their records lapse
            return self._pause(now) if self._siblings(stage, outlook.view) else self._keep()
        neighbours = self._willing(self._neighbours(stage, outlook.visible))
        if not neighbours:
            known = self._siblings(stage, outlook.view) or self._neighbours(stage, outlook.view)
            return (
                self._pause(now) if known else self._merge(RecoverySource.INITIAL, (), round_=0, outer_step=0)
            )
        donors = [max(group, key=lambda info: info.round) for group in _by_stage(neighbours)]
        source = RecoverySource.MERGE if len(donors) == 2 else RecoverySource.COPY
        return self._collect(source, donors, WeightsKind.WEIGHTS, now)

    def _keep(self) -> list[Action]:
        """The own checkpoint, which is in place: a few rounds old, and closer to the lost stage than any mix."""
        round_, outer_step = self.own
        return self._merge(RecoverySource.INITIAL, (), round_=round_, outer_step=outer_step)

    def _siblings(self, stage: int, view: SwarmView) -> list[PeerInfo]:
        return [info for info in view.replicas(stage) if info.peer != self._me]

    def _neighbours(self, stage: int, view: SwarmView) -> list[PeerInfo]:
        """Trained replicas of the middle stages beside `stage`; for the first stage there is no such thing."""
        if stage == 0:
            return []
        beside = [each for each in (stage - 1, stage + 1) if 1 <= each < self._spec.num_stages]
        return [info for each in beside for info in self._siblings(each, view) if info.round > 0]

    def _willing(self, infos: list[PeerInfo]) -> list[PeerInfo]:
        return [info for info in infos if info.peer not in self._failed]

    def _collect(
        self, source: RecoverySource, donors: list[PeerInfo], kind: WeightsKind, now: float
    ) -> list[Action]:
        self.source = source
        self._downloads = {}
        for donor in donors:
            assert donor.stage is not None, "a serving peer has a stage"
            self._downloads[donor.peer] = Download(donor, kind, donor.stage)
        self._timers.set("chunk", now + CHUNK_LIMIT_S)
        who = ", ".join(donor.peer[-6:] for donor in donors)
        started = Count(
            name="recovery-started", detail=f"stage {self.stage}: {source.value} from {who}", notable=True
        )
        return [started, *(download.request() for download in self._downloads.values())]

    def on_chunk(self, sender: PeerId, chunk: WeightsChunk, outlook: Outlook, now: float) -> list[Action]:
        download = self._downloads.get(sender)
        if self.state is not RecoveryState.COLLECTING or download is None:
            return []
        is_of_another = chunk.stage != download.stage or chunk.kind is not download.kind
        if chunk.count == 0 or chunk.packet is None or is_of_another:
            return self._next_donor(sender, "cannot serve", outlook, now)
        if not download.expects(chunk):
            return []
        download.add(chunk)
        self._timers.set("chunk", now + CHUNK_LIMIT_S)
        if not download.is_whole:
            return [download.request()]
        if not all(each.is_whole for each in self._downloads.values()):
            return []
        states = tuple(each.state() for each in self._downloads.values())
        round_ = max(state.round for state in states)
        return self._merge(self.source, states, round_=round_, outer_step=max(s.outer_step for s in states))

    def _merge(
        self, source: RecoverySource, donors: tuple[DonorState, ...], *, round_: int, outer_step: int
    ) -> list[Action]:
        assert self.stage is not None, "recovery without a stage"
        self.state = RecoveryState.MERGING
        self.source = source
        self.target = (round_, outer_step)
        self._downloads = {}
        self._timers.clear("chunk")
        run = RunRecovery(stage=self.stage, source=source, donors=donors, round=round_, outer_step=outer_step)
        return [run]

    def on_done(self, ok: bool, now: float) -> list[Action]:
        """After RunRecovery. The caller announces the peer when the state is SERVING."""
        if self.state is not RecoveryState.MERGING:
            return []
        if not ok:
            return [Count(name="recovery-refused", detail=self.source.value, notable=True), *self._pause(now)]
        self.state = RecoveryState.SERVING
        self.fresh = self.source in (RecoverySource.MERGE, RecoverySource.COPY)
        self._failed.clear()
        self.own = (0, 0)
        return [Count(name="recovery-done", detail=f"stage {self.stage}: {self.source.value}", notable=True)]

    def resume_serving(self, stage: int) -> None:
        """The weights are in place already: from this machine's own checkpoint."""
        self.stage = stage
        self.state = RecoveryState.SERVING

    def on_peer_lost(self, peer: PeerId, outlook: Outlook, now: float) -> list[Action]:
        if self.state is RecoveryState.COLLECTING and peer in self._downloads:
            return self._next_donor(peer, "lost", outlook, now)
        return []

    def on_deadline(self, outlook: Outlook, now: float) -> list[Action]:
        due = self._timers.pop_due(now)
        if "retry" in due and self.state is RecoveryState.COLLECTING:
            assert self.stage is not None, "recovery without a stage"
            return self.begin(self.stage, outlook, now)
        if "chunk" in due:
            silent = [peer for peer, download in self._downloads.items() if not download.is_whole]
            return self._next_donor(silent[0], "silent", outlook, now) if silent else []
        return []

    def _next_donor(self, donor: PeerId, why: str, outlook: Outlook, now: float) -> list[Action]:
        assert self.stage is not None, "recovery without a stage"
        self._failed.add(donor)
        self._downloads = {}
        failed = Count(name="donor-failed", detail=f"{donor[-6:]} {why}", notable=True)
        return [failed, *self.begin(self.stage, outlook, now)]

    def _pause(self, now: float) -> list[Action]:
        """Everybody failed: forgive, wait for a better view, try again."""
        self._failed.clear()
        self.state = RecoveryState.COLLECTING
        self._downloads = {}
        self._timers.clear("chunk")
        self._timers.set("retry", now + RETRY_S)
        return []

    def check_invariants(self) -> None:
        waits = "chunk" in self._timers or "retry" in self._timers
        assert (self.state is RecoveryState.COLLECTING) == waits, (
            "collecting without a deadline, or the reverse"
        )


def _by_stage(infos: Iterable[PeerInfo]) -> list[list[PeerInfo]]:
    groups: dict[int | None, list[PeerInfo]] = {}
    for info in infos:
        groups.setdefault(info.stage, []).append(info)
    return list(groups.values())
