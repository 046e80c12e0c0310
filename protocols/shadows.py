"""Shadows: every peer keeps copies of the weights of the next stages, so that the last replica there may die.

A ring: the last stage's peers keep the first's, embedding and head included. With `shadow_depth` 2 two adjacent stages
may be lost at once: the second's copy was with the first, and with the stage before. A copy is an ordinary snapshot,
pulled from one replica every `interval` rounds and replaced as a whole; so weights of two replicas are never mixed, and
what is served to a peer that takes the stage over has the hash that its owner gave it. They are fast weights: slow ones
would be older by up to an outer step.

    IDLE -interval over, a replica in sight-> PULLING -whole-> IDLE
    PULLING -donor refuses, is silent or lost-> IDLE, and soon again

Invariant: what is held stays until another copy is whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import ceil

from protocols.actions import Action, Count, DonorState, Send
from protocols.admission import stage_parameters
from protocols.download import CHUNK_LIMIT_S, Download, newest_donor
from protocols.messages import WeightsChunk, WeightsKind, WeightsRequest
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, PeerInfo, SwarmView
from protocols.timers import Timers

TRAFFIC_SHARE_MAX = 0.025  # of what crosses a border of the stage, there and back
RETRY_ROUNDS = 5
BYTES_PER_WEIGHT = 4


def shadowed_stages(stage: int, spec: RunSpec) -> tuple[int, ...]:
    """Whose weights the peers of `stage` keep."""
    depth = min(spec.recovery.shadow_depth, spec.num_stages - 1)
    return tuple((stage + distance) % spec.num_stages for distance in range(1, depth + 1))


def holder_stages(stage: int, spec: RunSpec) -> tuple[int, ...]:
    """Who keeps the weights of `stage`; the nearest first, whose copies are asked for most often."""
    depth = min(spec.recovery.shadow_depth, spec.num_stages - 1)
    return tuple((stage - distance) % spec.num_stages for distance in range(1, depth + 1))


def interval_rounds(spec: RunSpec, stage: int) -> int:
    """`shadow_every`, or more where all copies of `stage` would cost too much beside one originator's work."""
    copies_bytes = BYTES_PER_WEIGHT * stage_parameters(spec, stage) * len(holder_stages(stage, spec))
    work_bytes = 2 * spec.boundary_bytes * spec.rounds.microbatches
    return max(spec.recovery.shadow_every, ceil(copies_bytes / (TRAFFIC_SHARE_MAX * work_bytes)))


class Shadows:
    """One peer's copies, of the stages after the one that it serves."""

    def __init__(self, me: PeerId, spec: RunSpec) -> None:
        self._me = me
        self._spec = spec
        self._held: dict[int, DonorState] = {}
        self._due: dict[
            int, int
        ] = {}  # stages that are followed: the round after which the next copy is pulled
        self._pulling: Download | None = None
        self._timers: Timers[str] = Timers()

    def next_deadline(self) -> float | None:
        return self._timers.next()

    def follow(self, own_stage: int, round_: int) -> None:
        """The own stage is served from now on. Peers of one stage do not all pull in the same round."""
        first = round_ + 1 + zlib.crc32(self._me.encode()) % RETRY_ROUNDS
        self._due = dict.fromkeys(shadowed_stages(own_stage, self._spec), first)
        self._held = {stage: held for stage, held in self._held.items() if stage in self._due}
        self._stop()

    def held(self, stage: int) -> DonorState | None:
        return self._held.get(stage)

    def on_round(self, round_: int, view: SwarmView, now: float) -> list[Action]:
        """Own round `round_` has begun: is a copy due? One at a time."""
        if self._pulling is not None:
            return []
        for stage, due in self._due.items():
            replicas = [info for info in view.replicas(stage) if info.peer != self._me]
            if due <= round_ and replicas:
                self._due[stage] = round_ + RETRY_ROUNDS  # if what comes is not whole
                return [self._pull(stage, replicas, now)]
        return []

    def _pull(self, stage: int, replicas: Sequence[PeerInfo], now: float) -> Send:
        self._pulling = Download(newest_donor(replicas, self._me), WeightsKind.WEIGHTS, stage)
        self._timers.set("chunk", now + CHUNK_LIMIT_S)
        return self._pulling.request()

    def on_chunk(self, sender: PeerId, chunk: WeightsChunk, now: float) -> list[Action]:
        pulling = self._pulling
        if pulling is None or sender != pulling.donor.peer or chunk.stage != pulling.stage:
            return []
        if chunk.count == 0 or chunk.packet is None or chunk.kind is not pulling.kind:
            self._stop()
            return [Count(name="shadow-refused", detail=sender[-6:])]
        if not pulling.expects(chunk):
            return []
        pulling.add(chunk)
        self._timers.set("chunk", now + CHUNK_LIMIT_S)
        if not pulling.is_whole:
            return [pulling.request()]
        self._held[pulling.stage] = held = pulling.state()
        self._due[pulling.stage] += interval_rounds(self._spec, pulling.stage) - RETRY_ROUNDS
        self._stop()
        return [Count(name="shadow-kept", detail=f"stage {held.stage}: round {held.round}")]

    def on_request(self, sender: PeerId, request: WeightsRequest) -> Send:
        """From a peer that takes the stage over."""
        held = self.held(request.stage)
        if held is None or not 0 <= request.index < len(held.packets):
            return Send(to=sender, message=request.refusal())
        chunk = WeightsChunk(
            kind=request.kind,
            stage=held.stage,
            snapshot=f"{held.donor[-8:]}-{held.round}",
            index=request.index,
            count=len(held.packets),
            sha256=held.sha256,
            round=held.round,
            outer_step=held.outer_step,
            packet=held.packets[request.index],
        )
        return Send(to=sender, message=chunk)

    def on_peer_lost(self, peer: PeerId) -> None:
        if self._pulling is not None and self._pulling.donor.peer == peer:
            self._stop()

    def on_deadline(self, now: float) -> None:
        if self._timers.pop_due(now):
            self._stop()

    def _stop(self) -> None:
        self._pulling = None
        self._timers.clear("chunk")

    def check_invariants(self) -> None:
        assert (self._pulling is not None) == ("chunk" in self._timers), "a pull without a deadline"
        assert self._held.keys() <= self._due.keys(), "a shadow of a stage that is not followed"
