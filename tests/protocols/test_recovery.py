"""Where a stage's weights come from, rung by rung."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from peer.simulator.compute import CHUNK
from peer.simulator.swarm import tiny_spec
from protocols.actions import (
    Count,
    DonorState,
    RecoverySource,
    RunRecovery,
    Send,
)
from protocols.messages import TensorPacket, WeightsChunk, WeightsKind, WeightsRequest
from protocols.outlook import Outlook
from protocols.recovery import CHUNK_LIMIT_S, RETRY_S, Recovery, RecoveryState
from protocols.swarm import SwarmView
from tests.protocols.builders import SPEC, info, view_of

NO_SHADOWS = tiny_spec(4, recovery={"shadow_depth": 0})
SHA256 = "0" * 64
TRAINED = view_of("a1", info("b1", round=7, grad_norm=2.0), info("d1", round=8, grad_norm=3.0))


def outlook_of(view: SwarmView) -> Outlook:
    outlook = Outlook(suspect_s=15.0)
    outlook.see(view)
    return outlook


@pytest.fixture
def recovery() -> Iterator[Recovery]:
    """Of `c9`, on its way to stage 2."""
    recovery = Recovery("c9", NO_SHADOWS)
    yield recovery
    recovery.check_invariants()


@pytest.fixture
def shadowed() -> Iterator[Recovery]:
    """The same, where peers of stage 1 may have kept stage 2's weights."""
    recovery = Recovery("c9", SPEC)
    yield recovery
    recovery.check_invariants()


def ask(donor: str, *, kind=WeightsKind.FULL, snapshot: str = "", index: int = 0) -> Send:
    stage = ord(donor[0]) - ord("a")
    return Send(to=donor, message=WeightsRequest(kind=kind, stage=stage, snapshot=snapshot, index=index))


def chunk(
    index: int = 0, *, count: int = 2, stage: int = 2, kind=WeightsKind.FULL, **changes
) -> WeightsChunk:
    fields = {"snapshot": "s", "sha256": SHA256, "round": 7, "outer_step": 1, "packet": CHUNK, **changes}
    return WeightsChunk(kind=kind, stage=stage, index=index, count=count, **fields)


def started(what: str) -> Count:
    return Count(name="recovery-started", detail=f"stage 2: {what}", notable=True)


def run(source: RecoverySource, *donors: DonorState, round_: int = 0, outer_step: int = 0) -> RunRecovery:
    return RunRecovery(stage=2, source=source, donors=donors, round=round_, outer_step=outer_step)


def test_where_nobody_has_trained_the_seed_gives_the_weights(recovery: Recovery):
    assert recovery.begin(2, outlook_of(view_of("a1", "b1", "d1")), 0.0) == [run(RecoverySource.INITIAL)]
    recovery.on_done(True, 1.0)
    assert recovery.state is RecoveryState.SERVING
    assert not recovery.fresh


@pytest.mark.parametrize("others", [("a1",), ("a1", info("b1", round=7), info("d1", round=8))])
def test_a_checkpoint_is_kept_when_those_ahead_of_it_turn_out_to_be_dead(recovery: Recovery, others):
    """All replicas die together; one is started again from round 5 while a dead one's record still says round 7."""
    recovery.own = (5, 1)
    dead = outlook_of(view_of(*others, info("c1", round=7)))
    assert recovery.begin(2, dead, 0.0) == [started("catch-up from c1"), ask("c1")]
    dead.suspect("c1", 0.0)
    assert recovery.on_peer_lost("c1", dead, 0.0) == [
        Count(name="donor-failed", detail="c1 lost", notable=True)
    ]
    assert recovery.next_deadline() == RETRY_S
    lapsed = outlook_of(view_of(*others))
    kept = run(RecoverySource.INITIAL, round_=5, outer_step=1)
    assert recovery.on_deadline(lapsed, RETRY_S) == [kept]
    recovery.on_done(True, RETRY_S)
    assert (recovery.state, recovery.fresh, recovery.own) == (RecoveryState.SERVING, False, (0, 0))


def test_a_joiner_copies_its_sibling_chunk_by_chunk(recovery: Recovery):
    outlook = outlook_of(view_of("b1", info("c1", round=7, grad_norm=2.5), "d1"))
    assert recovery.begin(2, outlook, 0.0) == [started("catch-up from c1"), ask("c1")]
    assert recovery.on_chunk("c1", chunk(0), outlook, 1.0) == [ask("c1", snapshot="s", index=1)]
    state = DonorState(
        donor="c1", stage=2, round=7, outer_step=1, sha256=SHA256, grad_norm=2.5, packets=(CHUNK, CHUNK)
    )
    merged = recovery.on_chunk("c1", chunk(1), outlook, 2.0)
    assert merged == [run(RecoverySource.CATCH_UP, state, round_=7, outer_step=1)]
    assert recovery.target == (7, 1)


def test_the_newest_sibling_is_the_donor(recovery: Recovery):
    """One that sleeps is still in the table, with the weights of an hour ago."""
    outlook = outlook_of(view_of(info("c1", round=2), info("c2", round=30)))
    assert recovery.begin(2, outlook, 0.0)[-1] == ask("c2")


def test_an_empty_stage_is_merged_from_both_neighbours(recovery: Recovery):
    """CheckFree: one trained replica of each side."""
    outlook = outlook_of(TRAINED)
    asked = [ask("b1", kind=WeightsKind.WEIGHTS), ask("d1", kind=WeightsKind.WEIGHTS)]
    assert recovery.begin(2, outlook, 0.0) == [started("merge from b1, d1"), *asked]
    half = {"kind": WeightsKind.WEIGHTS, "count": 1}
    assert recovery.on_chunk("b1", chunk(stage=1, **half), outlook, 1.0) == []
    merge = recovery.on_chunk("d1", chunk(stage=3, round=8, **half), outlook, 2.0)[0]
    assert isinstance(merge, RunRecovery)
    assert (merge.source, merge.round) == (RecoverySource.MERGE, 8)
    assert [(donor.donor, donor.grad_norm) for donor in merge.donors] == [("b1", 2.0), ("d1", 3.0)]
    recovery.on_done(True, 3.0)
    assert recovery.fresh


def ask_shadow(donor: str, *, stage: int = 2, snapshot: str = "", index: int = 0) -> Send:
    wanted = WeightsRequest(kind=WeightsKind.SHADOW, stage=stage, snapshot=snapshot, index=index)
    return Send(to=donor, message=wanted)


def test_an_empty_stage_is_restored_from_the_shadow_of_the_stage_before(shadowed: Recovery):
    """Old weights, but for the round that the others have reached, and not called rebuilt."""
    outlook = outlook_of(TRAINED)
    assert shadowed.begin(2, outlook, 0.0) == [started("shadow from b1"), ask_shadow("b1")]
    old = chunk(kind=WeightsKind.SHADOW, count=1, round=3, outer_step=0)
    (restore,) = shadowed.on_chunk("b1", old, outlook, 1.0)
    assert isinstance(restore, RunRecovery)
    assert (restore.source, restore.round) == (RecoverySource.SHADOW, 8)
    assert [(donor.stage, donor.round) for donor in restore.donors] == [(2, 3)]
    assert shadowed.on_done(True, 2.0)[0] == Count(
        name="recovery-done", detail="stage 2: shadow", notable=True
    )
    assert not shadowed.fresh


def test_the_first_stage_has_a_shadow_too():
    """At the end of the ring: embedding, final norm and head come back as they were, bit for bit."""
    first = Recovery("a9", SPEC)
    found = first.begin(0, outlook_of(view_of(info("c1", round=7), info("d1", round=7))), 0.0)
    assert found[1:] == [ask_shadow("d1", stage=0)]


def test_an_adopter_with_a_shadow_of_its_own_asks_nobody(shadowed: Recovery):
    own = DonorState(
        donor="c1", stage=2, round=6, outer_step=0, sha256=SHA256, grad_norm=0.0, packets=(CHUNK,)
    )
    shadowed.shadow = own
    assert shadowed.begin(2, outlook_of(TRAINED), 0.0) == [run(RecoverySource.SHADOW, own, round_=8)]


def test_a_peer_without_a_shadow_is_still_a_neighbour(shadowed: Recovery):
    """All have just joined: the mix takes their weights."""
    outlook = outlook_of(TRAINED)
    shadowed.begin(2, outlook, 0.0)
    actions = shadowed.on_chunk("b1", ask_shadow("b1").message.refusal(), outlook, 1.0)
    assert actions[1] == started("merge from b1, d1")


def test_of_two_adjacent_stages_that_are_lost_both_come_back(shadowed: Recovery):
    """The peers that kept the second's weights died with the first: those two stages before have them as well."""
    rest = outlook_of(view_of(info("a1", round=8), info("d1", round=8)))
    assert shadowed.begin(2, rest, 0.0)[1:] == [ask_shadow("a1")]


def test_a_bad_shadow_is_not_tried_twice(shadowed: Recovery):
    """Its hash is wrong: the next rung, not the same again for ever."""
    outlook = outlook_of(TRAINED)
    shadowed.begin(2, outlook, 0.0)
    shadowed.on_chunk("b1", chunk(kind=WeightsKind.SHADOW, count=1), outlook, 1.0)
    shadowed.on_done(False, 2.0)
    assert shadowed.on_deadline(outlook, 2.0 + RETRY_S)[0] == started("merge from b1, d1")


def test_an_end_stage_copies_the_one_neighbour_it_has():
    end = Recovery("d9", NO_SHADOWS)
    assert end.begin(3, outlook_of(view_of("a1", info("c1", round=7))), 0.0) == [
        Count(name="recovery-started", detail="stage 3: copy from c1", notable=True),
        ask("c1", kind=WeightsKind.WEIGHTS),
    ]


def test_nobody_asks_itself():
    """Found by the simulator: an adopter's own old record was the best neighbour in its view."""
    adopter = Recovery("d1", NO_SHADOWS)
    outlook = outlook_of(view_of("a1", info("b1", round=7), info("d1", round=9), info("d2", round=7)))
    assert [action.to for action in adopter.begin(2, outlook, 0.0)[1:]] == ["b1", "d2"]


def test_a_donor_that_refuses_is_replaced(recovery: Recovery):
    outlook = outlook_of(view_of(info("c1", round=7), info("c2", round=7)))
    first = recovery.begin(2, outlook, 0.0)[-1].to
    other = "c2" if first == "c1" else "c1"
    refusal = chunk(count=0, packet=None)
    actions = recovery.on_chunk(first, refusal, outlook, 1.0)
    assert actions[0] == Count(name="donor-failed", detail=f"{first} cannot serve", notable=True)
    assert actions[-1] == ask(other)


def test_a_silent_donor_is_replaced(recovery: Recovery):
    outlook = outlook_of(view_of(info("c1", round=7), info("c2", round=7)))
    first = recovery.begin(2, outlook, 0.0)[-1].to
    assert recovery.next_deadline() == CHUNK_LIMIT_S
    assert recovery.on_deadline(outlook, CHUNK_LIMIT_S)[-1].to != first


def test_when_all_donors_have_failed_they_are_asked_again(recovery: Recovery):
    """Never initial weights in the middle of a trained model: better to be late."""
    outlook = outlook_of(view_of(info("c1", round=7)))
    recovery.begin(2, outlook, 0.0)
    lost = recovery.on_peer_lost("c1", outlook, 1.0)
    assert lost == [Count(name="donor-failed", detail="c1 lost", notable=True)]
    assert recovery.on_deadline(outlook, 1.0 + RETRY_S) == [started("catch-up from c1"), ask("c1")]


def test_neighbours_that_all_failed_are_no_reason_for_initial_weights(recovery: Recovery):
    outlook = outlook_of(TRAINED)
    recovery.begin(2, outlook, 0.0)
    recovery.on_peer_lost("b1", outlook, 1.0)
    recovery.on_peer_lost("d1", outlook, 2.0)
    assert recovery.state is RecoveryState.COLLECTING
    assert recovery.next_deadline() == 2.0 + RETRY_S


def test_while_a_middle_stage_has_trained_nobody_starts_with_initial_weights(recovery: Recovery):
    """Stages 1 and 2 are out of sight, as after a split: stage 2 comes back first, from stage 3, and then stage 1.

    Found by the simulator, seeds 2 and 5 of 200 peers.
    """
    assert recovery.begin(1, outlook_of(view_of("a1", info("d1", round=8))), 0.0) == []
    assert recovery.state is RecoveryState.COLLECTING
    assert recovery.next_deadline() == RETRY_S


def test_a_suspect_is_not_asked_but_not_forgotten(recovery: Recovery):
    """Its record still stands: wait for it, or for its record to lapse."""
    outlook = outlook_of(view_of(info("c1", round=7)))
    outlook.suspect("c1", 0.0)
    assert recovery.begin(2, outlook, 0.0) == []
    assert recovery.state is RecoveryState.COLLECTING


def test_dead_siblings_do_not_hold_up_a_merge(recovery: Recovery):
    """Found by the simulator: an adopter asked the stage's killed replica until its record lapsed."""
    outlook = outlook_of(view_of("a1", info("b1", round=7), info("c1", round=7), info("d1", round=7)))
    outlook.suspect("c1", 0.0)
    assert recovery.begin(2, outlook, 0.0)[0] == started("merge from b1, d1")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (chunk(stage=1), "another stage than was asked for"),
        (chunk(kind=WeightsKind.WEIGHTS), "another kind"),
    ],
)
def test_a_donor_that_answers_something_else_has_failed(recovery: Recovery, wrong: WeightsChunk, why: str):
    outlook = outlook_of(view_of(info("c1", round=7)))
    recovery.begin(2, outlook, 0.0)
    failed = recovery.on_chunk("c1", wrong, outlook, 1.0)
    assert failed[0] == Count(name="donor-failed", detail="c1 cannot serve", notable=True), why


def test_late_and_foreign_chunks_are_ignored(recovery: Recovery):
    outlook = outlook_of(view_of(info("c1", round=7)))
    recovery.begin(2, outlook, 0.0)
    recovery.on_chunk("c1", chunk(0, count=3), outlook, 1.0)
    assert recovery.on_chunk("c1", chunk(0, count=3), outlook, 1.1) == []
    assert recovery.on_chunk("c1", chunk(1, count=3, snapshot="other"), outlook, 1.2) == []
    assert recovery.on_chunk("c2", chunk(1, count=3), outlook, 1.3) == []
    assert recovery.on_chunk("c1", chunk(1, count=3), outlook, 1.4) == [ask("c1", snapshot="s", index=2)]


def test_weights_that_do_not_fit_change_nothing(recovery: Recovery):
    """The hash or the schema is wrong: pause, and begin again."""
    outlook = outlook_of(view_of(info("c1", round=7)))
    recovery.begin(2, outlook, 0.0)
    recovery.on_chunk("c1", chunk(0, count=1), outlook, 1.0)
    assert recovery.on_done(False, 2.0) == [Count(name="recovery-refused", detail="catch-up", notable=True)]
    assert recovery.next_deadline() == 2.0 + RETRY_S


def test_a_packet_is_kept_as_it_came(recovery: Recovery):
    """The bytes go to the compute side unread; only it can tell whether the hash fits."""
    odd = TensorPacket(dtype="uint8", shape=(1,), codec=CHUNK.codec, data=b"\x07")
    outlook = outlook_of(view_of(info("c1", round=7)))
    recovery.begin(2, outlook, 0.0)
    merged = recovery.on_chunk("c1", chunk(0, count=1, packet=odd), outlook, 1.0)[0]
    assert isinstance(merged, RunRecovery)
    assert merged.donors[0].packets == (odd,)
