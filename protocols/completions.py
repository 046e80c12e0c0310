"""From a finished job to the machine that asked for it, and from a failed one to whoever must know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.actions import Action, Count
from protocols.events import (
    AccessMeasured,
    BackwardDone,
    BatchReady,
    ComputeFailed,
    ForwardDone,
    InnerStepDone,
    LossDone,
    PlanMade,
    StagesWeighed,
)
from protocols.stage_changes import on_weighed

if TYPE_CHECKING:
    from protocols.core import PeerCore


def on_compute(
    core: PeerCore, event: ForwardDone | LossDone | BackwardDone | BatchReady, now: float
) -> list[Action]:
    mine = core.originator if event.key.originator == core.me else None
    match event:
        case ForwardDone():
            core.costs.measured_forward(event.seconds)
            if mine is not None:
                return mine.on_forward_done(event.key, event.packet, now)
            return core.relay.on_forward_done(event.key, event.packet)
        case BackwardDone():
            core.num_backwards += 1
            core.costs.measured_backward(event.seconds)
            if mine is not None:
                return mine.on_backward_done(event.key)
            return core.relay.on_backward_done(event.key, event.packet)
        case LossDone():
            return mine.on_loss_done(event.key, event.loss, event.packet) if mine is not None else []
        case BatchReady():
            return mine.on_batch_ready(event) if mine is not None else []


def on_insight(core: PeerCore, event: AccessMeasured | PlanMade | StagesWeighed, now: float) -> list[Action]:
    """What was measured or planned beside the work."""
    match event:
        case AccessMeasured(upload_bytes_per_s=upload, download_bytes_per_s=download):
            core.costs.measured_access(upload, download)
            return []
        case PlanMade():
            return core.originator.planner.group.on_made(event) if core.originator is not None else []
        case StagesWeighed():
            return on_weighed(core, event, now)


def on_compute_failed(core: PeerCore, event: ComputeFailed, now: float) -> list[Action]:
    actions: list[Action] = [
        Count(name="compute-failed", detail=f"{event.job}: {event.reason}", notable=True)
    ]
    if event.key is not None:
        if core.originator is not None and event.key.originator == core.me:
            return actions + core.originator.on_compute_failed(event.key, core.visible, now)
        return actions + core.relay.on_compute_failed(event.key)
    if event.job == "RunInnerStep":
        return actions + core.on_inner_step_done(
            InnerStepDone(round=core.ledger.round + 1, grad_norm=0.0), now
        )
    if event.job in ("PrepareOuter", "RunOuterStep") and core.outer is not None:
        return actions + core.outer.on_failed(core.visible, now)
    if event.job == "RunRecovery":
        return actions + core.recovery.on_done(False, now)
    if event.job == "TakeSnapshot":
        core.donor.on_failed()
    return actions
