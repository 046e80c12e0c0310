"""The swarm's model on demand: the weights of every stage from its live replicas, and their mean.

The reader is no peer. It looks at the table, asks replicas for their weights as a joiner does, and goes; nobody waits
for it. Each replica is streamed once and the mean is taken here, in float64. That is exact and needs no word among
volunteers: averaging in the swarm along a hypercube would end in the same numbers, but only after log2 n exchanges of
every replica, in step with one another, which a swarm without barriers has no other use for.
Invariant: what comes is counted only if it is what its donor hashed, finite and of the run's shapes.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from dht.discovery import Discovery
from dht.identity import Identity, friendly_name
from dht.node import CannotReachSwarm, DhtNode
from dht.records import PeerRecord
from peer.compute.snapshot import HEADER_BYTES_MAX, Shapes, unpack
from peer.config import HostConfig, read_initial_peers
from peer.replicas import (
    DonorFailed,
    Mean,
    StageMissing,
    StagePlan,
    choose,
    num_bytes,
    rank,
    stage_shapes,
    take_in,
)
from peer.transport import MessageRefused, PeerUnreachable, Transport
from protocols.actions import DonorState
from protocols.download import Download
from protocols.messages import Message, WeightsChunk, WeightsKind
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId

CHUNK_LIMIT_S = 60.0  # a donor's silence: a poor home line needs half of it for a chunk
REFUSED_PAUSE_S = 15.0  # who refuses may hold snapshots for others, whose leases end in half a minute
PASSES_MAX = 3
DOWNLOADS_MAX = 4  # at once: what is under way has to fit in memory
UNREAD_CHUNKS_MAX = 2  # of one donor; it is never asked for two
LOOKS_MIN, LOOKS_MAX = 2, 8  # at the table: a part of it may answer late
LOOK_PAUSE_S = 1.0

_T = TypeVar("_T")
Send = Callable[[PeerId, Message], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """A replica whose weights came whole; round and outer step are those of its snapshot."""

    peer: PeerId
    round: int
    outer_step: int
    num_bytes: int
    seconds: float

    @property
    def name(self) -> str:
        return friendly_name(self.peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """A stage of the model. `single`: the weights of the best replica alone, where they were to be kept."""

    stage: int
    weights: dict[str, Tensor]
    spread: float
    came: tuple[Came, ...]
    failed: Mapping[PeerId, str]  # why
    single: dict[str, Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far one donor is; `problem`: why it will not do."""

    stage: int
    donor: PeerId
    num_bytes: int = 0
    share: float = 0.0
    seconds: float = 0.0
    problem: str = ""


Report = Callable[[Progress], None]


# ---- asking --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Work:
    """What is there of one stage."""

    plan: StagePlan
    shapes: Shapes
    waiting: deque[PeerRecord]
    refused: list[PeerRecord] = field(default_factory=list[PeerRecord])
    mean: Mean = field(default_factory=Mean)
    came: list[Came] = field(default_factory=list[Came])
    failed: dict[PeerId, str] = field(default_factory=dict[PeerId, str])
    single: tuple[tuple[float, ...], dict[str, Tensor]] | None = None
    adding: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def num_missing(self) -> int:
        return self.plan.wanted - len(self.came)


class Collector:
    """Asks replicas by `send`; what they answer comes in by `on_message`. All of it in one event loop."""

    def __init__(
        self,
        spec: RunSpec,
        send: Send,
        report: Report,
        *,
        keep_single: bool = False,
        downloads_max: int = DOWNLOADS_MAX,
        chunk_limit_s: float = CHUNK_LIMIT_S,
        refused_pause_s: float = REFUSED_PAUSE_S,
    ) -> None:
        self._spec, self._send, self._report = spec, send, report
        self._keep_single = keep_single
        self._chunk_limit_s, self._refused_pause_s = chunk_limit_s, refused_pause_s
        self._room = asyncio.Semaphore(downloads_max)
        self._chunks: dict[PeerId, asyncio.Queue[WeightsChunk | None]] = {}  # None: its donor is lost

    def on_message(self, sender: PeerId, message: Message) -> None:
        chunks = self._chunks.get(sender)
        if isinstance(message, WeightsChunk) and chunks is not None and chunks.qsize() < UNREAD_CHUNKS_MAX:
            chunks.put_nowait(message)

    def on_unreachable(self, peer: PeerId) -> None:
        if peer in self._chunks:
            self._chunks[peer].put_nowait(None)

    async def collect(self, plans: Iterable[StagePlan]) -> tuple[StageWeights, ...]:
        """All stages, or StageMissing."""
        return tuple(await _together([self._stage(plan) for plan in plans]))

    async def _stage(self, plan: StagePlan) -> StageWeights:
        work = _Work(plan, stage_shapes(self._spec, plan.stage), deque(plan.replicas))
        for number in range(PASSES_MAX):
            if number:
                await asyncio.sleep(self._refused_pause_s)
                work.waiting, work.refused = deque(work.refused), []
            await _together([self._take(work) for _ in range(work.num_missing)])
            if not work.refused or not work.num_missing:
                break
        if not work.came:
            why = "; ".join(f"{friendly_name(peer)} {reason}" for peer, reason in work.failed.items())
            raise StageMissing(f"no replica of stage {plan.stage} gave its weights: {why}")
        return StageWeights(
            stage=plan.stage,
            weights=work.mean.weights(),
            spread=work.mean.spread(),
            came=tuple(sorted(work.came, key=lambda one: one.peer)),
            failed=work.failed,
            single=work.single[1] if work.single is not None else None,
        )

    async def _take(self, work: _Work) -> None:
        """The weights of one of the replicas that wait; when it fails, of the next."""
        while work.waiting:
            donor = work.waiting.popleft()
            try:
                async with self._room:
                    await self._add(work, donor, *await self._fetch(work, donor))
            except DonorFailed as failure:
                work.failed[donor.peer] = failure.reason
                if failure.again:
                    work.refused.append(donor)
                self._report(Progress(stage=work.plan.stage, donor=donor.peer, problem=failure.reason))
            else:
                work.failed.pop(donor.peer, None)
                return

    async def _fetch(self, work: _Work, donor: PeerRecord) -> tuple[DonorState, float]:
        """Its state, chunk by chunk, and the seconds that took."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        stage, shapes = work.plan.stage, work.shapes
        bytes_max = HEADER_BYTES_MAX + 4 * sum(map(math.prod, shapes.values()))
        download = Download(donor.info, WeightsKind.WEIGHTS, stage)
        self._chunks[donor.peer] = asyncio.Queue()
        try:
            while not download.is_whole:
                await asyncio.wait_for(self._next_chunk(download, bytes_max), self._chunk_limit_s)
                assert download.first is not None, "a chunk came"
                self._report(
                    Progress(
                        stage=stage,
                        donor=donor.peer,
                        num_bytes=num_bytes(download),
                        share=len(download.packets) / download.first.count,
                        seconds=loop.time() - began_s,
                    )
                )
        except asyncio.TimeoutError:
            raise DonorFailed(f"was silent for {self._chunk_limit_s:g} s") from None
        except (PeerUnreachable, MessageRefused) as error:
            raise DonorFailed(f"is out of reach ({error.reason})") from None
        finally:
            del self._chunks[donor.peer]
        return download.state(), loop.time() - began_s

    async def _next_chunk(self, download: Download, bytes_max: int) -> None:
        request = download.request()
        chunks = self._chunks[request.to]
        await self._send(request.to, request.message)
        while True:
            chunk = await chunks.get()
            if chunk is None:
                raise DonorFailed("was lost on the way")
            if take_in(download, chunk, bytes_max):
                return

    async def _add(self, work: _Work, donor: PeerRecord, state: DonorState, seconds: float) -> None:
        weights = await asyncio.to_thread(unpack, state.packets, state.sha256, work.shapes)
        if weights is None:
            raise DonorFailed("sent something else than its hash or the run says")
        async with work.adding:
            await asyncio.to_thread(work.mean.add, weights)
        order = (-state.round, rank(donor)[1])
        if self._keep_single and (work.single is None or order < work.single[0]):
            work.single = (order, weights)
        size = sum(packet.num_bytes for packet in state.packets)
        work.came.append(
            Came(
                peer=donor.peer,
                round=state.round,
                outer_step=state.outer_step,
                num_bytes=size,
                seconds=seconds,
            )
        )


async def _together(works: Iterable[Coroutine[None, None, _T]]) -> list[_T]:
    """The results of all; when one fails, the others are given up."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- in a live swarm -----------------------------------------------------------------------------


async def collect(
    spec: RunSpec,
    host: HostConfig,
    take: str,
    report: Report,
    *,
    keep_single: bool = False,
    downloads_max: int = DOWNLOADS_MAX,
) -> tuple[StageWeights, ...]:
    """Join the table of the run through `host.initial_peers`, fetch what `take` says, and go.

    Under an identity for this one visit: this machine's own may be in use by a peer that serves.
    """
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        node = await DhtNode.start(
            Identity.load_or_create(Path(folder) / "identity.key"),
            host_maddrs=("/ip4/127.0.0.1/tcp/0",),
            initial_peers=read_initial_peers(host.initial_peers),
            run_ids=[spec.run_id],
            use_relay=host.use_relay,
            startup_timeout_s=host.startup_timeout_s,
        )
        try:
            plans = choose(await _look(node, spec), spec.num_stages, take)
            return await _fetch_all(node, spec, plans, report, keep_single, downloads_max)
        finally:
            await node.close()


async def _look(node: DhtNode, spec: RunSpec) -> list[PeerRecord]:
    """The records of the run's peers; looked for again while a stage seems to have none."""
    discovery = Discovery(node, spec, node.peer_id, random.Random(node.peer_id))
    has_answered = False
    for number in range(LOOKS_MAX):
        view = await discovery.poll()
        has_answered |= view is not None
        if view is not None and number + 1 >= LOOKS_MIN and all(map(view.replicas, range(spec.num_stages))):
            break
        await asyncio.sleep(LOOK_PAUSE_S)
    if not has_answered:
        raise CannotReachSwarm("joined the table, but it does not answer: is the network up?")
    return list(discovery.records.values())


async def _fetch_all(
    node: DhtNode,
    spec: RunSpec,
    plans: Sequence[StagePlan],
    report: Report,
    keep_single: bool,
    downloads_max: int,
) -> tuple[StageWeights, ...]:
    collector = Collector(
        spec,
        lambda to, message: transport.send(to, message),
        report,
        keep_single=keep_single,
        downloads_max=downloads_max,
    )
    transport = await Transport.start(
        node.p2p,
        spec,
        on_message=collector.on_message,
        on_unreachable=collector.on_unreachable,
        count=lambda name, value: None,
    )
    try:
        return await collector.collect(plans)
    finally:
        await transport.close()
