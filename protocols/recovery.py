"""Getting a stage's weights: first start, catch-up of a joiner, adoption of an empty stage.

    JOINING -view-> COLLECTING (sibling or neighbours alive) | MERGING (nobody has trained: initial weights)
    SERVING -stage seen empty K times, direct calls failed, claim won-> LEAVING -drained-> COLLECTING
    COLLECTING -all donors' states whole-> MERGING -RecoveryDone-> SERVING
    COLLECTING -donor silent, refusing or gone-> COLLECTING with the next donor, or again after a pause

Where nobody serves the stage any more, its weights come from the first of these: the own checkpoint, the own shadow,
another's shadow (`protocols.shadows`), the mix of both neighbours, a copy of the one there is; initial ones only where
nobody ever had others. Invariant: the weights change only in MERGING, by one job that does all or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from protocols.actions import (
    Action,
    Count,
    DonorState,
    RecoverySource,
    RunRecovery,
)
from protocols.download import CHUNK_LIMIT_S, Download, newest_donor
from protocols.messages import WeightsChunk, WeightsKind
from protocols.outlook import Outlook
from protocols.run_spec import RunSpec
from protocols.shadows import holder_stages
from protocols.swarm import PeerId, PeerInfo, PeerState, SwarmView
from protocols.timers import Timers

RETRY_S = 2.0


class RecoveryState(Enum):
    JOINING = "joining"
    SERVING = "serving"
    LEAVING = "leaving"
    COLLECTING = "collecting"
    MERGING = "merging"


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
        self.shadow: DonorState | None = None  # own copy of the stage
        self._downloads: dict[PeerId, Download] = {}
        self._failed: set[tuple[PeerId, WeightsKind]] = set()
        self._timers: Timers[str] = Timers()

    def next_deadline(self) -> float | None:
        return self._timers.next()

    def begin(self, stage: int, outlook: Outlook, now: float) -> list[Action]:
        """Get weights for `stage` from the best source in sight; initial ones only where nobody ever had others."""
        self.stage = stage
        self.state = RecoveryState.COLLECTING
        self._timers.clear("chunk")
        self._timers.clear("retry")
        siblings = self._willing(self._siblings(stage, outlook.visible), WeightsKind.FULL)
        if siblings:
            donor = newest_donor(siblings, self._me)
            return self._collect(RecoverySource.CATCH_UP, [donor], WeightsKind.FULL, now)
        if self.own[0] > 0:  # what those ahead had is gone with them, once their records lapse
            return self._pause(now) if self._siblings(stage, outlook.view) else self._keep()
        return self._from_a_shadow(stage, outlook, now) or self._from_neighbours(stage, outlook, now)

    def _from_a_shadow(self, stage: int, outlook: Outlook, now: float) -> list[Action]:
        """The own copy, or one of those who keep the stage's; nothing: there is none."""
        if self.shadow is not None:
            return self._restore(self.shadow, outlook)
        keepers = [self._siblings(beside, outlook.visible) for beside in holder_stages(stage, self._spec)]
        trained = [info for infos in keepers for info in infos if info.round > 0]
        for holder in self._willing(trained, WeightsKind.SHADOW):
            return self._collect(RecoverySource.SHADOW, [holder], WeightsKind.SHADOW, now)
        return []

    def _restore(self, shadow: DonorState, outlook: Outlook) -> list[Action]:
        """Old weights for the present round: those who serve have gone on."""
        round_, outer_step = _reached(outlook.view)
        return self._merge(
            RecoverySource.SHADOW, (shadow,), round_=max(round_, shadow.round),
            outer_step=max(outer_step, shadow.outer_step),
        )  # fmt: skip

    def _from_neighbours(self, stage: int, outlook: Outlook, now: float) -> list[Action]:
        neighbours = self._willing(self._neighbours(stage, outlook.visible), WeightsKind.WEIGHTS)
        if not neighbours:
            known = self._siblings(stage, outlook.view) or self._trained(stage, outlook.view)
            if known:
                return self._pause(now)
            round_, outer_step = _reached(outlook.view)  # not 0 where a first stage died with all who knew it
            return self._merge(RecoverySource.INITIAL, (), round_=round_, outer_step=outer_step)
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

    def _trained(self, stage: int, view: SwarmView) -> list[PeerInfo]:
        """Of all middle stages: those between the nearest one and `stage` are adopted first, one after another."""
        middle = range(1, self._spec.num_stages) if stage else ()
        return [info for each in middle for info in self._siblings(each, view) if info.round > 0]

    def _willing(self, infos: list[PeerInfo], kind: WeightsKind) -> list[PeerInfo]:
        return [info for info in infos if (info.peer, kind) not in self._failed]

    def _collect(
        self, source: RecoverySource, donors: list[PeerInfo], kind: WeightsKind, now: float
    ) -> list[Action]:
        self.source = source
        self._downloads = {}
        for donor in donors:
            stage = self.stage if kind is WeightsKind.SHADOW else donor.stage
            assert stage is not None, "a serving peer has a stage"
            self._downloads[donor.peer] = Download(donor, kind, stage)
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
        if self.source is RecoverySource.SHADOW:
            return self._restore(states[0], outlook)
        round_ = max(state.round for state in states)
        return self._merge(self.source, states, round_=round_, outer_step=max(s.outer_step for s in states))

    def _merge(
        self, source: RecoverySource, donors: tuple[DonorState, ...], *, round_: int, outer_step: int
    ) -> list[Action]:
        assert self.stage is not None, "recovery without a stage"
        self.state = RecoveryState.MERGING
        self.source = source
        self.target = (round_, outer_step)
        if source is RecoverySource.SHADOW:  # once: it may be bad
            self.shadow = None
            self._failed.update((peer, WeightsKind.SHADOW) for peer in self._downloads)
        self._downloads = {}
        self._timers.clear("chunk")
        run = RunRecovery(stage=self.stage, source=source, donors=donors, round=round_, outer_step=outer_step)
        return [run]

    def on_done(self, ok: bool, now: float) -> list[Action]:
        """After RunRecovery. The caller announces the peer when the state is SERVING."""
        if self.state is not RecoveryState.MERGING:
            return []
        if not ok:
            refused = Count(name="recovery-refused", detail=self.source.value, notable=True)
            # a bad shadow stays bad: its keeper is not asked again before all others
            return [refused, *self._pause(now, forgive=self.source is not RecoverySource.SHADOW)]
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
        self._failed.add((donor, self._downloads[donor].kind))
        self._downloads = {}
        failed = Count(name="donor-failed", detail=f"{donor[-6:]} {why}", notable=True)
        return [failed, *self.begin(self.stage, outlook, now)]

    def _pause(self, now: float, *, forgive: bool = True) -> list[Action]:
        """Everybody failed: forgive, wait for a better view, try again."""
        if forgive:
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


def _reached(view: SwarmView) -> tuple[int, int]:
    """Round and outer step of those who serve."""
    serving = [info for info in view.peers if info.state is PeerState.SERVING]
    return max((info.round for info in serving), default=0), max((s.outer_step for s in serving), default=0)
