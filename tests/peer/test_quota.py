"""What a peer may cost us, in numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peer.quota import (
    BACKOFF_MAX_S,
    IGNORE_S,
    REFUSAL_WINDOW_S,
    REFUSALS_MAX,
    Average,
    Backoff,
    Bucket,
    Budget,
    Offences,
)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 50)), min_size=1, max_size=50))
def test_a_sender_that_obeys_never_exceeds_burst_and_rate(sends: list[tuple[float, float]]):
    """Waiting as long as the bucket says keeps any sender within burst + rate * time, plus one frame of debt."""
    bucket = Bucket(rate=10.0, burst=20.0, now=0.0)
    now = total = 0.0
    for pause_s, amount in sends:
        now += pause_s + bucket.charge(amount, now + pause_s)
        total += amount
        assert total <= 20.0 + 10.0 * now + 1e-6


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.randoms())
def test_a_budget_is_never_overdrawn_and_serves_in_order(amounts: list[int], random):
    """Half-read tensors of all peers fit the cap; who came first is served first, and nobody is forgotten."""
    budget = Budget(100)
    held: list[int] = []
    granted: list[int] = []
    asked: list[int] = []
    for amount in amounts:
        if budget.take(amount):
            held.append(amount)
        else:
            asked.append(amount)
            budget.wait(amount, lambda amount=amount: (granted.append(amount), held.append(amount)))
        assert sum(held) <= 100
        if held and random.random() < 0.5:
            budget.give_back(held.pop(random.randrange(len(held))))
            assert sum(held) <= 100
    while held:
        budget.give_back(held.pop())
    assert granted == asked


def test_who_hangs_up_while_waiting_does_not_block_those_behind():
    """The first in line wants most of the budget and dies: the second must not wait for it."""
    budget = Budget(100)
    assert budget.take(80)
    granted: list[str] = []
    forget = budget.wait(90, lambda: granted.append("large"))
    budget.wait(20, lambda: granted.append("small"))
    assert granted == []
    forget()
    assert granted == ["small"]
    assert not budget.take(1)


def test_twenty_refusals_in_a_minute_silence_a_peer_for_a_minute():
    offences = Offences()
    assert not any(offences.add(now=i) for i in range(REFUSALS_MAX - 1))
    assert not offences.ignored(20.0)
    assert offences.add(now=20.0)
    assert offences.ignored(20.0 + IGNORE_S - 1)
    assert not offences.ignored(20.0 + IGNORE_S)
    assert offences.clean(20.0 + IGNORE_S)


def test_rare_refusals_are_forgiven():
    """A peer with an older plan is refused now and then for hours: that is life, not an attack."""
    offences = Offences()
    assert not any(offences.add(now=i * REFUSAL_WINDOW_S / 10) for i in range(500))


def test_a_dead_peer_is_dialled_ever_less_and_a_living_one_at_once():
    backoff = Backoff()
    assert backoff.wait_s(0.0) == 0
    waits = []
    for _ in range(12):
        backoff.failed(100.0, "dial-failed")
        waits.append(backoff.wait_s(100.0))
    assert waits == sorted(waits)
    assert waits[-1] == BACKOFF_MAX_S
    assert backoff.reason == "dial-failed"
    assert backoff.wait_s(100.0 + BACKOFF_MAX_S) == 0
    backoff.clear()
    assert backoff.wait_s(100.0) == 0


def test_an_average_starts_with_its_first_sample_and_follows():
    average = Average()
    assert average.value is None
    average.add(10.0)
    assert average.value == 10.0
    for _ in range(50):
        average.add(2.0)
    assert 2.0 <= average.value < 2.01
