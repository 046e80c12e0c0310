"""Chaos drawn from a seed, carried out on a swarm that is played by hand, and told from flight recorders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.identity import Identity
from peer.chaos import Blow, Chaos, ChaosEvent, Rates, Strike, Victim, draw
from peer.chaos_report import answers, in_words, summary
from peer.cli import main
from peer.flights import LossPoint, loss_ratio, read_flights
from peer.run_file import write_run_file
from peer.status import PeerStatus
from protocols.run_spec import preset
from protocols.swarm import PeerState

SPEC = preset("nano")
SEEDS = st.integers(0, 2**32)
PERIODS_S = st.floats(0.5, 500.0)


# ---- the schedule ---------------------------------------------------------------------------------------------------


@given(SEEDS, PERIODS_S, PERIODS_S, PERIODS_S, st.integers(1, 8))
def test_each_period_has_one_blow_of_its_kind_and_all_come_in_time(
    seed: int, kill_s: float, empty_s: float, freeze_s: float, num_stages: int
):
    rates = Rates(kill_every_s=kill_s, empty_every_s=empty_s, freeze_every_s=freeze_s)
    events = list(islice(draw(seed, num_stages, rates), 200))
    assert events == list(islice(draw(seed, num_stages, rates), 200))  # the seed is all
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    for blow, every_s, away_s in (
        (Blow.KILL, kill_s, rates.restart_s),
        (Blow.EMPTY, empty_s, rates.restart_s),
        (Blow.FREEZE, freeze_s, rates.freeze_s),
    ):
        mine = [event for event in events if event.blow is blow]
        for period, event in enumerate(mine):
            assert period * every_s <= event.at_s <= (period + 1) * every_s
            assert away_s[0] <= event.away_s <= away_s[1]
            assert 0 <= event.pick < 1
        stages = [event.stage for event in mine]
        if blow is not Blow.EMPTY:
            assert set(stages) <= {None}
        for start in range(0, len(stages) - num_stages + 1, num_stages):
            assert blow is not Blow.EMPTY or sorted(stages[start : start + num_stages]) == [
                *range(num_stages)
            ]  # type: ignore[type-var]


@given(SEEDS, PERIODS_S, PERIODS_S)
def test_another_rate_of_one_kind_leaves_the_others_where_they_were(seed: int, one_s: float, other_s: float):
    """So that two runs differ in what was meant to differ."""

    def kills(empty_every_s: float) -> list[ChaosEvent]:
        rates = Rates(kill_every_s=20.0, empty_every_s=empty_every_s, freeze_every_s=0)
        within = takewhile(lambda event: event.at_s < 200, draw(seed, 5, rates))
        return [event for event in within if event.blow is Blow.KILL]

    assert kills(one_s) == kills(other_s) == kills(0)
    assert len(kills(0)) == 10


def test_without_any_rate_nothing_happens():
    assert list(draw(1, 5, Rates(kill_every_s=0, empty_every_s=0, freeze_every_s=0))) == []


# ---- carried out ----------------------------------------------------------------------------------------------------


@dataclass
class AConfig:
    data_dir: Path


@dataclass(eq=False)
class APeer:
    label: str
    config: AConfig
    status: PeerStatus | None = None
    is_alive: bool = True
    is_frozen: bool = False

    @property
    def name(self) -> str:
        return self.label

    def serve(self, stage: int, round_: int = 3, state: PeerState = PeerState.SERVING) -> APeer:
        self.status = PeerStatus(
            peer=f"id-{self.label}", name=self.label, run_id="r", stage=stage, state=state, round=round_
        )
        return self


@dataclass
class ASwarm:
    """Two peers of stage 0, two of stage 1, one of stage 2; no processes."""

    peers: list[APeer] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    spec: Any = SPEC

    def __post_init__(self) -> None:
        for stage in (0, 0, 1, 1, 2):
            self.add().serve(stage)
        self.log.clear()

    def add(self, data_dir: Path | None = None) -> APeer:
        label = f"p{len(self.peers) + sum(line.startswith('kill') for line in self.log)}"
        self.log.append(f"add {label} {data_dir or 'new'}")
        self.peers.append(APeer(label, AConfig(data_dir or Path(label))))
        return self.peers[-1]

    def kill_peer(self, peer: APeer) -> None:
        self.log.append(f"kill {peer.label}")
        peer.is_alive = False

    def forget(self, peer: APeer) -> None:
        assert not peer.is_alive
        self.peers.remove(peer)

    def freeze(self, peer: APeer) -> None:
        self.log.append(f"freeze {peer.label}")
        peer.is_frozen = True

    def thaw(self, peer: APeer) -> None:
        self.log.append(f"thaw {peer.label}")
        peer.is_frozen = False


def an_event(at_s: float, blow: Blow, *, pick: float = 0.0, stage: int | None = None) -> ChaosEvent:
    return ChaosEvent(at_s=at_s, blow=blow, pick=pick, away_s=2.0, stage=stage)


def a_chaos(swarm: ASwarm, *events: ChaosEvent) -> Chaos:
    return Chaos(swarm, iter(events))  # type: ignore[arg-type]


def test_a_killed_relay_is_replaced_by_a_newcomer_that_chooses_its_stage():
    swarm = ASwarm()
    chaos = a_chaos(swarm, an_event(5.0, Blow.KILL, pick=0.5))
    assert chaos.advance(100.0) == []  # the clock of events starts here
    assert chaos.advance(104.9) == []
    assert chaos.advance(105.0) == ["round 3: stage 1: p2 p2 killed"]
    assert not chaos.is_over
    assert chaos.advance(106.9) == []
    assert chaos.advance(107.0) == ["p5 joins"]
    assert swarm.log == ["kill p2", "add p5 new"]
    assert not chaos.is_over
    swarm.peers[-1].serve(1)
    chaos.advance(108.0)
    assert chaos.is_over
    [strike] = chaos.strikes
    assert (strike.at_s, strike.round, [victim.peer for victim in strike.victims]) == (105.0, 3, ["id-p2"])


def test_an_emptied_first_stage_comes_back_with_its_checkpoints():
    """Nobody else has the embedding."""
    swarm = ASwarm()
    chaos = a_chaos(swarm, an_event(0.0, Blow.EMPTY, stage=0))
    chaos.advance(0.0)
    chaos.advance(2.0)
    assert swarm.log == ["kill p0", "kill p1", "add p5 p0", "add p6 p1"]


def test_a_frozen_peer_is_thawed_unless_it_was_killed_meanwhile():
    swarm = ASwarm()
    freeze = an_event(0.0, Blow.FREEZE, pick=0.9)
    chaos = a_chaos(swarm, freeze)
    assert chaos.advance(0.0) == ["round 3: stage 2: p4 p4 frozen for 2.0 s"]
    assert chaos.advance(2.0) == ["p4 goes on"]
    assert chaos.is_over
    chaos = a_chaos(swarm, freeze, an_event(1.0, Blow.EMPTY, stage=2))
    chaos.advance(10.0)
    chaos.advance(11.0)
    chaos.advance(20.0)
    assert swarm.log == ["freeze p4", "thaw p4", "freeze p4", "kill p4", "add p5 new"]


def test_somebody_always_lives_and_the_frozen_are_not_struck_again():
    swarm = ASwarm()
    swarm.peers = swarm.peers[:2]
    swarm.peers[1].is_frozen = True
    chaos = a_chaos(
        swarm, an_event(0.0, Blow.KILL), an_event(0.0, Blow.EMPTY, stage=0), an_event(0.0, Blow.FREEZE)
    )
    assert chaos.advance(0.0) == [
        "chaos: nobody to kill",
        "chaos: nobody to empty",
        "chaos: nobody to freeze",
    ]
    assert chaos.is_over


def test_after_the_last_round_nobody_is_struck_and_a_newcomer_that_was_killed_is_not_waited_for():
    swarm = ASwarm()
    chaos = a_chaos(
        swarm,
        an_event(0.0, Blow.KILL, pick=0.5),
        an_event(3.0, Blow.EMPTY, stage=2),
        an_event(9.0, Blow.KILL),
    )
    chaos.advance(0.0)
    chaos.advance(2.0)
    swarm.peers[-1].serve(2, state=PeerState.CATCHING_UP)
    chaos.advance(3.0)
    assert swarm.log == ["kill p2", "add p5 new", "kill p4", "kill p5"]
    chaos.advance(5.0)
    for peer in swarm.peers[-2:]:
        peer.serve(2)
    swarm.peers[0].serve(0, round_=SPEC.rounds.total_rounds)
    assert chaos.advance(9.0) == []
    assert chaos.is_over


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chaos", "1", "--events", "join at round=1"], "give one of them"),
        (["--compare"], "give --chaos SEED"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_run_file(tmp_path / "run.json", SPEC, Identity.load_or_create(tmp_path / "owner.key"))
    assert main(["up", "--run", str(tmp_path / "run.json"), *arguments]) == 2
    assert message in capsys.readouterr().err


# ---- told -----------------------------------------------------------------------------------------------------------


def count(now: float, name: str, detail: str) -> dict[str, Any]:
    return {"now": now, "what": "Count", "name": name, "detail": detail, "notable": True}


def finished(
    now: float,
    counter: int,
    round_: int = 1,
    *,
    train: bool = True,
    loss: float = 4.0,
    skipped: tuple[int, ...] = (),
) -> dict[str, Any]:
    key = {"is": "WorkKey", "originator": "id-origin", "counter": counter, "attempt": 1}
    return {
        "now": now, "what": "MicrobatchFinished", "key": key, "round": round_, "train": train, "loss": loss,
        "skipped": list(skipped),
    }  # fmt: skip


def record(folder: Path, name: str, *lines: dict[str, Any], rest: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)


def a_strike(at_s: float, blow: Blow, *victims: tuple[str, int]) -> Strike:
    struck = tuple(Victim(label=peer, name=peer, peer=peer, stage=stage) for peer, stage in victims)
    return Strike(blow=blow, at_s=at_s, round=1, victims=struck, away_s=1.0)


def test_what_was_done_is_put_down_to_the_blow_that_it_answers(tmp_path: Path):
    record(
        tmp_path / "p0", "flight.jsonl",
        finished(9.0, 0), finished(12.5, 1), finished(19.0, 2), finished(21.0, 3, skipped=(2,)), finished(31.0, 4),
        count(10.2, "retry", "m:origin/2#1 victim lost"),
        count(20.4, "retry", "m:origin/4#1 others unreachable"),
        count(25.0, "recovery-done", "stage 1: catch-up"),
        count(26.0, "recovery-done", "stage 2: merge"),
        count(26.5, "retry", "m:victim/5#1 no answer in time"),  # an originator's own name blames nobody
        count(1.0, "recovery-done", "stage 1: initial"),
    )  # fmt: skip
    record(
        tmp_path / "p1",
        "flight.jsonl",
        count(24.0, "stage-adopted", "stage 1 -> 2"),
        count(24.1, "plan-made", ""),
    )
    strikes = [
        a_strike(10.0, Blow.KILL, ("id-victim", 1)),
        a_strike(20.0, Blow.EMPTY, ("id-others", 2)),
        a_strike(40.0, Blow.FREEZE, ("id-victim", 1)),
    ]
    first, second, third = answers(strikes, read_flights(tmp_path), SPEC)
    assert dict(first.rungs) == {"reroute": 1, "catch-up": 1}
    assert (first.microbatch_s, first.redone_s) == (2.5, 9.0)
    assert dict(second.rungs) == {"skip": 1, "merge": 1, "adoption": 1, "reroute": 2}
    assert (second.microbatch_s, second.redone_s) == (1.0, 11.0)
    assert (dict(third.rungs), third.microbatch_s, third.redone_s) == ({}, None, None)


def test_recorders_are_read_through_rotation_and_half_lines(tmp_path: Path):
    """A peer that was killed wrote half a line, and came back to the same file."""
    half = '{"now": 3.0, "what": "Count", "na'
    record(
        tmp_path / "p0", "flight.jsonl.1", finished(1.0, 0), {"now": 1.5, "what": "RoundFinished", "round": 1}
    )
    lines = [finished(4.0, 1), {"now": 4.5, "what": "RoundFinished", "round": 2}]
    whole = "".join("\n" + json.dumps(line) for line in lines)
    record(tmp_path / "p0", "flight.jsonl", finished(2.0, 7), rest=half + whole + "\n")
    record(tmp_path / "p1", "flight.jsonl", {"now": 1.7, "what": "RoundFinished", "round": 1})
    flights = read_flights(tmp_path)
    assert [(each.at_s, each.originator, each.counter) for each in flights.finished] == [
        (1.0, "origin", 0), (2.0, "origin", 7), (4.0, "origin", 1),
    ]  # fmt: skip
    assert flights.round_ends_s == {"p0": (1.5, 4.5)}  # p1 only relays
    assert flights.round_s() == 3.0


def test_losses_are_compared_at_equal_tokens():
    def curve(*points: tuple[int, float]) -> list[LossPoint]:
        return [LossPoint(at_s=0.0, round=0, tokens=tokens, loss=loss) for tokens, loss in points]

    undisturbed = curve((0, 6.0), (100, 4.0), (200, 2.0))
    assert loss_ratio(curve((50, 5.0), (150, 3.0), (300, 1.0)), undisturbed, last=2) == pytest.approx(1.0)
    assert loss_ratio(curve((100, 4.4)), undisturbed) == pytest.approx(1.1)
    assert loss_ratio(curve((300, 1.0)), undisturbed) != loss_ratio(curve((300, 1.0)), undisturbed)  # NaN


def test_the_report_says_in_words_and_numbers_what_happened(tmp_path: Path):
    lines: Iterator[dict[str, Any]] = (finished(10.0 + n, n, round_=n) for n in range(4))
    record(tmp_path / "p0", "flight.jsonl", *lines, finished(13.5, 9, 3, train=False, loss=3.5))
    flights = read_flights(tmp_path)
    found = answers([a_strike(11.5, Blow.KILL, ("id-victim", 1))], flights, SPEC)
    status = PeerStatus(
        peer="p", name="p", run_id="r", stage=1, state=PeerState.SERVING, counters={"retry": 2.0}
    )
    told = json.loads(json.dumps(summary(SPEC, found, flights, [status, status], flights)))
    assert told["tokens"] == 4 * SPEC.tokens_per_microbatch
    assert (told["validation_loss"], told["loss_ratio"]) == (3.5, 1.0)
    assert told["counters_of_the_living"] == {"retry": 4}
    [event] = told["events"]
    assert (event["blow"], event["microbatch_s"], event["victims"][0]["stage"]) == ("kill", 0.5, 1)
    text = in_words(found, told)
    assert "stage 1: id-victim id-victim killed" in text
    assert "median 0.50 s, worst 0.50 s" in text
    assert text.endswith("validation loss 3.500, 1.0000 times that of the undisturbed run at equal tokens")
