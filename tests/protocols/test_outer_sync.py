"""NoLoCo's conversation: with a partner or alone, and never waiting for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.simulator.compute import HALF
from peer.simulator.swarm import tiny_spec
from protocols.actions import (
    Count,
    PrepareOuter,
    RunOuterStep,
    Send,
)
from protocols.events import OuterPrepared
from protocols.messages import OuterAccept, OuterExchange, OuterOffer, TensorPacket
from protocols.outer_sync import OuterState, OuterSync, partner
from protocols.run_spec import Codec
from tests.protocols.builders import info, view_of

SPEC = tiny_spec(4, outer={"inner_steps": 2})
PAIR = view_of("b1", "b2")
WAIT_S = SPEC.liveness.exchange_s


@pytest.fixture
def outer() -> Iterator[OuterSync]:
    """`b1`, at stage 1."""
    outer = OuterSync("b1", SPEC, 1)
    yield outer
    outer.check_invariants()


def prepared(step: int = 1, schema: str = "s") -> OuterPrepared:
    return OuterPrepared(outer_step=step, packet=HALF, schema=schema)


def offer(step: int = 1, schema: str = "s") -> OuterOffer:
    return OuterOffer(stage=1, outer_step=step, schema=schema)


def exchange(step: int = 1, packet: TensorPacket = HALF) -> OuterExchange:
    return OuterExchange(stage=1, outer_step=step, packet=packet)


def accept(*, ok: bool = True, step: int = 1) -> OuterAccept:
    return OuterAccept(stage=1, outer_step=step, ok=ok)


def alone(why: str, step: int = 1) -> list:
    count = [Count(name="outer-step-alone", detail=why, notable=True)] if why else []
    return [*count, RunOuterStep(outer_step=step, packet=None)]


def offered(outer: OuterSync) -> None:
    outer.on_inner_step(2)
    assert outer.on_prepared(prepared(), PAIR, 0.0) == [Send(to="b2", message=offer())]


def test_a_step_falls_due_every_h_rounds(outer: OuterSync):
    assert outer.on_inner_step(1) == []
    assert outer.on_inner_step(2) == [PrepareOuter(outer_step=1)]


def test_two_partners_average(outer: OuterSync):
    """Offer, offer, halves both ways, accepts both ways; only then is anything applied."""
    offered(outer)
    assert outer.on_offer("b2", offer()) == [Send(to="b2", message=exchange())]
    assert outer.on_exchange("b2", exchange()) == [Send(to="b2", message=accept())]
    assert outer.state is OuterState.EXCHANGING
    assert outer.on_accept("b2", accept()) == [RunOuterStep(outer_step=1, packet=HALF)]
    assert outer.on_done() == []
    assert outer.state is OuterState.TRAINING
    assert outer.next_deadline() is None


def test_the_order_of_lanes_does_not_matter(outer: OuterSync):
    """The half travels in the bulk lane and may overtake the offer, the accept may overtake the half."""
    offered(outer)
    assert outer.on_exchange("b2", exchange()) == [Send(to="b2", message=accept())]
    assert outer.on_accept("b2", accept()) == []
    assert outer.on_offer("b2", offer()) == [Send(to="b2", message=exchange())]


def test_an_early_offer_is_remembered(outer: OuterSync):
    """The partner is a round ahead of us."""
    assert outer.on_offer("b2", offer()) == []
    outer.on_inner_step(2)
    assert outer.on_prepared(prepared(), PAIR, 0.0) == [
        Send(to="b2", message=offer()),
        Send(to="b2", message=exchange()),
    ]


def test_the_only_replica_steps_alone_and_says_nothing(outer: OuterSync):
    outer.on_inner_step(2)
    assert outer.on_prepared(prepared(), view_of("b1"), 0.0) == alone("")


def test_one_that_sleeps_is_nobodys_partner(outer: OuterSync):
    """A paused replica keeps its record alive, and would cost its siblings a deadline at every step."""
    view = view_of("b1", info("b2", outer_step=3))
    outer.outer_step = 5
    assert outer.on_inner_step(12) == [PrepareOuter(outer_step=6)]
    assert outer.on_prepared(prepared(6), view, 0.0) == alone("", step=6)


def test_a_silent_partner_costs_one_deadline(outer: OuterSync):
    offered(outer)
    assert outer.next_deadline() == WAIT_S
    assert outer.on_deadline(WAIT_S) == alone("partner b2 silent")


def test_a_partner_that_dies_half_way_leaves_nothing_half_done(outer: OuterSync):
    """His half has come, his word that he holds ours has not."""
    offered(outer)
    outer.on_offer("b2", offer())
    outer.on_exchange("b2", exchange())
    assert outer.on_peer_lost("b2") == alone("partner b2 lost")
    assert outer.on_accept("b2", accept()) == []


def test_a_decline_is_final(outer: OuterSync):
    offered(outer)
    assert outer.on_accept("b2", accept(ok=False)) == alone("b2 declined")


def test_another_schema_is_another_model(outer: OuterSync):
    offered(outer)
    assert outer.on_offer("b2", offer(schema="x")) == alone("b2 has another schema")


def test_a_half_of_another_shape_is_refused(outer: OuterSync):
    offered(outer)
    short = TensorPacket(dtype="float32", shape=(2,), codec=Codec.RAW, data=bytes(8))
    assert outer.on_exchange("b2", exchange(packet=short)) == [
        Send(to="b2", message=accept(ok=False)),
        *alone("b2 sent a half of another shape"),
    ]


@pytest.mark.parametrize(
    "late",
    [offer(step=0), OuterOffer(stage=2, outer_step=1, schema="s")],
    ids=["a step that is over", "another stage"],
)
def test_an_offer_that_cannot_be_met_is_declined(outer: OuterSync, late: OuterOffer):
    outer.outer_step = 1
    declined = OuterAccept(stage=late.stage, outer_step=late.outer_step, ok=False)
    assert outer.on_offer("b2", late) == [Send(to="b2", message=declined)]


def test_whoever_took_us_for_its_partner_is_not_kept_waiting(outer: OuterSync):
    """Views differ: b3 believes in a pair (b1, b3), we in (b1, b2)."""
    outer.on_inner_step(2)
    outer.on_offer("b3", offer())
    actions = outer.on_prepared(prepared(), PAIR, 0.0)
    assert actions == [Send(to="b2", message=offer()), Send(to="b3", message=accept(ok=False))]
    assert outer.on_offer("b3", offer()) == [Send(to="b3", message=accept(ok=False))]


def test_a_stranger_cannot_interfere(outer: OuterSync):
    offered(outer)
    assert outer.on_exchange("b9", exchange()) == [Send(to="b9", message=accept(ok=False))]
    assert outer.on_accept("b9", accept(ok=False)) == []
    assert outer.state is OuterState.OFFERED


def test_the_next_step_does_not_wait_for_a_slow_partner(outer: OuterSync):
    """Training is never held up: at the next due step the old conversation ends alone, then the new one begins."""
    offered(outer)
    assert outer.on_inner_step(4) == alone("next outer step is due")
    assert outer.on_done() == [PrepareOuter(outer_step=2)]


def test_own_compute_that_fails_skips_the_step(outer: OuterSync):
    outer.on_inner_step(2)
    assert outer.on_failed() == []
    assert outer.state is OuterState.TRAINING
    assert outer.on_prepared(prepared(), PAIR, 0.0) == []


NAMES = st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=9)


@given(NAMES, st.integers(0, 1000), st.integers(0, 5), st.integers(0, 99))
def test_partner_is_symmetric_and_at_most_one_sits_out(names: set[str], step: int, stage: int, seed: int):
    """Everyone computes it alone, from a list in any order, and they all agree."""
    pairs = {me: partner(names, step, stage, seed, me) for me in names}
    without = [me for me, other in pairs.items() if other is None]
    assert len(without) == len(names) % 2
    assert all(pairs[other] == me for me, other in pairs.items() if other is not None)
    assert all(other != me for me, other in pairs.items())


def test_partners_change_from_step_to_step():
    names = [f"b{number}" for number in range(8)]
    assert len({partner(names, step, 1, 0, "b0") for step in range(200)}) == 7
