"""One peer, from start to leave: identity, table, transport, compute, core; then wait; then a clean departure.

Start order matters: nothing is announced before the transport answers, nothing is served before the weights are in
place. Read `run_peer` from top to bottom.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dht.discovery import Discovery
from dht.heartbeat import Heartbeat
from dht.identity import Identity, IdentityLock, friendly_name
from dht.node import CannotReachSwarm, DhtNode
from dht.records import PeerRecord
from peer import __version__, control
from peer.checkpoint import CheckpointError, CheckpointMeta, load_latest, save
from peer.compute.device import pick_device
from peer.compute.stage_runtime import StageRuntime
from peer.compute.worker import ComputeWorker
from peer.config import HostConfig, listen_maddrs, read_initial_peers
from peer.data import TokenData, load_data
from peer.driver import Driver, checkpoint_due, stage_folder
from peer.liveness import Liveness
from peer.metrics import FlightRecorder
from peer.status import PeerStatus
from peer.tracker import Tracker
from peer.transport import Transport
from protocols.actions import Announce
from protocols.core import PeerCore
from protocols.events import (
    LeaveRequested,
    MessageReceived,
    PauseRequested,
    ResumeRequested,
    SendFailed,
    Started,
    ViewChanged,
)
from protocols.messages import Message
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, PeerInfo, SwarmView

logger = logging.getLogger(__name__)

FIRST_VIEW_TRIES = 10
# The table may have died with us; 4 s went to draining, and a leave may take 15 in all.
WITHDRAW_LIMIT_S = 2.0


class PeerDaemon:
    """The running peer, as the control plane sees it."""

    def __init__(self, spec: RunSpec, config: HostConfig, identity: Identity) -> None:
        self.spec = spec
        self.config = config
        self.identity = identity
        self.core = PeerCore(identity.peer_id, spec, config.stage)
        self.tracker = Tracker(spec.tokens_per_microbatch)
        self.device = pick_device(config.device)
        self.addresses: tuple[str, ...] = ()
        self.exit_code = 0
        self._runtime: StageRuntime | None = None
        self._data: TokenData | None = None
        self._started_unix_s = time.time()
        self._saving: asyncio.Task[Path] | None = None
        self.node: DhtNode
        self.driver: Driver
        self.heartbeat: Heartbeat
        self.discovery: Discovery

    # ---- what the control plane asks (`control.Controllable`) ----

    def status(self) -> PeerStatus:
        core, originator = self.core, self.core.originator
        info = self._info(core.record())
        others = tuple(known for known in core.view.peers if known.peer != info.peer)
        return PeerStatus(
            peer=info.peer,
            name=friendly_name(info.peer),
            run_id=self.spec.run_id,
            stage=info.stage,
            state=info.state,
            device=str(self.device),
            paused=core.paused,
            round=core.ledger.round,
            total_rounds=self.spec.rounds.total_rounds,
            outer_step=info.outer_step,
            loss=self.tracker.loss,
            validation=self.tracker.validation(),
            tokens=self.tracker.tokens,
            tokens_per_s=self.tracker.tokens_per_s,
            num_in_flight=originator.num_in_flight if originator is not None else 0,
            queue_depth=core.relay.num_stashes + core.relay.num_waiting,
            counters=self._counters(),
            addresses=self.addresses,
            peers=tuple(sorted((info, *others), key=lambda known: known.peer)),
            uptime_s=time.time() - self._started_unix_s,
            events=tuple(self.tracker.events),
            apart=self.tracker.apart,
            cosine=self.tracker.cosine,
            outer_wait_s=self.tracker.outer_wait_s,
            planned_round_s=originator.planner.group.makespan_s if originator is not None else 0.0,
        )

    def _counters(self) -> dict[str, float]:
        refusals = {f"dht_refused_{reason}": n for reason, n in self.discovery.refusals.items()}
        return {**self.tracker.counters, **refusals, "dht_store_failures": self.heartbeat.num_store_failures}

    def request_leave(self) -> None:
        self.driver.post(LeaveRequested())

    def request_pause(self) -> None:
        self.driver.post(PauseRequested())

    def request_resume(self) -> None:
        self.driver.post(ResumeRequested())

    async def export_stage(self, folder: Path | None) -> Path:
        """A checkpoint now; one that is being written already is waited for."""
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save(folder))
        return await self._saving

    # ---- what the driver asks ----

    def announce(self, action: Announce) -> None:
        record = PeerRecord(
            info=self._info(action),
            software_version=__version__,
            maddrs=self.addresses[:4],
            tokens_trained=self.tracker.tokens,
            loss=self.tracker.loss,
            tokens_per_s=self.tracker.tokens_per_s,
        )
        self.heartbeat.announce(record)

    def _info(self, said: Announce) -> PeerInfo:
        return PeerInfo(
            peer=self.identity.peer_id,
            stage=said.stage,
            state=said.state,
            round=said.round,
            outer_step=said.outer_step,
            slots=self.spec.rounds.slots,
            **said.measured.fields(),
            grad_norm=said.grad_norm,
            started_unix_s=self._started_unix_s,
            fresh=said.fresh,
        )

    async def prepare_stage(self, stage: int) -> None:
        """Have a runtime for `stage` in the worker, and the data when it originates."""
        if self._runtime is None or self._runtime.stage != stage:
            self._runtime = await asyncio.to_thread(StageRuntime, self.spec, stage, device=self.device)
            self.driver.worker.replace_runtime(self._runtime)
        if stage == 0 and self._data is None:
            self._data = await asyncio.to_thread(load_data, self.spec, self.config.cache_dir)

    def data(self) -> TokenData:
        assert self._data is not None, "a batch before the data"
        return self._data

    def on_round(self, round_: int) -> None:
        if checkpoint_due(round_, self.config.checkpoint_every) and (
            self._saving is None or self._saving.done()
        ):
            self._saving = asyncio.create_task(self._save(None))
            self._saving.add_done_callback(_log_failed_save)

    async def _save(self, folder: Path | None) -> Path:
        runtime = self._runtime
        if runtime is None or self.core.stage is None:
            raise CheckpointError("this peer has no weights yet")
        tensors, extra = await self.driver.worker.call(runtime.state_for_checkpoint)
        originator = self.core.originator
        meta = CheckpointMeta(
            spec=self.spec,
            stage=runtime.stage,
            round=int(extra.pop("round", self.core.ledger.round)),
            outer_step=int(extra.pop("outer_step", 0)),
            counter=originator.next_counter if originator is not None else 0,
            schema_hash=runtime.schema,
            runtime=extra,
        )
        target = folder or stage_folder(self.config.checkpoint_dir, self.spec.run_id)
        return await asyncio.to_thread(save, target, tensors, meta, self.config.checkpoints_kept)

    # ---- start ----

    async def resume(self) -> Started | None:
        """The weights of this machine's newest checkpoint of the run, if wanted and there."""
        folder = stage_folder(self.config.checkpoint_dir, self.spec.run_id)
        if not self.config.resume or not folder.exists():
            return None
        found = await asyncio.to_thread(load_latest, folder, run_id=self.spec.run_id, stage=self.config.stage)
        if found is None:
            return None
        tensors, meta = found
        self.core.stage = meta.stage
        await self.prepare_stage(meta.stage)
        runtime = self._runtime
        assert runtime is not None, "prepare_stage makes it"
        state = {**meta.runtime, "round": meta.round, "outer_step": meta.outer_step}
        await self.driver.worker.call(lambda: runtime.load_checkpoint(tensors, state))
        logger.info("resumed stage %d at round %d from %s", meta.stage, meta.round, folder)
        return Started(
            view=SwarmView(),
            resumed_round=meta.round,
            resumed_outer_step=meta.outer_step,
            resumed_counter=meta.counter,
        )

    async def first_view(self) -> SwarmView:
        for _ in range(FIRST_VIEW_TRIES):
            view = await self.discovery.poll()
            if view is not None:
                return view
            await asyncio.sleep(self.spec.liveness.view_poll_s / 4)
        raise CannotReachSwarm("joined the table, but it does not answer: is the network up?")

    async def follow_views(self) -> None:
        async for view in self.discovery.views():
            self.driver.post(ViewChanged(view=view))

    def on_engine_dead(self, reason: str) -> None:
        """Without the network there is no peer: leave at once; whoever supervises us starts another."""
        logger.error("the network daemon is lost (%s): this peer stops; start it again", reason)
        self.exit_code = 1
        self.driver.left.set()


async def run_peer(
    spec: RunSpec, config: HostConfig, *, on_ready: Callable[[PeerDaemon], None] | None = None
) -> int:
    """Run one peer until it has left; the exit code. `on_ready` is called once the control plane answers."""
    if config.threads:
        torch.set_num_threads(config.threads)
    async with AsyncExitStack() as stack:
        identity = Identity.load_or_create(config.identity_file)
        lock = IdentityLock(config.identity_file)
        lock.acquire()
        stack.callback(lock.release)
        daemon = PeerDaemon(spec, config, identity)
        await _start(daemon, stack)
        if on_ready is not None:
            on_ready(daemon)
        await daemon.driver.left.wait()
        await _say_goodbye(daemon)
    return daemon.exit_code


async def _start(daemon: PeerDaemon, stack: AsyncExitStack) -> None:
    spec, config, me = daemon.spec, daemon.config, daemon.identity.peer_id
    daemon.node = await DhtNode.start(
        daemon.identity,
        host_maddrs=listen_maddrs(config),
        announce_maddrs=config.announce_maddrs,
        initial_peers=read_initial_peers(config.initial_peers),
        run_ids=[spec.run_id],
        use_relay=config.use_relay,
        auto_nat=config.auto_nat,
        startup_timeout_s=config.startup_timeout_s,
        on_dead=daemon.on_engine_dead,
    )
    stack.push_async_callback(daemon.node.close)
    daemon.addresses = await daemon.node.visible_maddrs()
    rng = random.Random(me)  # spreads timers; no decision hangs on it
    daemon.discovery = Discovery(daemon.node, spec, me, rng)
    daemon.heartbeat = Heartbeat(daemon.node, me, spec, rng)
    daemon.driver = await _make_driver(daemon, stack)
    resumed = await daemon.resume()
    view = await daemon.first_view()
    handle = await control.attach(daemon, config.runtime_dir)
    stack.push_async_callback(handle.close)
    liveness = Liveness(daemon.core, daemon.driver.transport, daemon.driver.post)
    for work in (daemon.heartbeat.run(), daemon.follow_views(), liveness.run()):
        stack.push_async_callback(_cancel, asyncio.create_task(work))
    daemon.driver.post(_with_view(resumed, view))


async def _make_driver(daemon: PeerDaemon, stack: AsyncExitStack) -> Driver:
    inbox: list[
        Any
    ] = []  # of what arrives between the transport's start and the driver's: nothing may be lost
    deliver: list[Callable[[Any], None]] = [inbox.append]
    transport = await Transport.start(
        daemon.node.p2p,
        daemon.spec,
        on_message=lambda sender, message: deliver[0](_received(sender, message)),
        on_unreachable=lambda peer: deliver[0](SendFailed(peer=peer)),
        count=lambda name, amount: _add(daemon.tracker, name, amount),
    )
    stack.push_async_callback(transport.close)
    worker = ComputeWorker(emit=lambda event: driver.post_threadsafe(event))
    stack.callback(worker.close, 2.0)
    recorder = (
        FlightRecorder(daemon.config.data_dir / "flight.jsonl") if daemon.config.flight_recorder else None
    )
    driver = Driver(
        core=daemon.core,
        transport=transport,
        worker=worker,
        discovery=daemon.discovery,
        tracker=daemon.tracker,
        announce=daemon.announce,
        prepare_stage=daemon.prepare_stage,
        data=daemon.data,
        on_round=daemon.on_round,
        recorder=recorder,
    )
    stack.callback(driver.close)
    deliver[0] = driver.post
    for event in inbox:
        driver.post(event)
    return driver


async def _say_goodbye(daemon: PeerDaemon) -> None:
    """Withdraw the record, keep the weights."""
    if daemon.exit_code == 0:
        await asyncio.wait({asyncio.create_task(daemon.heartbeat.withdraw())}, timeout=WITHDRAW_LIMIT_S)
    if daemon.config.checkpoint_every > 0 and daemon.core.ledger.round > 0:
        try:
            await daemon.export_stage(None)
        except CheckpointError as error:
            logger.error("%s", error)


def _received(sender: PeerId, message: Message) -> MessageReceived:
    return MessageReceived(sender=sender, message=message)


def _add(tracker: Tracker, name: str, amount: float) -> None:
    tracker.counters[name] += amount  # type: ignore[assignment]  # byte counts are whole numbers too


def _with_view(resumed: Started | None, view: SwarmView) -> Started:
    return Started(view=view) if resumed is None else replace(resumed, view=view)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _log_failed_save(task: asyncio.Task[Path]) -> None:
    """A full disk costs the checkpoint, not the training."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("checkpoint not written: %s", error)
