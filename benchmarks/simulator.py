"""F4: the simulator loses nothing, leaks nothing, repeats itself to the event, and is fast enough to be used daily.

Swarms of 20 peers train 200 microbatches while three peers are killed. The seed draws the victims and the moments;
first-stage peers are spared, since what an originator had not finished dies with it by design.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from statistics import median

from benchmarks.bars import Bar, Report
from peer.simulator.report import Report as Outcome
from peer.simulator.swarm import Simulation, tiny_spec
from protocols.run_spec import RunSpec

LAYOUT = {0: 4, 1: 4, 2: 4, 3: 4, 4: 4}  # 20 peers
MICROBATCHES = 200
KILLS = 3
FIRST_KILL_S, LAST_KILL_S = 2.0, 15.0  # such a swarm is done after about 20 virtual seconds
SEEDS, SEEDS_TWICE, SEEDS_TIMED = 300, 20, 20
SEEDS_QUICK = 20


def run(*, quick: bool) -> Report:
    seeds = range(SEEDS_QUICK if quick else SEEDS)
    outcomes = [simulate(seed) for seed in seeds]
    twice = seeds[:SEEDS_TWICE]
    changed = sum(simulate(seed).digest != outcomes[seed].digest for seed in twice)
    timed = seeds[:SEEDS_TIMED]
    bars = (
        Bar(id="F4-lost", value=sum(o.lost for o in outcomes), op="==", limit=0, what="microbatches lost"),
        Bar(id="F4-leaked", value=sum(o.leaked for o in outcomes), op="==", limit=0, what="slots and stashes leaked"),
        Bar(id="F4-short", value=sum(o.finished < MICROBATCHES for o in outcomes), op="==", limit=0,
            what="swarms that came to a halt"),
        Bar(id="F4-digest", value=changed, op="==", limit=0, what=f"of {len(twice)} digests, changed in a second run"),
        Bar(id="F4-checked", value=events_per_cpu_s(timed, thorough=True), op=">=", limit=5000,
            what="events per CPU second, encoding and invariants on"),
        Bar(id="F4-bare", value=events_per_cpu_s(timed, thorough=False), op=">=", limit=20000,
            what="events per CPU second, both off"),
    )  # fmt: skip
    return Report(bars=bars, facts=_facts(outcomes))


def simulation_spec() -> RunSpec:
    """Small rounds: much to agree on, little to compute."""
    return tiny_spec(len(LAYOUT), rounds={"microbatches": 2, "window": 3, "slots": 6, "start_replicas": 4})


def simulate(seed: int, *, thorough: bool = True) -> Outcome:
    """One swarm with its kills."""
    simulation = Simulation(simulation_spec(), LAYOUT, seed, encode=thorough, check=thorough)
    rng = random.Random(seed)
    victims = sorted(peer for peer, member in simulation.members.items() if member.core.stage != 0)
    for victim in rng.sample(victims, KILLS):
        simulation.kill(victim, rng.uniform(FIRST_KILL_S, LAST_KILL_S))
    outcome = simulation.run(until_microbatches=MICROBATCHES)
    assert sum(not member.is_alive for member in simulation.members.values()) == KILLS, "they died in time"
    return outcome


def events_per_cpu_s(seeds: Iterable[int], *, thorough: bool) -> float:
    """Median over the seeds: one slow second of the machine is one seed's."""
    rates = []
    for seed in seeds:
        began_s = time.process_time()
        events = simulate(seed, thorough=thorough).events
        rates.append(events / (time.process_time() - began_s))
    return median(rates)


def _facts(outcomes: list[Outcome]) -> tuple[tuple[str, str], ...]:
    return (
        ("seeds", str(len(outcomes))),
        ("microbatches finished", str(sum(outcome.finished for outcome in outcomes))),
        ("of these without a stage that nobody served", str(sum(outcome.skipped for outcome in outcomes))),
        ("events", str(sum(outcome.events for outcome in outcomes))),
        ("virtual seconds", f"{sum(outcome.seconds for outcome in outcomes):.0f}"),
    )
