"""A11: a thousand peers, of which an hour's share dies within a minute; a stage that loses all comes back in time.

In each seed every peer dies with the probability that CheckFree's hardest setting has for an hour (16 %), but within
`CHURN_S` virtual seconds, and a joiner replaces it; some are stopped and go on (SIGSTOP), the swarm is split in two for
a while, links and table included, one message and one look at the table in a hundred gets lost, and two stages lose
all their replicas at once: one that has two, one that has a full share. In a quarter of the seeds the first peer that
claims a stage is killed as well. Default time limits; one microbatch a round and slow compute, since the affair is who
is there, not what they compute.

What is promised, for a stage without a replica (the limits are the RunSpec's, the rest constants of `protocols`):

    detect   = record_ttl + (empty_confirm + 1) view_poll + claim_settle
    rebuild  = drain_limit + transfer
    bound    = detect + rebuild
             + (lost claims + other empty stages) ((empty_confirm + 1) view_poll + claim_settle)
             + what failed donors may take: chunk_limit for a silent one, a send's limit for a lost one, and retry

The time counts from when the stage is empty and nothing new is in the adopters' way. In their way is a blow: the
adopter or the next in turn dies or stalls, or the swarm is split or healed. After a blow the claim of the one that was
hit has to lapse as well, so its time to live stands in place of the record's if it is longer. `transfer` is what a
copy takes by the simulated links and compute.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.bars import Bar, Report
from benchmarks.swarm_churn_witness import Adoption, Gap, Witness, overlaps_s
from dht.discovery import CLAIM_TTL_S
from peer.simulator.network import LinkSettings
from peer.simulator.report import InvariantBroken
from peer.simulator.swarm import Simulation, tiny_spec
from protocols.adoption import CLAIM_SETTLE_S
from protocols.hashing import share_of
from protocols.recovery import RETRY_S
from protocols.run_spec import RunSpec
from protocols.stage_changes import DRAIN_LIMIT_S
from protocols.swarm import PeerId

LOSS_AN_HOUR = 0.16  # of peers
WARM_S, CHURN_S = 20.0, 60.0  # virtual: when the churn begins, and how long it lasts
END_S, LATEST_S = 100.0, 240.0  # virtual: on until then, and longer while a stage is empty
STOPPED_SHARE, STOP_MAX_S = 0.03, 40.0
SPLIT_MIN_S, SPLIT_MAX_S = 8.0, 35.0
LOST_MESSAGES = 0.01
FIRST_STAGE, THIN_STAGES, THIN_REPLICAS = 3, 2, 2
SLOWNESS = 8.0  # a forward takes a sixth of a second
READING_S = 0.1  # to read the table
TRANSFER_S = 5.0
ASSASSIN_EVERY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many seeds of which swarm."""

    seeds: int
    peers: int
    stages: int

    @property
    def text(self) -> str:
        return f"{self.peers} peers"


FULL = (Size(seeds=100, peers=200, stages=12), Size(seeds=20, peers=1000, stages=20))
QUICK = (Size(seeds=8, peers=200, stages=12),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One seed."""

    seed: int
    gaps: tuple[Gap, ...]
    open_gaps: tuple[Gap, ...]
    adoptions: tuple[Adoption, ...]
    events: int
    deaths: int
    lost: int
    broken: str  # the invariant, if one does not hold
    counters: Counter[str]
    seconds: float  # virtual
    cpu_s: float
    spec: RunSpec


def run(*, quick: bool) -> Report:
    return report_of({size: play_all(size) for size in (QUICK if quick else FULL)})


def play_all(size: Size) -> list[Outcome]:
    return [play(seed, peers=size.peers, stages=size.stages) for seed in range(size.seeds)]


def report_of(outcomes_of: Mapping[Size, Sequence[Outcome]]) -> Report:
    """Bars over all sizes, facts of each."""
    outcomes = [outcome for group in outcomes_of.values() for outcome in group]
    late = [lateness(gap, outcome) for outcome in outcomes for gap in (*outcome.gaps, *outcome.open_gaps)]
    both_s = [each for outcome in outcomes for each in overlaps_s(outcome.adoptions)]
    bars = (
        Bar(id="A11-invariants", value=sum(bool(o.broken) for o in outcomes), op="==", limit=0,
            what="seeds in which an invariant of a peer broke"),
        Bar(id="A11-lost", value=sum(o.lost for o in outcomes), op="==", limit=0,
            what="microbatches lost by originators that live"),
        Bar(id="A11-empty", value=max(late, default=0.0), op="<=", limit=1,
            what="longest time of a stage without replica, of its bound"),
        Bar(id="A11-double", value=max(both_s, default=0.0) / CLAIM_TTL_S, op="<=", limit=1,
            what="longest time that two peers adopted one stage, of a claim's lease"),
    )  # fmt: skip
    facts = [
        (f"{size.text}: {name}", value)
        for size, group in outcomes_of.items()
        for name, value in _facts(size, group)
    ]
    return Report(bars=bars, facts=tuple(facts))


def churn_spec(stages: int) -> RunSpec:
    return tiny_spec(stages, rounds={"microbatches": 1, "window": 1, "slots": 6, "start_replicas": 1})


def layout_of(peers: int, stages: int) -> dict[int, int]:
    """Few first-stage peers, since each speaks to all; the first middle stages thin, the others even."""
    layout = {0: FIRST_STAGE, **dict.fromkeys(range(1, 1 + THIN_STAGES), THIN_REPLICAS)}
    rest, full = peers - sum(layout.values()), stages - len(layout)
    for index in range(full):
        layout[1 + THIN_STAGES + index] = rest // full + (index < rest % full)
    return layout


def play(seed: int, *, peers: int, stages: int, check: bool = True) -> Outcome:
    """A swarm through its churn. An invariant that breaks ends it."""
    began_s = time.process_time()
    witness = Witness(stages)
    simulation = Simulation(
        churn_spec(stages), layout_of(peers, stages), seed, encode=False, check=check, reading_s=READING_S,
        links=LinkSettings(loss_share=LOST_MESSAGES), watcher=witness,
    )  # fmt: skip
    for member in simulation.members.values():
        member.compute.slowness = SLOWNESS
    _draw(simulation, stages, random.Random(f"swarm-churn/{seed}"))
    if seed % ASSASSIN_EVERY == ASSASSIN_EVERY - 1:
        _kill_first_claimant(simulation, witness)
    broken, lost = "", 0
    try:
        simulation.go_on_until(WARM_S)
        witness.has_begun = True
        lost = simulation.go_on_until(END_S).lost
        while witness.open_gaps and simulation.clock.now < LATEST_S:
            lost = simulation.go_on_until(simulation.clock.now + 5.0).lost
    except InvariantBroken as error:
        broken = str(error)
    witness.end(simulation.clock.now)
    return Outcome(
        seed=seed, spec=simulation.spec, gaps=tuple(witness.gaps), open_gaps=tuple(witness.open_gaps),
        adoptions=tuple(witness.adoptions), events=simulation.chronicle.events,
        deaths=sum(not member.is_alive for member in simulation.members.values()), lost=lost, broken=broken,
        counters=simulation.chronicle.counters, seconds=simulation.clock.now,
        cpu_s=time.process_time() - began_s,
    )  # fmt: skip


def _draw(simulation: Simulation, stages: int, rng: random.Random) -> None:
    """One first-stage peer is spared: without any there is no work."""
    thin = rng.randrange(1, 1 + THIN_STAGES)
    full = rng.randrange(1 + THIN_STAGES, stages)
    simulation.kill(thin, _moment(rng))
    simulation.kill(full, _moment(rng))
    joinable = [stage for stage in range(1, stages) if stage not in (thin, full)]
    names = sorted(simulation.members)
    for name in names[1:]:
        if rng.random() < LOSS_AN_HOUR:
            at_s = _moment(rng)
            simulation.kill(name, at_s)
            stage = simulation.members[name].core.stage
            simulation.join(0 if stage == 0 else rng.choice(joinable), at_s + 20 * rng.random())
    for name in names[1:]:
        if rng.random() < STOPPED_SHARE:
            at_s = _moment(rng)
            simulation.stop(name, at_s)
            simulation.resume(name, at_s + STOP_MAX_S * rng.random())
    share, at_s = rng.uniform(0.2, 0.5), _moment(rng)
    word = f"side/{simulation.seed}"

    @cache
    def side(peer: PeerId) -> int:
        return int(share_of(f"{word}/{peer}") < share)

    simulation.split(side, at_s, at_s + rng.uniform(SPLIT_MIN_S, SPLIT_MAX_S))


def _moment(rng: random.Random) -> float:
    return WARM_S + CHURN_S * rng.random()


def _kill_first_claimant(simulation: Simulation, witness: Witness) -> None:
    """Between its claim and its going: the stage waits for the claim to lapse."""

    def claimed(peer: PeerId) -> None:
        witness.on_claim = None
        simulation.kill(peer, simulation.clock.now + CLAIM_SETTLE_S / 2)

    witness.on_claim = claimed


def bound_s(gap: Gap, spec: RunSpec) -> float:
    """How long the stage may be without a replica since the way was free, as the module says."""
    limits = spec.liveness
    look_s = (limits.empty_confirm + 1) * limits.view_poll_s + CLAIM_SETTLE_S
    rebuild_s = DRAIN_LIMIT_S + TRANSFER_S
    lapse_s = max(limits.record_ttl_s, CLAIM_TTL_S) if gap.blows else limits.record_ttl_s
    waits_s = (gap.claims_spent + gap.neighbours) * look_s
    return lapse_s + look_s + rebuild_s + waits_s + gap.donors_s + gap.failed_donors * RETRY_S


def lateness(gap: Gap, outcome: Outcome) -> float:
    """Its length since the way was free, as a share of its bound; the end of the seed ends what is still open."""
    ended_s = outcome.seconds if gap.ended_s is None else gap.ended_s
    return (ended_s - gap.way_is_free_s) / bound_s(gap, outcome.spec)


def _facts(size: Size, outcomes: Sequence[Outcome]) -> tuple[tuple[str, str], ...]:
    gaps = [gap for outcome in outcomes for gap in outcome.gaps]
    calm = [gap for gap in gaps if gap.is_calm]
    adoptions = [adoption for outcome in outcomes for adoption in outcome.adoptions]
    sources = Counter(gap.source.value for gap in gaps if gap.source is not None)
    ways = Counter(adoption.source.value for adoption in adoptions if adoption.source is not None)
    counters = sum((outcome.counters for outcome in outcomes), Counter[str]())
    both_s = [each for outcome in outcomes for each in overlaps_s(outcome.adoptions)]
    broken = [outcome.broken for outcome in outcomes if outcome.broken]
    return (
        ("seeds, stages", f"{len(outcomes)}, {size.stages}"),
        ("deaths", str(sum(outcome.deaths for outcome in outcomes))),
        ("events", str(sum(outcome.events for outcome in outcomes))),
        ("virtual seconds", f"{sum(outcome.seconds for outcome in outcomes):.0f}"),
        ("CPU seconds a seed", f"{sum(outcome.cpu_s for outcome in outcomes) / len(outcomes):.1f}"),
        ("stages without a replica", f"{len(gaps)}, still {sum(len(o.open_gaps) for o in outcomes)} at the end"),
        ("for seconds: median, 90 %, 99 %, most", _spread([_length_s(gap) for gap in gaps])),
        ("of these undisturbed", f"{len(calm)}: {_spread([_length_s(gap) for gap in calm])}"),
        ("share of the bound: median, 90 %, 99 %, most", _spread([
            lateness(gap, outcome) for outcome in outcomes for gap in outcome.gaps])),
        ("blows in a gap, claims spent, other empty stages, failed donors: most", ", ".join(
            str(max((each(gap) for gap in gaps), default=0)) for each in (
                lambda gap: gap.blows, lambda gap: gap.claims_spent, lambda gap: gap.neighbours,
                lambda gap: gap.failed_donors))),
        ("what they came back with", ", ".join(f"{name} {count}" for name, count in sources.most_common())),
        ("adoptions", f"{len(adoptions)}: " + ", ".join(f"{name} {count}" for name, count in ways.most_common())),
        ("pairs that adopted one stage at once", f"{len(both_s)}; for seconds {_spread(both_s)}"),
        ("counted", ", ".join(f"{name} {count}" for name, count in sorted(counters.items()))),
        *(("broken", each) for each in broken[:3]),
    )  # fmt: skip


def _length_s(gap: Gap) -> float:
    assert gap.ended_s is not None, "of gaps that are over"
    return gap.ended_s - gap.began_s


def _spread(values: Sequence[float]) -> str:
    """Median, 90th and 99th percentile, maximum."""
    ordered = sorted(values)
    if not ordered:
        return "none"
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99)]
    return ", ".join(f"{value:.3g}" for value in (*at, ordered[-1]))
