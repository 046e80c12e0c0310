"""NoLoCo's conversation: with a partner or alone, and never waiting for ever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from peer.simulator.compute import HALF
from peer.simulator.swarm import tiny_spec
from protocols.actions import (
    FOLLOWS,
    Action,
    Count,
    OuterFinished,
    PrepareOuter,
    RunOuterStep,
    Send,
)
from protocols.events import OuterPrepared, OuterStepDone
from protocols.messages import OuterAccept, OuterExchange, OuterOffer, TensorPacket
from protocols.outer_sync import OuterState, OuterSync
from protocols.run_spec import Codec, RunSpec
from protocols.swarm import SwarmView
from tests.protocols.builders import info, view_of

SPEC = tiny_spec(4, outer={"inner_steps": 2})
PAIR = view_of("b1", "b2")
TRIO = view_of("b1", "b2", "b3")
WAIT_S = SPEC.liveness.exchange_s
MICROBATCHES = 3  # behind each offer here


def outer_of(me: str = "b1", spec: RunSpec = SPEC) -> OuterSync:
    return OuterSync(me, spec, 1)


@pytest.fixture
def outer() -> Iterator[OuterSync]:
    """`b1`, at stage 1."""
    outer = outer_of()
    yield outer
    outer.check_invariants()


def due(outer: OuterSync, round_: int = 2, view: SwarmView = PAIR, now: float = 0.0) -> list[Action]:
    return outer.on_inner_step(round_, MICROBATCHES, view, now)


def prepared(step: int = 1, pair_round: int = 0, schema: str = "s") -> OuterPrepared:
    return OuterPrepared(outer_step=step, pair_round=pair_round, packet=HALF, schema=schema)


def offer(step: int = 1, pair_round: int = 0, microbatches: int = MICROBATCHES) -> OuterOffer:
    return OuterOffer(stage=1, outer_step=step, pair_round=pair_round, microbatches=microbatches)


def exchange(
    step: int = 1, pair_round: int = 0, packet: TensorPacket = HALF, schema: str = "s"
) -> OuterExchange:
    return OuterExchange(stage=1, outer_step=step, pair_round=pair_round, schema=schema, packet=packet)


def accept(*, ok: bool = True, step: int = 1, pair_round: int = 0) -> OuterAccept:
    return OuterAccept(stage=1, outer_step=step, pair_round=pair_round, ok=ok)


def prepare(step: int = 1, pair_round: int = 0, weight: float = 1.0) -> PrepareOuter:
    return PrepareOuter(outer_step=step, pair_round=pair_round, weight=weight)


def run(packet: TensorPacket | None, step: int = 1, pair_round: int = 0) -> RunOuterStep:
    return RunOuterStep(outer_step=step, pair_round=pair_round, packet=packet)


def alone(why: str, step: int = 1) -> list[Action]:
    count = [Count(name="outer-step-alone", detail=why, notable=True)] if why else []
    return [*count, run(None, step)]


def done(outer: OuterSync, step: int = 1, view: SwarmView = PAIR, now: float = 0.0) -> list[Action]:
    """Without the report, which comes first."""
    told, *actions = outer.on_done(OuterStepDone(outer_step=step, with_partner=True), view, now)
    assert isinstance(told, OuterFinished)
    return actions


def offered(outer: OuterSync) -> None:
    assert due(outer) == [Send(to="b2", message=offer())]


def exchanging(outer: OuterSync) -> None:
    offered(outer)
    assert outer.on_offer("b2", offer(), PAIR, 0.0) == [prepare()]
    assert outer.on_prepared(prepared(), PAIR, 0.0) == [Send(to="b2", message=exchange())]


def test_a_step_falls_due_every_h_rounds(outer: OuterSync):
    """Its offer tells how much was trained since the last one."""
    assert due(outer, 1) == []
    assert due(outer, 2) == [Send(to="b2", message=offer(microbatches=2 * MICROBATCHES))]


def test_two_partners_average(outer: OuterSync):
    """Offers, halves and accepts both ways; only then is anything applied."""
    exchanging(outer)
    assert outer.on_exchange("b2", exchange(), PAIR, 0.0) == [Send(to="b2", message=accept())]
    assert outer.state is OuterState.EXCHANGING
    assert outer.on_accept("b2", accept(), PAIR, 0.0) == [run(HALF)]
    assert done(outer) == []
    assert outer.state is OuterState.TRAINING
    assert outer.next_deadline() is None


def test_the_order_of_lanes_does_not_matter(outer: OuterSync):
    """The half travels in the bulk lane: it may overtake the offer, the accept may overtake the half."""
    offered(outer)
    assert outer.on_exchange("b2", exchange(), PAIR, 0.0) == []
    assert outer.on_accept("b2", accept(), PAIR, 0.0) == []
    assert outer.on_offer("b2", offer(), PAIR, 0.0) == [prepare()]
    held, *rest = outer.on_prepared(prepared(), PAIR, 0.0)
    assert held == Send(to="b2", message=exchange())
    assert rest == [Send(to="b2", message=accept()), run(HALF)]


def test_an_early_offer_is_remembered(outer: OuterSync):
    """The partner is a round ahead of us."""
    assert outer.on_offer("b2", offer(), PAIR, 0.0) == []
    assert due(outer) == [Send(to="b2", message=offer()), prepare()]


def test_whoever_trained_more_counts_more_and_both_know_by_how_much():
    """The two weights belong together: their sum is that of two equals. What is claimed beyond reason is cut."""
    for theirs, weight in ((MICROBATCHES, 1.0), (3 * MICROBATCHES, 0.5), (1 << 60, 0.4)):
        outer = outer_of()
        offered(outer)
        assert outer.on_offer("b2", offer(microbatches=theirs), PAIR, 0.0) == [prepare(weight=weight)]


def test_whoever_has_trained_on_nothing_follows_and_the_other_leads():
    """Both hold both halves in the end; the leader applies none."""
    leader, idle = outer_of(), outer_of()
    offered(leader)
    assert leader.on_offer("b2", offer(microbatches=0), PAIR, 0.0) == [prepare()]
    leader.on_prepared(prepared(), PAIR, 0.0)
    leader.on_exchange("b2", exchange(), PAIR, 0.0)
    assert leader.on_accept("b2", accept(), PAIR, 0.0) == [run(None)]
    idle.on_inner_step(2, 0, PAIR, 0.0)
    assert idle.on_offer("b2", offer(), PAIR, 0.0) == [prepare(weight=FOLLOWS)]
    idle.on_prepared(prepared(), PAIR, 0.0)
    idle.on_exchange("b2", exchange(), PAIR, 0.0)
    assert idle.on_accept("b2", accept(), PAIR, 0.0) == [run(HALF)]


def test_the_only_replica_steps_alone_and_says_nothing(outer: OuterSync):
    assert due(outer, view=view_of("b1")) == alone("")


def test_one_that_sleeps_is_nobodys_partner():
    """A paused replica keeps its record alive, and would cost its siblings a deadline at every step."""
    outer = OuterSync("b1", SPEC, 1, outer_step=5)
    view = view_of(info("b1", outer_step=5), info("b2", outer_step=3))
    assert due(outer, 12, view) == alone("", step=6)


def test_a_silent_partner_costs_one_deadline(outer: OuterSync):
    offered(outer)
    assert outer.next_deadline() == WAIT_S
    assert outer.on_deadline(PAIR, WAIT_S) == alone("partner b2 silent")


def test_a_large_half_gets_the_time_that_it_needs(outer: OuterSync):
    """Three times what both records' rates say, beyond the usual wait."""
    slow = view_of(info("b1", upload_bytes_per_s=10.0), info("b2", download_bytes_per_s=5.0))
    assert due(outer, view=slow) == [Send(to="b2", message=offer())]
    outer.on_offer("b2", offer(), slow, 0.0)
    outer.on_prepared(prepared(), slow, 1.0)
    assert outer.next_deadline() == pytest.approx(1.0 + WAIT_S + 3 * HALF.num_bytes / 5.0)


def test_a_partner_that_dies_half_way_leaves_nothing_half_done(outer: OuterSync):
    """His half has come, his word that he holds ours has not."""
    exchanging(outer)
    outer.on_exchange("b2", exchange(), PAIR, 0.0)
    assert outer.on_peer_lost("b2", PAIR, 0.0) == alone("partner b2 lost")
    assert outer.on_accept("b2", accept(), PAIR, 0.0) == []


def test_a_decline_is_final(outer: OuterSync):
    offered(outer)
    assert outer.on_accept("b2", accept(ok=False), PAIR, 0.0) == alone("b2 declined")


def test_another_schema_is_another_model(outer: OuterSync):
    exchanging(outer)
    assert outer.on_exchange("b2", exchange(schema="x"), PAIR, 0.0) == [
        Send(to="b2", message=accept(ok=False)),
        *alone("b2 sent a half of another schema"),
    ]


def test_a_half_of_another_shape_is_refused(outer: OuterSync):
    exchanging(outer)
    short = TensorPacket(dtype="float32", shape=(2,), codec=Codec.RAW, data=bytes(8))
    assert outer.on_exchange("b2", exchange(packet=short), PAIR, 0.0) == [
        Send(to="b2", message=accept(ok=False)),
        *alone("b2 sent a half of another shape"),
    ]


@pytest.mark.parametrize(
    "late",
    [offer(step=0), replace(offer(), stage=2)],
    ids=["a step that is over", "another stage"],
)
def test_an_offer_that_cannot_be_met_is_declined(late: OuterOffer):
    outer = OuterSync("b1", SPEC, 1, outer_step=1)
    declined = replace(accept(ok=False, step=late.outer_step), stage=late.stage)
    assert outer.on_offer("b2", late, PAIR, 0.0) == [Send(to="b2", message=declined)]


def test_whoever_took_us_for_its_partner_is_not_kept_waiting(outer: OuterSync):
    """Views differ: b3 believes in a pair (b1, b3), we in (b1, b2)."""
    outer.on_offer("b3", offer(), PAIR, 0.0)
    assert due(outer) == [Send(to="b2", message=offer()), Send(to="b3", message=accept(ok=False))]
    assert outer.on_offer("b3", offer(), PAIR, 0.0) == [Send(to="b3", message=accept(ok=False))]


def test_a_stranger_cannot_interfere(outer: OuterSync):
    offered(outer)
    assert outer.on_exchange("b9", exchange(), PAIR, 0.0) == [Send(to="b9", message=accept(ok=False))]
    assert outer.on_accept("b9", accept(ok=False), PAIR, 0.0) == []
    assert outer.state is OuterState.OFFERED


def test_the_next_step_does_not_wait_for_a_slow_partner(outer: OuterSync):
    """Training is never held up: at the next due step the old conversation ends alone, then the new one begins."""
    offered(outer)
    assert due(outer, 4) == alone("next outer step is due")
    assert done(outer) == [Send(to="b2", message=offer(step=2, microbatches=0))]


def test_own_compute_that_fails_skips_the_step(outer: OuterSync):
    offered(outer)
    outer.on_offer("b2", offer(), PAIR, 0.0)
    assert outer.on_failed(PAIR, 0.0) == []
    assert outer.state is OuterState.TRAINING
    assert outer.on_prepared(prepared(), PAIR, 0.0) == []


# ---- three replicas: one is the reserve --------------------------------------------------------------


def trio() -> tuple[dict[str, OuterSync], str, list[str]]:
    """All three at the due step; who has no partner this time, and the pair."""
    machines = {peer: outer_of(peer) for peer in ("b1", "b2", "b3")}
    asks = {peer: due(machine, view=TRIO) for peer, machine in machines.items()}
    (reserve,) = (peer for peer, actions in asks.items() if not actions)
    return machines, reserve, sorted(asks.keys() - {reserve})


def test_the_reserve_steps_in_for_a_lost_partner():
    machines, reserve, (one, gone) = trio()
    asked = machines[one].on_accept(gone, accept(ok=False), TRIO, 0.0)
    assert asked == [
        Count(name="outer-second-choice", detail=f"{reserve}: {gone} declined"),
        Send(to=reserve, message=offer()),
    ]
    assert machines[reserve].on_offer(one, offer(), TRIO, 0.0) == [
        Send(to=one, message=offer()),
        prepare(),
    ]
    assert machines[one].on_offer(reserve, offer(), TRIO, 0.0) == [prepare()]
    for machine in machines.values():
        machine.check_invariants()


def test_a_reserve_that_nobody_needs_steps_alone_in_the_end():
    machines, reserve, _ = trio()
    assert machines[reserve].on_deadline(TRIO, WAIT_S) == alone("")


def test_there_is_no_third_choice():
    machines, reserve, (one, gone) = trio()
    machines[one].on_peer_lost(gone, TRIO, 0.0)
    assert machines[one].on_peer_lost(reserve, TRIO, 0.0) == alone(f"partner {reserve} lost")


# ---- two pair rounds ---------------------------------------------------------------------------------


def test_a_second_pair_round_follows_with_another_partner():
    """What is sent then is new slow weights; who loses its partner in it has nothing to do alone."""
    spec = tiny_spec(4, outer={"inner_steps": 2, "rounds": 2})
    four = view_of("b1", "b2", "b3", "b4")
    outer = outer_of(spec=spec)
    (first,) = due(outer, view=four)
    assert isinstance(first, Send)
    outer.on_offer(first.to, offer(), four, 0.0)
    outer.on_prepared(prepared(), four, 0.0)
    outer.on_exchange(first.to, exchange(), four, 0.0)
    assert outer.on_accept(first.to, accept(), four, 0.0) == [run(HALF)]
    (second,) = done(outer, view=four)
    assert isinstance(second, Send)
    assert second.to != first.to
    assert second.message == offer(pair_round=1, microbatches=0)
    assert outer.on_offer(second.to, offer(pair_round=1, microbatches=9), four, 0.0) == [
        prepare(pair_round=1)
    ]
    count = Count(name="outer-step-alone", detail=f"partner {second.to} lost", notable=True)
    assert outer.on_peer_lost(second.to, four, 0.0) == [count]
    assert outer.state is OuterState.TRAINING
    outer.check_invariants()
