"""One peer's decisions, event in, actions out: what no single machine shows."""

from __future__ import annotations

import pytest

from peer.simulator.swarm import tiny_spec
from protocols.actions import (
    Announce,
    CallPeer,
    Count,
    DropStash,
    Leave,
    RecoverySource,
    RoundFinished,
    RunForward,
    RunInnerStep,
    RunRecovery,
    Send,
    TakeSnapshot,
)
from protocols.core import PeerCore
from protocols.events import (
    BackwardDone,
    BatchReady,
    ClaimsRead,
    ComputeFailed,
    DeadlineReached,
    ForwardDone,
    InnerStepDone,
    LeaveRequested,
    LossDone,
    MessageReceived,
    PauseRequested,
    PingDone,
    RecoveryDone,
    ResumeRequested,
    SendFailed,
    SnapshotTaken,
    Started,
    ViewChanged,
)
from protocols.messages import (
    OuterOffer,
    Release,
    RoundPlan,
    Undeliverable,
    WeightsKind,
    WeightsRequest,
)
from protocols.recovery import RecoveryState
from protocols.rounds import AWAY_ROUND
from protocols.stage_changes import DRAIN_LIMIT_S
from protocols.swarm import PeerState, SwarmView
from tests.protocols.builders import (
    EVERYBODY,
    PACKET,
    SPEC,
    activation,
    gradient,
    info,
    key,
    serving,
    view_of,
)


def hears(core: PeerCore, sender: str, message, now: float = 1.0) -> list:
    return core.handle(MessageReceived(sender=sender, message=message), now)


def said(actions, kind) -> list:
    return [action for action in actions if isinstance(action, kind)]


def backward_through(core: PeerCore, work, now: float = 1.0) -> list:
    """`core` is c1, at hop 2."""
    hears(core, "b1", activation(work, hop=2), now)
    core.handle(ForwardDone(key=work, packet=PACKET, seconds=0.1), now)
    hears(core, "d1", gradient(work, hop=2), now)
    return core.handle(BackwardDone(key=work, packet=PACKET, seconds=0.2), now)


def test_a_joiner_looks_twice_before_it_takes_a_stage():
    """Others that join at the same moment must have time to show up in the table."""
    core = PeerCore("c1", SPEC)
    view = view_of("a1", "b1", "d1")
    started = core.handle(Started(view=view), 0.0)
    assert said(started, Announce)[0].state is PeerState.JOINING
    assert core.handle(ViewChanged(view=view), 1.0) == []
    actions = core.handle(ViewChanged(view=view), 2.0)
    assert actions[0] == RunRecovery(stage=2, source=RecoverySource.INITIAL, donors=(), round=0, outer_step=0)
    assert said(actions, Announce)[0].state is PeerState.CATCHING_UP
    served = core.handle(RecoveryDone(stage=2, ok=True), 3.0)
    assert said(served, Announce)[0].state is PeerState.SERVING


def test_a_checkpoint_is_resumed_unless_a_sibling_has_gone_on():
    """Weights of yesterday are worth less than a copy of today's."""
    alone = PeerCore("c1", SPEC, 2)
    alone.handle(Started(view=view_of("a1", "b1"), resumed_round=40, resumed_outer_step=4), 0.0)
    assert alone.recovery.state is RecoveryState.SERVING
    assert alone.record().round == 40
    late = PeerCore("c1", SPEC, 2)
    actions = late.handle(Started(view=view_of(info("c2", round=55)), resumed_round=40), 0.0)
    assert said(actions, Send)[0].to == "c2"


def test_a_relay_steps_when_all_its_work_is_done():
    core = serving("c1")
    hears(core, "a1", RoundPlan(round=0, keys=(key(0),)))
    assert said(backward_through(core, key(0)), RunInnerStep) == [RunInnerStep(round=0)]
    actions = core.handle(InnerStepDone(round=1, grad_norm=2.0), 2.0)
    assert actions[0] == RoundFinished(round=1, grad_norm=2.0)
    assert said(actions, Announce)[0].round == 1
    assert core.record().grad_norm == 2.0


def test_a_relay_without_work_goes_on_without_a_step():
    """Its siblings had all the microbatches: it must not hold up those of the next round."""
    core = serving("c1")
    actions = hears(core, "a1", RoundPlan(round=0, keys=()))
    assert said(actions, RunInnerStep) == []
    assert core.ledger.round == 1


def test_a_round_ends_at_its_deadline():
    """An announced microbatch never comes, and neither does its release."""
    core = serving("c1")
    hears(core, "a1", RoundPlan(round=0, keys=(key(0), key(1))))
    backward_through(core, key(0))
    deadline_s = core.next_deadline()
    assert deadline_s == 1.0 + SPEC.liveness.round_s
    actions = core.handle(DeadlineReached(), deadline_s)
    assert Count(name="round-deadline", detail="round 0: 1 late", notable=True) in actions
    assert said(actions, RunInnerStep) == [RunInnerStep(round=0)]


def test_paused_originators_do_not_end_the_run():
    """Found by the simulator: relays took AWAY_ROUND for a round and were done with all of them."""
    core = serving("c1")
    hears(core, "a1", RoundPlan(round=0, keys=()))
    hears(core, "a1", RoundPlan(round=AWAY_ROUND, keys=()))
    assert core.ledger.round == 1


def test_work_for_another_stage_is_refused():
    """The path was planned from our old record."""
    core = serving("c1")
    path = activation(key(0), hop=2).path
    moved = (path[0], path[1], path[3], path[2])
    wrong = activation(key(0), hop=3, path=tuple(moved))
    core.stage = 1
    refusal = Undeliverable(key=key(0), unreachable="c1")
    assert hears(core, "d1", wrong)[0] == Send(to="a1", message=refusal)


def test_an_unreachable_peer_is_suspected_and_called():
    core = serving("c1")
    assert core.handle(SendFailed(peer="d1"), 1.0)[:2] == [
        Count(name="suspect", detail="d1", notable=True),
        CallPeer(peer="d1"),
    ]
    assert [each.peer for each in core.visible.replicas(3)] == ["d2"]
    core.handle(PingDone(peer="d1", ok=True, seconds=0.1), 2.0)
    assert [each.peer for each in core.visible.replicas(3)] == ["d1", "d2"]


def test_a_suspect_is_not_called_again_and_again():
    """Each failed call would else be news and cause the next one."""
    core = serving("c1")
    core.handle(SendFailed(peer="d1"), 1.0)
    assert core.handle(PingDone(peer="d1", ok=False, seconds=2.0), 3.0) == []


def test_what_is_held_for_a_lost_neighbour_goes_back():
    core = serving("c1")
    hears(core, "b1", activation(key(0), hop=2))
    core.handle(ForwardDone(key=key(0), packet=PACKET, seconds=0.1), 1.0)
    actions = core.handle(SendFailed(peer="d1", message=activation(key(0), hop=3)), 2.0)
    told = Send(to="a1", message=Undeliverable(key=key(0), unreachable="d1"))
    assert [action for action in actions if action in (told, DropStash(key=key(0)))] == [
        told,
        DropStash(key=key(0)),
    ]


def test_a_donor_that_was_suspected_already_is_given_up_at_once():
    """Found by the simulator: the adopter's request to a dead peer failed without a word for 14 s."""
    core = PeerCore("c9", SPEC, 2)
    core.handle(Started(view=view_of(info("c1", round=3), info("c2", round=3))), 0.0)
    donor = next(iter(core.recovery._downloads))
    core.outlook.suspect(donor, 0.5)
    actions = core.handle(SendFailed(peer=donor), 1.0)
    assert said(actions, Send)[0].to == ({"c1", "c2"} - {donor}).pop()


def test_a_new_life_under_an_old_name_has_lost_everything():
    """Killed and restarted between two polls: what ran through it will not come."""
    core = serving("c1")
    hears(core, "b1", activation(key(0), hop=2))
    reborn = view_of("a1", info("b1", started_unix_s=9.0), "b2", "c1", "c2", "d1", "d2")
    actions = core.handle(ViewChanged(view=reborn), 2.0)
    assert Send(to="a1", message=Undeliverable(key=key(0), unreachable="b1")) in actions


def test_a_relay_that_misses_the_originator_avoids_nobody_else():
    """One of us two is cut off; the relay, since it is the one that could not be answered."""
    core = serving("a1")
    core.handle(ForwardDone(key=key(0), packet=PACKET, seconds=0.1), 1.0)
    core.handle(ViewChanged(view=EVERYBODY), 1.0)
    microbatch = core.originator._open[0]
    microbatch.packet = PACKET
    core.originator._send_out(microbatch, 1.0)
    reporter = microbatch.path[-1].peer
    actions = hears(core, reporter, Undeliverable(key=microbatch.key, unreachable="a1"))
    assert said(actions, CallPeer) == []
    assert reporter not in [each.peer for each in core.visible.peers]
    assert all(hop.peer != reporter for hop in microbatch.path)


def adopting(core: PeerCore, now: float = 5.0) -> list:
    """d1 has won the claim on stage 2."""
    core.adoption._claimed = 2
    return core.handle(ClaimsRead(stage=2, claims=(("d1", 2.0),)), now)


GONE = view_of("a1", info("b1", round=4), info("d1", round=4), info("d2", round=4), info("d3", round=4))


def test_an_idle_adopter_moves_at_once():
    core = serving("d1", view=GONE)
    actions = adopting(core)
    assert Count(name="stage-adopted", detail="stage 3 -> 2", notable=True) in actions
    (asked,) = said(actions, Send)
    assert (asked.to, asked.message.kind) == ("b1", WeightsKind.SHADOW)
    assert said(actions, Announce)[-1].state is PeerState.CATCHING_UP
    assert core.stage == 2


def test_an_adopter_finishes_what_it_holds_first():
    core = serving("d1", view=GONE)
    hears(core, "c1", activation(key(0), hop=3))
    assert said(adopting(core), Announce)[-1].state is PeerState.LEAVING
    assert core.stage == 3
    assert core.next_deadline() == 5.0 + DRAIN_LIMIT_S
    actions = core.handle(DeadlineReached(), 5.0 + DRAIN_LIMIT_S)
    assert Send(to="a1", message=Undeliverable(key=key(0), unreachable="d1")) in actions
    assert core.stage == 2


def test_work_announced_to_the_old_stage_does_not_hold_up_the_new_one():
    core = serving("d1", view=GONE)
    hears(core, "a1", RoundPlan(round=0, keys=(key(0),)))
    adopting(core)
    core.recovery.state = RecoveryState.MERGING
    core.recovery._timers.clear("chunk")
    core.handle(RecoveryDone(stage=2, ok=True), 9.0)
    assert core.ledger.outstanding() == 0


def test_a_leaver_finishes_what_it_holds():
    core = serving("c1")
    hears(core, "b1", activation(key(0), hop=2))
    actions = core.handle(LeaveRequested(), 2.0)
    assert said(actions, Leave) == []
    assert said(actions, Announce)[0].state is PeerState.LEAVING
    assert said(hears(core, "a1", Release(keys=(key(0),))), Leave) == [Leave()]


def test_a_leaver_does_not_wait_for_ever():
    core = serving("c1")
    hears(core, "b1", activation(key(0), hop=2))
    core.handle(LeaveRequested(), 2.0)
    actions = core.handle(DeadlineReached(), 2.0 + DRAIN_LIMIT_S)
    assert said(actions, Send) == [Send(to="a1", message=Undeliverable(key=key(0), unreachable="c1"))]
    assert said(actions, Leave) == [Leave()]


def test_a_paused_originator_says_so_and_comes_back():
    core = serving("a1")
    away = core.handle(PauseRequested(), 1.0)
    assert {action.message.round for action in said(away, Send)} == {AWAY_ROUND}
    core.handle(ResumeRequested(), 2.0)
    assert core.originator is not None
    assert core.originator.active


def test_an_originator_that_was_left_behind_copies_a_sibling_first():
    """Found by the simulator: after a long pause it trained on for ever, rounds behind all others."""
    spec = tiny_spec(4, outer={"inner_steps": 2, "spread_max": 1}, rounds={"start_replicas": 9})
    core = serving("a1", spec=spec)
    core.handle(PauseRequested(), 1.0)
    core.outlook.see(view_of("a1", info("a2", round=50), "b1", "c1", "d1"))
    actions = core.handle(ResumeRequested(), 60.0)
    assert Count(name="left-behind", detail="round 0", notable=True) in actions
    request = WeightsRequest(kind=WeightsKind.FULL, stage=0, snapshot="", index=0)
    assert Send(to="a2", message=request) in actions
    assert core.originator is None


def test_an_originator_takes_its_own_step_before_it_joins_the_others():
    """Found by the simulator with real stages: one always a round behind threw every gradient of its own away."""
    core = serving("a1", view=view_of("a1", "a2", "b1", "c1", "d1"))
    work = key(0)
    core.handle(ViewChanged(view=core.view), 1.0)
    for _ in range(2):
        core.handle(BatchReady(key=work), 1.0)
        core.handle(ForwardDone(key=work, packet=PACKET, seconds=0.1), 1.0)
        hears(core, "d1", activation(work, hop=4))
        core.handle(LossDone(key=work, loss=2.0, packet=PACKET), 1.0)
        hears(core, "b1", gradient(work, hop=0))
        hears(core, "a2", RoundPlan(round=1, keys=()))
        done = core.handle(BackwardDone(key=work, packet=None, seconds=0.1), 2.0)
        work = key(1)
    assert said(done, RunInnerStep) == [RunInnerStep(round=0)]
    core.handle(InnerStepDone(round=1, grad_norm=1.0), 3.0)
    assert core.ledger.round == 1


def test_a_relay_that_slept_copies_a_sibling_first():
    spec = tiny_spec(4, outer={"inner_steps": 2, "spread_max": 1})
    core = serving("c1", spec=spec, view=view_of("a1", "b1", "c1", info("c2", round=50), "d1"))
    actions = hears(core, "a1", RoundPlan(round=51, keys=()), now=60.0)
    assert Count(name="left-behind", detail="round 0", notable=True) in actions
    assert core.recovery.state is RecoveryState.COLLECTING


def test_a_snapshot_is_served_from_the_stage_that_is_served():
    core = serving("c1")
    request = WeightsRequest(kind=WeightsKind.FULL, stage=2, snapshot="", index=0)
    assert hears(core, "c9", request) == [TakeSnapshot(kind=WeightsKind.FULL, snapshot="c1-1")]
    taken = SnapshotTaken(
        kind=WeightsKind.FULL, snapshot="c1-1", sha256="0" * 64, outer_step=0, packets=(PACKET,)
    )
    assert said(core.handle(taken, 2.0), Send)[0].to == "c9"


@pytest.mark.parametrize("job", ["RunInnerStep", "PrepareOuter", "RunOuterStep", "TakeSnapshot"])
def test_a_job_that_fails_is_counted_and_life_goes_on(job: str):
    core = serving("c1")
    actions = core.handle(ComputeFailed(key=None, job=job, reason="out of memory"), 1.0)
    assert actions[0] == Count(name="compute-failed", detail=f"{job}: out of memory", notable=True)
    core.check_invariants(1.0)


def test_a_step_that_fails_ends_the_round_all_the_same():
    core = serving("c1")
    hears(core, "a1", RoundPlan(round=0, keys=(key(0),)))
    backward_through(core, key(0))
    core.handle(ComputeFailed(key=None, job="RunInnerStep", reason="NaN"), 2.0)
    assert core.ledger.round == 1


def test_a_forward_that_fails_goes_back_to_the_originator():
    core = serving("c1")
    assert hears(core, "b1", activation(key(0), hop=2)) == [RunForward(key=key(0), packet=PACKET, train=True)]
    actions = core.handle(ComputeFailed(key=key(0), job="RunForward", reason="shape"), 1.0)
    assert Send(to="a1", message=Undeliverable(key=key(0), unreachable="c1")) in actions


def test_without_a_stage_an_averaging_offer_is_ignored():
    core = PeerCore("c1", SPEC, 2)
    core.handle(Started(view=SwarmView()), 0.0)
    assert hears(core, "c2", OuterOffer(stage=2, outer_step=1, pair_round=0, microbatches=1)) == []


def test_the_same_events_give_the_same_actions():
    """Byte for byte: all that the simulator promises rests on it."""

    def play() -> list:
        core = serving("a1")
        actions = core.handle(ViewChanged(view=EVERYBODY), 1.0)
        for peer in ("c1", "d2", "b1"):
            actions += core.handle(SendFailed(peer=peer), 2.0)
        return actions

    assert play() == play()


@pytest.mark.parametrize(("round_", "calls"), [(0, False), (3, True), (SPEC.rounds.total_rounds, True)])
def test_stages_are_watched_from_the_first_round_on_and_beyond_the_last(round_: int, calls: bool):
    """Before, their peers are still on the way; after, the model must be whole to be exported."""
    core = serving("d1", view=GONE)
    core.ledger.round = round_
    thin = view_of("a1", "b1", "c1", "d1", "d2", "d3")
    called = [one.peer for one in said(core.handle(ViewChanged(view=thin), 1.0), CallPeer)]
    assert (called == ["a1", "b1", "c1"]) == calls
