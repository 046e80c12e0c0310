"""The owning side: window, attempts, rounds. Nothing is lost, nothing runs twice at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from peer.simulator.swarm import tiny_spec
from protocols.actions import (
    Count,
    DropStash,
    FetchBatch,
    MicrobatchFinished,
    RunBackward,
    RunForward,
    RunLoss,
    Send,
)
from protocols.costs import Costs
from protocols.events import BatchReady
from protocols.messages import Release, RoundPlan, Undeliverable, WorkKey
from protocols.microbatch import VALIDATION_BASE, validation_batch
from protocols.originator import HELD_RETRY_S, Originator
from protocols.rounds import AWAY_ROUND, RoundLedger
from protocols.run_spec import RunSpec
from protocols.trips import TRIP_FLOOR_S
from tests.protocols.builders import EVERYBODY, PACKET, PATH, SPEC, activation, gradient, key, view_of

ONE = tiny_spec(4, rounds={"microbatches": 1, "attempts_max": 2})
THIN = view_of("a1", "b1", "c1", "d1")  # one path there is
ATTEMPT_S = ONE.liveness.attempt_s
ROUND_S = ONE.liveness.round_s


def an_originator(spec: RunSpec = ONE) -> Originator:
    return Originator("a1", spec, RoundLedger(), Costs("a1"))


@pytest.fixture
def originator() -> Iterator[Originator]:
    """`a1`, one microbatch a round, two attempts."""
    originator = an_originator()
    yield originator
    originator.check_invariants(0.0)


def plan(to: str, *keys: WorkKey, round_: int = 0) -> Send:
    return Send(to=to, message=RoundPlan(round=round_, keys=keys))


def sent_out(originator: Originator, now: float = 0.0, view=THIN) -> None:
    """The first microbatch is on its way."""
    originator.advance(view, view, now)
    originator.on_batch_ready(BatchReady(key=key(0)))
    actions = originator.on_forward_done(key(0), PACKET, now)
    assert actions == [Send(to="b1", message=activation(key(0), hop=1))]


def returned(originator: Originator, work: WorkKey, now: float) -> list:
    """Forth, loss, back: the rest of a microbatch's life."""
    originator.on_activation(activation(work, hop=4))
    originator.on_loss_done(work, 2.5, PACKET)
    originator.on_gradient("b1", gradient(work, hop=0), now)
    return originator.on_backward_done(work)


def test_a_round_is_announced_to_every_replica_before_it_begins():
    """Also to those that get nothing: they must know that they need not wait."""
    originator = an_originator()
    actions = originator.advance(EVERYBODY, EVERYBODY, 0.0)
    plans = {action.to: action.message.keys for action in actions if isinstance(action, Send)}
    assert sorted(plans) == ["b1", "b2", "c1", "c2", "d1", "d2"]
    assert sorted(len(keys) for keys in plans.values()) == [0, 0, 0, 1, 1, 1]
    assert actions[-1] == FetchBatch(key=key(0), round=0, train=True)


def test_a_peer_that_is_avoided_hears_of_the_round_all_the_same():
    """It lives and would wait for us; only its work we do not trust it with."""
    originator = an_originator()
    actions = originator.advance(EVERYBODY.without(["b2"]), EVERYBODY, 0.0)
    assert plan("b2") in actions


def test_a_microbatch_from_fetch_to_end(originator: Originator):
    work = key(0)
    assert originator.advance(THIN, THIN, 0.0) == [
        *(plan(peer, work) for peer in ("b1", "c1", "d1")),
        FetchBatch(key=work, round=0, train=True),
    ]
    assert originator.on_batch_ready(BatchReady(key=work)) == [RunForward(key=work, packet=None, train=True)]
    assert originator.on_forward_done(work, PACKET, 0.1) == [Send(to="b1", message=activation(work, hop=1))]
    assert originator.on_activation(activation(work, hop=4)) == [RunLoss(key=work, packet=PACKET, train=True)]
    assert originator.on_loss_done(work, 2.5, PACKET) == [Send(to="d1", message=gradient(work, hop=3))]
    assert originator.on_gradient("b1", gradient(work, hop=0), 0.5) == [RunBackward(key=work, packet=PACKET)]
    assert originator.on_backward_done(work) == [
        DropStash(key=work),
        MicrobatchFinished(key=work, round=0, train=True, loss=2.5, skipped=()),
    ]
    assert originator.is_idle


def test_the_window_bounds_what_is_in_flight():
    spec = tiny_spec(4, rounds={"microbatches": 5, "window": 2})
    originator = an_originator(spec)
    fetched = [action.key for action in originator.advance(THIN, THIN, 0.0) if isinstance(action, FetchBatch)]
    assert fetched == [key(0), key(1)]
    assert originator.num_in_flight == 2
    originator.on_batch_ready(BatchReady(key=key(0)))
    originator.on_forward_done(key(0), PACKET, 0.0)
    returned(originator, key(0), 1.0)
    assert originator.advance(THIN, THIN, 1.0) == [FetchBatch(key=key(2), round=0, train=True)]


def test_the_next_round_waits_for_the_own_step():
    """staleness_max 0: a single process's update, exactly."""
    originator = an_originator()
    sent_out(originator)
    returned(originator, key(0), 1.0)
    assert originator.advance(THIN, THIN, 1.0) == []
    originator._ledger.advance()
    assert FetchBatch(key=key(1), round=1, train=True) in originator.advance(THIN, THIN, 2.0)


def test_the_first_round_waits_for_the_wanted_replicas():
    originator = an_originator(tiny_spec(4, rounds={"start_replicas": 2}))
    assert originator.advance(THIN, THIN, 0.0) == []
    assert originator.waiting_for == (0, 1, 2, 3)


def test_a_lost_relay_costs_one_attempt(originator: Originator):
    """Released everywhere, then sent another way; the embedding is not computed again."""
    sent_out(originator)
    view = view_of("a1", "b1", "c2", "d1")
    new = key(0, 2)
    actions = originator.on_peer_lost("c1", view, 1.0)
    released = [Send(to=peer, message=Release(keys=(key(0),))) for peer in ("b1", "c1", "d1")]
    retry = Count(name="retry", detail="m:a1/0#1 c1 lost", notable=True)
    plans = [plan(peer, new) for peer in ("b1", "c2", "d1")]
    assert actions[:7] == [*released, retry, *plans]
    assert [hop.peer for hop in actions[7].message.path] == ["a1", "b1", "c2", "d1"]
    assert actions[7].message.key == new
    assert originator.on_activation(activation(key(0), hop=4)) == []  # #1 comes back after all


def test_a_relay_that_reports_is_believed_about_its_own_path_only(originator: Originator):
    """Slander of a peer that the microbatch never meets must not cost an attempt."""
    sent_out(originator)
    assert originator.is_on_path(Undeliverable(key=key(0), unreachable="d1"))
    assert not originator.is_on_path(Undeliverable(key=key(0), unreachable="d2"))
    assert not originator.is_on_path(Undeliverable(key=key(0, 2), unreachable="d1"))


def test_silence_costs_an_attempt_at_the_deadline(originator: Originator):
    sent_out(originator)
    assert originator.next_deadline() == ATTEMPT_S
    actions = originator.on_deadline(THIN, ATTEMPT_S)
    assert Count(name="retry", detail="m:a1/0#1 no answer in time", notable=True) in actions


def test_deadlines_follow_the_measured_trip_and_double_with_each_try():
    """A relay that waits for its round is slow, not lost: trying ever faster would only add to its load."""
    originator = an_originator()
    sent_out(originator)
    returned(originator, key(0), 0.4)
    originator._ledger.advance()
    originator.advance(THIN, THIN, 10.0)
    originator.on_batch_ready(BatchReady(key=key(1)))
    originator.on_forward_done(key(1), PACKET, 10.0)
    assert originator.next_deadline() == 10.0 + TRIP_FLOOR_S
    originator.on_deadline(THIN, 15.0)
    assert originator.next_deadline() == 15.0 + 2 * TRIP_FLOOR_S


def test_without_a_path_a_microbatch_is_held_until_there_is_one(originator: Originator):
    """Two stages are gone: more than may be skipped. Nothing is thrown away."""
    sent_out(originator)
    poor = view_of("a1", "b1")
    originator.on_peer_lost("c1", poor, 1.0)
    assert originator.next_deadline() == 1.0 + HELD_RETRY_S
    assert originator.waiting_for == (2, 3)
    originator.on_deadline(poor, 2.0)
    actions = originator.on_deadline(THIN, 3.0)
    assert actions[-1].message.key == key(0, 2)
    assert actions[-1].to == "b1"


def test_a_burst_of_refusals_is_no_reason_to_give_up():
    """Found by the simulator: six quick failures lost a microbatch that a second later would have gone through."""
    originator = an_originator()
    sent_out(originator)
    for attempt in range(1, 6):
        refused = Undeliverable(key=key(0, attempt), unreachable="b1")
        originator.on_undeliverable(refused, THIN, 1.0)
    assert originator.num_in_flight == 1


def test_a_hopeless_microbatch_is_given_up_loudly():
    """Tried often enough and longer than anybody waits for a round: else one poisoned batch stops the run."""
    originator = an_originator()
    sent_out(originator)
    originator.on_deadline(THIN, ATTEMPT_S)
    refused = Undeliverable(key=key(0, 2), unreachable="b1")
    actions = originator.on_undeliverable(refused, THIN, ROUND_S)
    assert actions[-3:] == [
        Count(name="microbatch-given-up", detail="m:a1/0#2 b1 unreachable", notable=True),
        DropStash(key=key(0, 2)),
        MicrobatchFinished(key=key(0, 2), round=0, train=True, loss=None, skipped=()),
    ]
    assert originator.is_idle


def test_what_comes_back_off_its_path_is_not_ours(originator: Originator):
    """A hostile relay may name another path, or send a gradient that is not its to send: only counted."""
    sent_out(originator)
    work = key(0)
    made_up = (PATH[0], PATH[2], PATH[1], PATH[3])
    (counted,) = originator.on_activation(activation(work, hop=4, path=made_up))
    assert isinstance(counted, Count)
    originator.on_activation(activation(work, hop=4))
    originator.on_loss_done(work, 2.5, PACKET)
    (counted,) = originator.on_gradient("d1", gradient(work, hop=0), 1.0)
    assert isinstance(counted, Count)
    assert originator.on_gradient("b1", gradient(work, hop=0), 1.0) == [RunBackward(key=work, packet=PACKET)]


def test_a_skipped_stage_is_told(originator: Originator):
    sent_out(originator)
    originator.on_peer_lost("c1", view_of("a1", "b1", "d1"), 1.0)
    work = key(0, 2)
    originator.on_activation(activation(work, hop=3, path=tuple(hop for hop in PATH if hop.stage != 2)))
    originator.on_loss_done(work, 2.5, PACKET)
    originator.on_gradient("b1", gradient(work, hop=0), 1.0)
    assert originator.on_backward_done(work)[-1].skipped == (2,)


def test_validation_batches_are_shared_out_and_never_trained():
    """Batch numbers are the same in every validation, so that its losses can be compared."""
    spec = tiny_spec(4, rounds={"microbatches": 1, "eval_every": 1, "eval_microbatches": 4, "window": 8})
    view = view_of("a1", "a2", "b1", "c1", "d1")
    fetched: dict[str, list[FetchBatch]] = {}
    for me in ("a1", "a2"):
        actions = Originator(me, spec, RoundLedger(), Costs(me)).advance(view, view, 0.0)
        fetched[me] = [action for action in actions if isinstance(action, FetchBatch) and not action.train]
    batches = {me: [validation_batch(action.key.counter) for action in own] for me, own in fetched.items()}
    assert batches == {"a1": [0, 2], "a2": [1, 3]}
    assert all(action.key.counter >= VALIDATION_BASE for own in fetched.values() for action in own)


def test_validation_ends_after_the_loss():
    spec = tiny_spec(4, rounds={"microbatches": 1, "eval_every": 1, "eval_microbatches": 1})
    originator = an_originator(spec)
    work = next(
        action.key for action in originator.advance(THIN, THIN, 0.0) if isinstance(action, FetchBatch)
    )
    originator.on_batch_ready(BatchReady(key=work))
    originator.on_forward_done(work, PACKET, 0.0)
    originator.on_activation(activation(work, hop=4, train=False))
    assert originator.on_loss_done(work, 3.0, None) == [
        DropStash(key=work),
        MicrobatchFinished(key=work, round=0, train=False, loss=3.0, skipped=()),
    ]


def test_who_goes_away_tells_all_and_begins_nothing_more(originator: Originator):
    assert originator.go_away(THIN) == [
        Send(to=peer, message=RoundPlan(round=AWAY_ROUND, keys=())) for peer in ("b1", "c1", "d1")
    ]
    assert originator.advance(THIN, THIN, 1.0) == []


def test_the_run_ends_after_its_last_validation():
    spec = tiny_spec(
        4, rounds={"total_rounds": 1, "microbatches": 1, "eval_every": 1, "eval_microbatches": 1}
    )
    ledger = RoundLedger(1)
    originator = Originator("a1", spec, ledger, Costs("a1"))
    fetched = [action for action in originator.advance(THIN, THIN, 0.0) if isinstance(action, FetchBatch)]
    assert [action.train for action in fetched] == [False]
    assert not originator.is_finished
    originator.on_compute_failed(fetched[0].key, THIN, 1.0)
    assert originator.is_finished


def test_own_compute_that_fails_before_anything_was_sent_gives_up():
    """The data source is broken: there is nothing that another path could do better."""
    originator = an_originator(SPEC)
    originator.advance(THIN, THIN, 0.0)
    actions = originator.on_compute_failed(key(0), THIN, 1.0)
    assert actions[-1] == MicrobatchFinished(key=key(0), round=0, train=True, loss=None, skipped=())
