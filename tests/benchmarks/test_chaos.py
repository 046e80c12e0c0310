"""A5, A7 and A10 from recorded runs; the values are `python -m benchmarks chaos`."""

from __future__ import annotations

import math
from itertools import takewhile

import pytest

from benchmarks import chaos
from benchmarks.chaos import (
    FULL,
    QUICK,
    SEED,
    STAGES,
    Calm,
    Cost,
    Disturbed,
    Size,
    chaos_bars,
    chaos_spec,
    pair_bars,
)
from benchmarks.leaks import LAUNCHER, Sample, Watch
from peer.chaos import Blow, Strike, Victim, draw
from peer.chaos_report import Answer
from peer.flights import Finished, Flights

SPEC = chaos_spec()


def a_microbatch(at_s: float, round_: int, *, train: bool = True, loss: float = 4.0) -> Finished:
    return Finished(at_s=at_s, originator="o", counter=0, round=round_, train=train, loss=loss, skipped=())


def flights(*finished: Finished, round_ends_s: tuple[float, ...] = (0.0, 0.5, 1.0)) -> Flights:
    return Flights(finished=finished, counted=(), round_ends_s={"p00": round_ends_s})


def a_strike(at_s: float, blow: Blow = Blow.KILL, *stages: int) -> Strike:
    victims = tuple(Victim(label="p", name="p", peer="p", stage=stage) for stage in stages or (1,))
    return Strike(blow=blow, at_s=at_s, round=0, victims=victims, away_s=1.0)


def a_calm(*finished: Finished, pair: tuple[Strike, ...] = ()) -> Calm:
    cost = Cost(idle=0.12, busy=1.8)
    return Calm(flights=flights(*finished), begun_s=0.0, calm_s=50.0, cost=cost, singles=(), pair=pair)


@pytest.mark.parametrize("size", [FULL, QUICK])
def test_the_schedule_holds_what_the_bars_ask_for(size: Size):
    """The least replicas that an emptied stage can have is one."""
    events = list(takewhile(lambda event: event.at_s < size.chaos_s, draw(SEED, STAGES, size.rates)))
    emptied = {event.stage for event in events if event.blow is Blow.EMPTY}
    assert len(emptied) >= size.stages_emptied
    single = sum(event.blow is Blow.KILL for event in events)
    assert single + 2 * len(emptied) >= size.kills_min
    assert any(event.blow is Blow.FREEZE for event in events)


def test_a_kill_is_judged_in_round_times_of_the_undisturbed_swarm():
    answers = [Answer(strike=a_strike(60.0), microbatch_s=seconds) for seconds in (0.2, 0.4, 1.5)]
    bars = {bar.id: bar for bar in chaos.recovery_bars(a_calm(), answers)}
    assert (bars["A7-median"].value, bars["A7-median"].passed) == (pytest.approx(0.8), True)
    assert (bars["A7-worst"].value, bars["A7-worst"].passed) == (pytest.approx(3.0), False)
    assert bars["A7-cost"].value == pytest.approx(0.01)
    never = [Answer(strike=a_strike(60.0))]
    assert not chaos.recovery_bars(a_calm(), never)[0].passed
    assert not chaos.recovery_bars(a_calm(), [])[0].passed


def a_disturbed(*strikes: Strike, loss: float) -> Disturbed:
    watch = Watch()
    for label, step in ((LAUNCHER, 0), ("p03", 4)):
        watch.samples[label] = [Sample(at_s=n, rss_bytes=100 + step * n, num_fds=10) for n in range(30)]
    finished = [a_microbatch(float(n), n) for n in range(40)]
    return Disturbed(
        flights=flights(*finished, a_microbatch(20.5, 20, train=False, loss=loss)),
        strikes=strikes,
        begun_s=0.0,
        serving=12,
        watch=watch,
        survivors=("p03",),
        processes_left=0,
    )


def test_chaos_is_judged_by_what_was_struck_what_it_cost_and_what_piled_up():
    calm = a_calm(
        *(a_microbatch(float(n), n) for n in range(40)),
        a_microbatch(10.5, 10, train=False, loss=5.0),
        a_microbatch(30.5, 30, train=False, loss=3.0),
    )
    strikes = (a_strike(5.0), a_strike(7.0, Blow.EMPTY, 2, 2), a_strike(8.0, Blow.FREEZE), a_strike(99.0))
    bars = {bar.id: bar.value for bar in chaos_bars(SPEC, a_disturbed(*strikes, loss=4.08), calm, QUICK)}
    assert bars == {
        "A10-kills": 4,
        "A10-emptied": 1,
        "A10-stood-still": 1,  # the last blow came after the last microbatch
        "A10-serving": 12,
        "A10-loss": pytest.approx(1.02),
        "A10-memory": pytest.approx((100 + 4 * 24.5) / (100 + 4 * 14.5)),
        "A10-fds": 1.0,
        "A10-launcher": 1.0,
        "A10-processes": 0,
    }


def test_growth_is_unknown_of_a_peer_that_was_seen_too_seldom():
    watch = Watch(samples={"p": [Sample(at_s=n, rss_bytes=1, num_fds=1) for n in range(9)]})
    assert all(math.isnan(growth) for growth in watch.growth("p"))
    assert watch.survivors(["p", "q"], 8.0) == ["p"]
    assert watch.survivors(["p"], 8.5) == []


def test_a_rollback_after_the_loss_of_a_pair_is_seen():
    pair = (a_strike(60.0, Blow.EMPTY, 2), a_strike(60.0, Blow.EMPTY, 3))
    before, after = a_microbatch(59.0, 30), a_microbatch(61.0, 29)
    losses = (a_microbatch(58.0, 20, train=False, loss=4.0), a_microbatch(80.0, 40, train=False, loss=3.9))
    first, second = pair_bars(SPEC, a_calm(before, after, *losses, pair=pair))
    assert (first.value, first.passed) == (1, True)
    assert (second.value, second.passed) == (pytest.approx(0.975), True)
    first, _ = pair_bars(SPEC, a_calm(before, a_microbatch(61.0, 20), *losses, pair=pair))
    assert not first.passed
    assert not pair_bars(SPEC, a_calm())[0].passed
