"""Taking a stage up, and giving it up: first start, adoption of an empty one, starting over when left behind.

What happens in between is the machines' affair; here their state is begun and ended together. Invariant: while the
weights are being replaced nothing is held that was computed with the old ones.
"""

from __future__ import annotations

from math import isinf
from typing import TYPE_CHECKING

from protocols.actions import Action, Count, WeighStages
from protocols.events import ClaimsRead, RecoveryDone, StagesWeighed, Started
from protocols.originator import Originator
from protocols.outer_sync import OuterSync
from protocols.placement import choose_stage
from protocols.recovery import RecoveryState
from protocols.swarm import SwarmView

if TYPE_CHECKING:
    from protocols.core import PeerCore

DRAIN_LIMIT_S = 4.0  # who gives up a stage, or leaves, waits so long for what it still holds
LOOKS_BEFORE_CHOICE = 2  # at the table, by a joiner without a stage
FRESH_ROUNDS = 30  # a rebuilt stage calls itself fresh for so many rounds


def on_started(core: PeerCore, event: Started, now: float) -> list[Action]:
    core.outlook.see(event.view)
    core.next_counter = event.resumed_counter
    if core.stage is None:
        core.looks_left = LOOKS_BEFORE_CHOICE
        return []
    if event.resumed_round is not None and not _is_ahead(core, event.view, event.resumed_round):
        core.recovery.resume_serving(core.stage)
        return _serve(core, event.resumed_round, event.resumed_outer_step)
    if event.resumed_round is not None:  # those ahead may be dead: then our checkpoint is all there is
        core.recovery.own = (event.resumed_round, event.resumed_outer_step)
    return core.recovery.begin(core.stage, core.outlook, now)


def look_for_stage(core: PeerCore, now: float) -> list[Action]:
    """Announced as joining, we look at the table again, so that others who join now are seen, and then choose."""
    core.looks_left -= 1
    if core.looks_left > 0:
        return []
    problems = core.moves.joiners_problems(core.view)
    if problems is not None:
        return [WeighStages(problems=problems)]
    return _take_stage(core, choose_stage(core.view, core.spec.num_stages, core.me), now)


def on_weighed(core: PeerCore, event: StagesWeighed, now: float) -> list[Action]:
    """Where this peer helps the plan most: as a joiner it goes there, as a serving peer it may."""
    if core.stage is not None:
        return core.moves.on_weighed(event, core.stage, now)
    if core.relay.draining:  # told to leave while the answer was on its way
        return []
    stage, seconds = min(event.seconds, key=lambda weighed: (weighed[1], weighed[0]))
    if isinf(seconds):
        stage = choose_stage(core.view, core.spec.num_stages, core.me)
    return _take_stage(core, stage, now)


def _take_stage(core: PeerCore, stage: int, now: float) -> list[Action]:
    core.stage = stage
    return core.recovery.begin(stage, core.outlook, now)


def _is_ahead(core: PeerCore, view: SwarmView, round_: int) -> bool:
    """The own checkpoint is worth less than a sibling that has gone on training."""
    assert core.stage is not None, "no stage chosen"
    return any(info.round > round_ for info in view.replicas(core.stage) if info.peer != core.me)


def on_recovery_done(core: PeerCore, event: RecoveryDone, now: float) -> list[Action]:
    donors_round, donors_outer = core.recovery.target
    actions = core.recovery.on_done(event.ok, now)
    if core.recovery.state is RecoveryState.SERVING:
        actions += _serve(core, donors_round, donors_outer)
    return actions


def _serve(core: PeerCore, round_: int, outer_step: int) -> list[Action]:
    """The weights of the stage are in place: take part."""
    assert core.stage is not None, "serving without a stage"
    core.ledger.restart(round_)
    core.relay.draining = False
    core.donor.stage = core.stage
    core.donor.round = round_
    core.shadows.follow(core.stage, round_)
    core.outer = OuterSync(core.me, core.spec, core.stage, outer_step)
    core.num_backwards = 0
    core.stepping = False
    core.fresh_until = round_ + FRESH_ROUNDS if core.recovery.fresh else 0
    if core.stage == 0 and not core.paused:
        core.originator = Originator(
            core.me, core.spec, core.ledger, core.costs, next_counter=core.next_counter
        )
    return core.relay.admit()


def on_claims(core: PeerCore, event: ClaimsRead, now: float) -> list[Action]:
    adopted = core.adoption.on_claims(event)
    moved = core.moves.on_claims(event, core.visible, core.stage)
    stage = moved if adopted is None else adopted
    if stage is None or core.recovery.state is not RecoveryState.SERVING or core.leaving:
        return []
    name = "stage-changed" if adopted is None else "stage-adopted"
    counted = Count(name=name, detail=f"stage {core.stage} -> {stage}", notable=True)
    return [counted, *_begin_leaving(core, stage, now)]


def _begin_leaving(core: PeerCore, stage: int, now: float) -> list[Action]:
    """Other weights are wanted, for `stage`: take nothing new, finish what is held."""
    core.recovery.state = RecoveryState.LEAVING
    core.recovery.stage = stage
    core.relay.draining = True
    if core.originator is not None:
        return core.originator.go_away(core.view)  # its own deadlines end it
    core.timers.set("drain", now + DRAIN_LIMIT_S)
    return []


def is_left_behind(core: PeerCore, round_: int) -> bool:
    """Too many steps missed to average (asleep, paused, cut off), and a sibling that has them."""
    limit = core.spec.outer.inner_steps * (1 + core.spec.outer.spread_max)
    return round_ - core.ledger.round > limit and _is_ahead(core, core.visible, core.ledger.round)


def start_over(core: PeerCore, now: float) -> list[Action]:
    """Never train on with stale weights: copy a sibling's."""
    assert core.stage is not None, "serving without a stage"
    missed = Count(name="left-behind", detail=f"round {core.ledger.round}", notable=True)
    return [missed, *_begin_leaving(core, core.stage, now)]


def leave_stage(core: PeerCore, now: float) -> list[Action]:
    """Nothing is held any more, or it has taken long enough."""
    actions = core.relay.drop_all()
    if core.originator is not None:
        core.next_counter = core.originator.next_counter
        core.originator = None
    core.timers.clear("drain")
    core.timers.clear("round")
    core.outer = None
    core.relay.draining = core.leaving
    core.donor.forget()
    core.donor.stage = None
    core.stage = core.recovery.stage
    assert core.stage is not None, "an adopter knows where to"
    core.recovery.shadow = core.shadows.held(core.stage)
    return actions + core.recovery.begin(core.stage, core.outlook, now)


def keep_step(core: PeerCore, now: float) -> list[Action]:
    """An originator steps by its own rounds: only the table tells it that the others have gone on."""
    newest = max((info.round for info in core.visible.originators()), default=0)
    return start_over(core, now) if is_left_behind(core, newest) else []
