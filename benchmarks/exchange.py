"""N4, N6 and N10: averaging and joining between real processes on loopback, some of them killed with signal 9.

A tiny model of three stages; all that is measured happens among the replicas of its middle stage. What a replica gets
in a pair round is what its partner sent, so bytes are read from the receivers' counters. Times are those of flight
recorders: from an outer step's due time until it is applied, training going on meanwhile.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.bars import Bar, Report
from peer.flights import lines_of
from peer.launch import LocalPeer, LocalSwarm
from protocols.admission import stage_parameters
from protocols.run_spec import RunSpec, preset
from protocols.swarm import PeerState

MIDDLE = 1
EXCHANGE_S = 5.0  # longest wait for a partner
OUTER_STEPS = 6  # after which the spread must be what it was
CALM_ROUNDS = 80  # before the first kill: the learning rate, and with it the spread, has stopped growing
JOIN_LIMIT_S, OUTER_LIMIT_S = 60.0, 120.0
DONORS, JOINERS = 3, 4
SEED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """One pair round of one replica."""

    at_s: float
    peer: str
    outer_step: int
    with_partner: bool
    apart: float
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """An undisturbed swarm."""

    message_share: float  # bytes that a replica got in a pair round / the bytes of a fp32 tensor of the stage
    waited_s: float  # median


def exchange_spec(replicas: int) -> RunSpec:
    fields = preset("pico", f"exchange-{replicas}", seed=SEED).model_dump()
    fields["rounds"] |= {"rows": 2, "seq_len": 64, "microbatches": 2 * replicas, "window": 2 * replicas,
                         "eval_every": 0, "slots": 4, "total_rounds": 1_000_000, "start_replicas": 1}  # fmt: skip
    fields["outer"] |= {"inner_steps": 4}
    fields["liveness"] |= {"heartbeat_s": 2.0, "record_ttl_s": 8.0, "view_poll_s": 1.0, "ping_s": 2.0,
                           "exchange_s": EXCHANGE_S}  # fmt: skip
    return RunSpec.model_validate(fields)


def run(*, quick: bool) -> Report:
    outer_steps, kills = (6, 4) if quick else (20, 20)
    four, eight = (undisturbed(replicas, outer_steps) for replicas in (4, 8))
    seen = killed(kills)
    waited_s = max((each.waited_s for each in seen.averaged), default=float("nan"))
    joined = joining()
    bars = (
        Bar(id="N4-bytes-4", value=four.message_share, op="<=", limit=1.03,
            what="bytes a replica sends in a pair round / fp32 bytes of its stage, 4 replicas"),
        Bar(id="N4-bytes-8", value=eight.message_share, op="<=", limit=1.03, what="the same, 8 replicas"),
        Bar(id="N4-time", value=eight.waited_s / four.waited_s, op="<=", limit=1.25,
            what="seconds from due to applied, 8 replicas / 4"),
        Bar(id="N6-blocked", value=waited_s, op="<=", limit=EXCHANGE_S + 1,
            what=f"longest wait in seconds over {kills} kills"),
        Bar(id="N6-spread", value=seen.spread_ratio, op="<=", limit=2.0,
            what=f"distance to partners {OUTER_STEPS} outer steps after a kill / before it, median"),
        Bar(id="N10-time", value=joined.seconds, op="<=", limit=JOIN_LIMIT_S,
            what=f"seconds until {JOINERS} joiners at once all serve"),
        Bar(id="N10-donors", value=joined.donors, op=">=", limit=2, what=f"donors of {DONORS} that served them"),
        Bar(id="N10-rate", value=joined.rate_share, op=">=", limit=0.8, what="rounds a second meanwhile / before"),
    )  # fmt: skip
    alone = fmean(not each.with_partner for each in seen.averaged)
    facts = (
        ("seconds from due to applied, 4 and 8 replicas", f"{four.waited_s:.3f}, {eight.waited_s:.3f}"),
        ("pair rounds alone while peers were killed", f"{alone:.0%} of {len(seen.averaged)}"),
    )
    return Report(bars=bars, facts=facts)


# ---- N4 --------------------------------------------------------------------------------------------------------------


def undisturbed(replicas: int, outer_steps: int) -> Exchanged:
    spec = exchange_spec(replicas)
    with TemporaryDirectory(prefix="exchange-") as folder, started(spec, replicas, Path(folder)) as swarm:
        swarm.wait_round(outer_steps * spec.outer.inner_steps, OUTER_LIMIT_S)
        time.sleep(1.0)  # the last exchange
        counters = [status.counters for status in swarm.status() if status.stage == MIDDLE]
        got = [each.get("received-bytes.OuterExchange", 0) / max(1, each.get("outer_steps_averaged", 0))
               for each in counters]  # fmt: skip
        message_bytes = 4 * stage_parameters(spec, MIDDLE)
        waited_s = [each.waited_s for each in averaged(swarm) if each.with_partner]
    return Exchanged(message_share=max(got) / message_bytes, waited_s=median(waited_s))


def started(spec: RunSpec, replicas: int, folder: Path) -> LocalSwarm:
    layout = {0: 1, MIDDLE: replicas, 2: 1}
    return LocalSwarm(spec, layout, folder, {"flight_recorder": True, "checkpoint_every": 0})


# ---- N6 --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    averaged: Sequence[Averaged]
    spread_ratio: float


def killed(kills: int, replicas: int = 4) -> Killed:
    """One replica after the other at random moments, each replaced by a newcomer."""
    draws = random.Random(SEED)
    spec = exchange_spec(replicas)
    at_s: list[float] = []
    with TemporaryDirectory(prefix="exchange-") as folder, started(spec, replicas, Path(folder)) as swarm:
        swarm.wait_round(CALM_ROUNDS, OUTER_LIMIT_S)
        for _ in range(kills):
            time.sleep(draws.uniform(0.5, 2.5))
            swarm.poll()
            victim = draws.choice(swarm.replicas(MIDDLE))
            at_s.append(time.monotonic())
            swarm.kill_peer(victim)
            swarm.forget(victim)
            swarm.wait_serving([swarm.add(MIDDLE)], JOIN_LIMIT_S)
        _wait_outer(swarm, OUTER_STEPS)
        seen = averaged(swarm)
    return Killed(averaged=seen, spread_ratio=spread_ratio(seen, at_s))


def _wait_outer(swarm: LocalSwarm, outer_steps: int) -> None:
    rounds = max(status.round for status in swarm.status())
    swarm.wait_round(rounds + outer_steps * swarm.spec.outer.inner_steps, OUTER_LIMIT_S)


def spread_ratio(seen: Sequence[Averaged], kills_s: Sequence[float]) -> float:
    """Median over the kills of the distance at the sixth outer step after one / at the last ones before the first."""
    met = [each for each in seen if each.with_partner]
    calm = [each for each in met if each.at_s < kills_s[0]]
    before = [each.apart for each in calm if each.outer_step > calm[-1].outer_step - OUTER_STEPS]
    after: list[float] = []
    for kill_s in kills_s:
        later = [each for each in met if each.at_s > kill_s]
        if later:
            wanted = later[0].outer_step + OUTER_STEPS
            after += [each.apart for each in later if each.outer_step == wanted]
    return median(after) / median(before) if before and after else float("nan")


# ---- N10 -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    seconds: float
    donors: int
    rate_share: float


def joining() -> Joined:
    spec = exchange_spec(DONORS)
    with TemporaryDirectory(prefix="exchange-") as folder, started(spec, DONORS, Path(folder)) as swarm:
        swarm.wait_round(20, OUTER_LIMIT_S)
        before = _rate(swarm, 5.0)
        began_s, first = time.monotonic(), _round(swarm)
        joiners = [swarm.add(MIDDLE) for _ in range(JOINERS)]
        while not all(_serves(peer) for peer in joiners) and time.monotonic() < began_s + JOIN_LIMIT_S:
            time.sleep(0.1)
            swarm.poll()
        seconds = time.monotonic() - began_s
        during = (_round(swarm) - first) / seconds
        serve = all(_serves(peer) for peer in joiners)
        donors = {
            line["detail"].rsplit(" ", 1)[-1]
            for _, line in recorded(swarm, "Count")
            if line["name"] == "recovery-started" and "catch-up" in line["detail"]
        }
    return Joined(seconds=seconds if serve else float("inf"), donors=len(donors), rate_share=during / before)


def _serves(peer: LocalPeer) -> bool:
    return peer.status is not None and peer.status.state is PeerState.SERVING


def _round(swarm: LocalSwarm) -> int:
    return max(status.round for status in swarm.status())


def _rate(swarm: LocalSwarm, seconds: float) -> float:
    first = _round(swarm)
    time.sleep(seconds)
    return (_round(swarm) - first) / seconds


# ---- flight recorders ------------------------------------------------------------------------------------------------


def recorded(swarm: LocalSwarm, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Peer's folder and line."""
    for place in sorted({file.parent for file in swarm.folder.glob("*/flight.jsonl*")}):
        yield from ((place.name, line) for line in lines_of(place, (what,)))


def averaged(swarm: LocalSwarm) -> list[Averaged]:
    """Of the middle stage, in the order of time."""
    middle = {peer.config.data_dir.name for peer in swarm.peers if peer.config.stage == MIDDLE}
    found = [
        Averaged(at_s=line["now"], peer=folder, outer_step=line["outer_step"], with_partner=line["with_partner"],
                 apart=line["apart"], waited_s=line["waited_s"])
        for folder, line in recorded(swarm, "OuterFinished")
        if folder in middle
    ]  # fmt: skip
    return sorted(found, key=lambda each: each.at_s)
