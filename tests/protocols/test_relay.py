"""The serving side: slots, queue, leases, rounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.actions import (
    Count,
    DropStash,
    RunBackward,
    RunForward,
    Send,
)
from protocols.messages import Undeliverable
from protocols.relay import WAITERS_MAX, Relay
from protocols.rounds import RoundLedger
from tests.protocols.builders import PACKET, PATH, SPEC, activation, gradient, key

SLOTS = SPEC.rounds.slots
LEASE_S = SPEC.liveness.lease_s


@pytest.fixture
def ledger() -> RoundLedger:
    return RoundLedger()


@pytest.fixture
def relay(ledger: RoundLedger) -> Iterator[Relay]:
    """`c1`, at hop 2 of the path a1 -> b1 -> c1 -> d1."""
    relay = Relay("c1", SPEC, ledger)
    yield relay
    relay.check_invariants()


def forward(work, packet=PACKET, train=True) -> RunForward:
    return RunForward(key=work, packet=packet, train=train)


def undeliverable(work, unreachable: str) -> Send:
    return Send(to=work.originator, message=Undeliverable(key=work, unreachable=unreachable))


def test_a_microbatch_goes_forth_and_back(relay: Relay):
    work = key(3)
    assert relay.on_activation(activation(work, hop=2), now=0.0) == [forward(work)]
    assert relay.on_forward_done(work, PACKET) == [Send(to="d1", message=activation(work, hop=3))]
    assert relay.on_gradient("d1", gradient(work, hop=2), now=1.0) == [RunBackward(key=work, packet=PACKET)]
    assert relay.on_backward_done(work, PACKET) == [Send(to="b1", message=gradient(work, hop=1))]
    assert relay.is_idle


@pytest.mark.parametrize(("sender", "hop"), [("b1", 2), ("x9", 2), ("d1", 1)])
def test_a_gradient_off_its_path_moves_nothing(relay: Relay, sender: str, hop: int):
    """Any peer knows the keys that pass through it; only the hop after us may send the gradient."""
    work = key(3)
    relay.on_activation(activation(work, hop=2), now=0.0)
    relay.on_forward_done(work, PACKET)
    (counted,) = relay.on_gradient(sender, gradient(work, hop=hop), now=1.0)
    assert isinstance(counted, Count)
    assert counted.name == "gradient-off-its-path"
    assert relay.on_gradient("d1", gradient(work, hop=2), now=1.0) == [RunBackward(key=work, packet=PACKET)]


def test_the_last_hop_sends_back_to_the_originator(ledger: RoundLedger):
    last = Relay("d1", SPEC, ledger)
    last.on_activation(activation(key(3), hop=3), now=0.0)
    assert last.on_forward_done(key(3), PACKET) == [Send(to="a1", message=activation(key(3), hop=4))]


def test_validation_leaves_nothing_behind(relay: Relay):
    """No backward will follow, so nothing is kept, and no round waits for it."""
    work = key(3)
    relay.on_activation(activation(work, hop=2, train=False), now=0.0)
    assert relay.on_forward_done(work, PACKET) == [
        Send(to="d1", message=activation(work, hop=3, train=False)),
        DropStash(key=work),
    ]
    assert relay.is_idle


def test_a_full_relay_queues_and_admits_in_order(relay: Relay):
    """Backpressure, not refusal: the fourth of three slots waits for the first to end."""
    for counter in range(SLOTS + 2):
        relay.on_activation(activation(key(counter), hop=2), now=0.0)
    assert (relay.num_stashes, relay.num_waiting) == (SLOTS, 2)
    relay.on_forward_done(key(0), PACKET)
    relay.on_gradient("d1", gradient(key(0), hop=2), now=1.0)
    assert relay.on_backward_done(key(0), PACKET)[1:] == [forward(key(SLOTS))]
    assert relay.on_release((key(1),)) == [DropStash(key=key(1)), forward(key(SLOTS + 1))]


def test_the_queue_is_bounded(relay: Relay):
    """Beyond it an originator with a bug, or a hostile one, is told to go elsewhere."""
    for counter in range(SLOTS + WAITERS_MAX):
        relay.on_activation(activation(key(counter), hop=2), now=0.0)
    more = key(SLOTS + WAITERS_MAX)
    assert relay.on_activation(activation(more, hop=2), now=0.0) == [undeliverable(more, "c1")]


def test_work_of_the_next_round_waits_for_the_step(relay: Relay, ledger: RoundLedger):
    """staleness_max 0: a forward of round 1 must not run on the weights of round 0. Validation may."""
    assert relay.on_activation(activation(key(0), hop=2, round_=1), now=0.0) == []
    assert relay.on_activation(activation(key(1), hop=2, round_=1, train=False), now=0.0) != []
    ledger.advance()
    assert relay.admit() == [forward(key(0))]


def test_a_gradient_of_a_released_attempt_is_ignored(relay: Relay):
    """The originator gave up on #1 and sent #2 another way; #1's gradient comes late."""
    relay.on_activation(activation(key(3), hop=2), now=0.0)
    relay.on_forward_done(key(3), PACKET)
    assert relay.on_release((key(3),)) == [DropStash(key=key(3))]
    assert relay.on_gradient("d1", gradient(key(3), hop=2), now=2.0) == []
    assert relay.on_backward_done(key(3), PACKET) == []


def test_a_forward_that_was_released_while_it_ran_goes_nowhere(relay: Relay):
    relay.on_activation(activation(key(3), hop=2), now=0.0)
    relay.on_release((key(3),))
    assert relay.on_forward_done(key(3), PACKET) == []


def test_a_duplicate_is_ignored_and_a_closed_attempt_refused(relay: Relay):
    """Closed: its release overtook it, or its originator was taken for dead. Silence would cost it a deadline."""
    relay.on_activation(activation(key(3), hop=2), now=0.0)
    assert relay.on_activation(activation(key(3), hop=2), now=0.1) == []
    relay.on_release((key(3),))
    assert relay.on_activation(activation(key(3), hop=2), now=0.2) == [undeliverable(key(3), "c1")]


def test_a_stash_dies_with_its_lease(relay: Relay):
    """Originator gone, release lost: nothing may leak."""
    relay.on_activation(activation(key(3), hop=2), now=0.0)
    relay.on_forward_done(key(3), PACKET)
    assert relay.next_deadline() == LEASE_S
    assert relay.on_deadline(LEASE_S) == [
        Count(name="lease-expired", detail="m:a1/3#1"),
        DropStash(key=key(3)),
    ]
    assert relay.is_idle


def test_a_lost_neighbour_is_told_to_the_originator(relay: Relay):
    """d1 is next on the path, b1 before; whoever is lost, this attempt cannot go on."""
    relay.on_activation(activation(key(1), hop=2), now=0.0)
    assert relay.on_peer_lost("d1") == [undeliverable(key(1), "d1"), DropStash(key=key(1))]
    relay.on_activation(activation(key(2), hop=2), now=0.0)
    assert relay.on_peer_lost("b1") == [undeliverable(key(2), "b1"), DropStash(key=key(2))]
    relay.on_activation(activation(key(4), hop=2), now=0.0)
    assert relay.on_peer_lost("d2") == []
    assert relay.on_undelivered(key(4), "d1") == [undeliverable(key(4), "d1"), DropStash(key=key(4))]


def test_a_lost_originator_frees_its_slots_and_is_told(relay: Relay):
    """Found by the simulator: only an ack was lost, and the living originator waited out its whole deadline."""
    relay.on_activation(activation(key(1), hop=2), now=0.0)
    assert relay.on_peer_lost("a1") == [undeliverable(key(1), "a1"), DropStash(key=key(1))]
    assert relay.is_idle


def test_a_draining_relay_takes_nothing_new_and_gives_all_back(relay: Relay):
    relay.on_activation(activation(key(1), hop=2), now=0.0)
    relay.draining = True
    assert relay.on_activation(activation(key(2), hop=2), now=0.0) == [undeliverable(key(2), "c1")]
    assert relay.drop_all() == [undeliverable(key(1), "c1"), DropStash(key=key(1))]


def test_failed_compute_goes_back_to_the_originator(relay: Relay):
    relay.on_activation(activation(key(1), hop=2), now=0.0)
    assert relay.on_compute_failed(key(1)) == [undeliverable(key(1), "c1"), DropStash(key=key(1))]
    assert relay.on_compute_failed(key(1)) == []


def test_work_depends_on_the_whole_path(relay: Relay):
    """A frozen peer further on hangs us too; the driver pings them all."""
    relay.on_activation(activation(key(1), hop=2), now=0.0)
    assert relay.depends_on() == {hop.peer for hop in PATH}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("come", "forward", "gradient", "backward", "release", "lose")), st.integers(0, 9)
    ),
    max_size=60,
)


@given(STEPS)
def test_slots_always_add_up(steps: list[tuple[str, int]]):
    """Whatever comes in whatever order: no slot leaks, and all of them are free after everything is released."""
    relay = Relay("c1", SPEC, RoundLedger())
    for step, counter in steps:
        match step:
            case "come":
                relay.on_activation(activation(key(counter), hop=2), now=0.0)
            case "forward":
                relay.on_forward_done(key(counter), PACKET)
            case "gradient":
                relay.on_gradient("d1", gradient(key(counter), hop=2), now=0.0)
            case "backward":
                relay.on_backward_done(key(counter), PACKET)
            case "release":
                relay.on_release((key(counter),))
            case _:
                relay.on_peer_lost("d1" if counter % 2 else "b1")
        relay.check_invariants()
    relay.on_release(tuple(key(counter) for counter in range(10)))
    assert relay.is_idle
    assert relay.next_deadline() is None
