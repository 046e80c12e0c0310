"""A7, A10 and what a live swarm tells of A5: processes are killed and frozen, and training goes on by itself.

Twelve peers of a tiny model of five stages, all on this machine. The first swarm goes through chaos: kills at random
moments, every stage emptied once, peers frozen, every dead peer replaced. The second trains undisturbed until it has
seen as many tokens; then its originators pause for a while, which shows what it costs to stay alive (A7-cost takes a
core for each peer; here they share, and that share is told beside it); then peers are killed one by one, each when all
is calm again; at last an adjacent pair of stages.

Times are read from flight recorders. A round is short here (12 peers share the cores), so two of them are soon over.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.bars import Bar, Report
from benchmarks.leaks import LAUNCHER, Watch, cpu_s
from peer.chaos import Blow, Chaos, ChaosEvent, Rates, Strike, draw
from peer.chaos_report import Answer, answers
from peer.flights import Flights, LossPoint, loss_ratio, read_flights
from peer.launch import LaunchError, LocalSwarm
from peer.progress import ProgressTracker
from protocols.run_spec import RunSpec, preset
from protocols.swarm import PeerState

LAYOUT = {0: 3, 1: 3, 2: 2, 3: 2, 4: 2}
STAGES, PEERS = len(LAYOUT), sum(LAYOUT.values())
PAIR = (2, 3)
SEED = 1
SETTINGS = {"flight_recorder": True, "checkpoint_every": 10}
POLL_S, LOOK_EVERY_S = 0.2, 2.0
CALM_LIMIT_S = 90.0  # until everybody serves again after the last blow
CALM_SHARE = 0.9  # of the time of chaos, at most: losses are compared as far as both have come
PAUSE_SETTLES_S, START_SETTLES_S = 3.0, 10.0
RESTART_S = 4.0  # after a single kill: not before the swarm has answered it


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    chaos_s: float
    rates: Rates
    kills_min: int
    stages_emptied: int
    survivor_s: float
    single_kills: int
    idle_s: float
    after_pair_s: float


FULL = Size(chaos_s=600.0, rates=Rates(kill_every_s=30.0, empty_every_s=120.0, freeze_every_s=75.0), kills_min=30,
            stages_emptied=STAGES, survivor_s=180.0, single_kills=8, idle_s=20.0, after_pair_s=60.0)  # fmt: skip
QUICK = Size(chaos_s=45.0, rates=Rates(kill_every_s=15.0, empty_every_s=15.0, freeze_every_s=45.0), kills_min=8,
             stages_emptied=3, survivor_s=40.0, single_kills=3, idle_s=8.0, after_pair_s=30.0)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """The swarm that went through chaos, from its first blow (`begun_s`) until all was calm."""

    flights: Flights
    strikes: Sequence[Strike]
    begun_s: float
    serving: int  # at the end
    watch: Watch
    survivors: Sequence[str]
    processes_left: int  # more than there should be


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of staying alive: heartbeats, records, looks at the table, calls, what an idle process costs; CPU s / s."""

    idle: float  # while the originators paused
    busy: float  # while they trained

    @property
    def of_a_core(self) -> float:
        """What a peer that has one core to itself loses of it, and so of its round time."""
        return self.idle / PEERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Calm:
    """The swarm that was left alone until `calm_s`."""

    flights: Flights
    begun_s: float
    calm_s: float
    cost: Cost
    singles: Sequence[Strike]
    pair: Sequence[Strike]


def chaos_spec() -> RunSpec:
    """pico's width, a layer a stage; a rate that does not fall, since nobody knows how many rounds ten minutes hold."""
    fields = preset("pico", "chaos", seed=SEED).model_dump()
    fields |= {"num_stages": STAGES}
    fields["model"] |= {"num_hidden_layers": STAGES - 1}
    fields["optimizer"] |= {"lr_min_share": 1.0}
    fields["rounds"] |= {"rows": 4, "seq_len": 64, "microbatches": 2, "total_rounds": 1_000_000,
                         "eval_every": 20, "eval_microbatches": 16}  # fmt: skip
    fields["liveness"] |= {"heartbeat_s": 2.0, "record_ttl_s": 8.0, "view_poll_s": 1.0, "ping_s": 2.0}
    return RunSpec.model_validate(fields)


def run(*, quick: bool) -> Report:
    size = QUICK if quick else FULL
    spec = chaos_spec()
    with TemporaryDirectory(prefix="chaos-") as folder:
        disturbed = go_through_chaos(spec, Path(folder) / "chaos", size)
        tokens = len(disturbed.flights.trained) * spec.tokens_per_microbatch
        calm = stay_calm(spec, Path(folder) / "calm", size, tokens)
    found = answers(
        [*calm.singles, *calm.pair], calm.flights, spec
    )  # together, or one would answer for the other
    singles, pair = found[: len(calm.singles)], found[len(calm.singles) :]
    bars = (*recovery_bars(calm, singles), *chaos_bars(spec, disturbed, calm, size), *pair_bars(spec, calm))
    return Report(bars=bars, facts=tuple(_facts(spec, disturbed, calm, singles, pair)))


# ---- the two swarms -------------------------------------------------------------------------------------------------


def go_through_chaos(spec: RunSpec, folder: Path, size: Size) -> Disturbed:
    watch = Watch()
    with LocalSwarm(spec, LAYOUT, folder, SETTINGS) as swarm:
        swarm.wait_round(1, CALM_LIMIT_S)
        watch.look(swarm)
        usual = watch.num_processes[0]
        events = takewhile(lambda event: event.at_s < size.chaos_s, draw(SEED, STAGES, size.rates))
        chaos = Chaos(swarm, events)
        begun_s = time.monotonic()
        follow(swarm, chaos, begun_s + size.chaos_s, watch)
        follow(swarm, chaos, time.monotonic() + CALM_LIMIT_S, watch, until_calm=True)
        statuses = swarm.status()
        serving = sum(status.state is PeerState.SERVING for status in statuses)
        watch.look(swarm)
        labels = [peer.label for peer in swarm.peers]
        flights = read_flights(folder)  # before they leave, which looks like a loss to whoever leaves last
    return Disturbed(
        flights=flights,
        strikes=chaos.strikes,
        begun_s=begun_s,
        serving=serving,
        watch=watch,
        survivors=watch.survivors(labels, size.survivor_s),
        processes_left=watch.num_processes[-1] - usual,
    )


def stay_calm(spec: RunSpec, folder: Path, size: Size, tokens: int) -> Calm:
    """Train as many tokens, or for as long; then pause, single kills, and the pair."""
    rng = random.Random(f"single kills/{SEED}")
    with LocalSwarm(spec, LAYOUT, folder, SETTINGS) as swarm:
        swarm.wait_round(1, CALM_LIMIT_S)
        begun_s = time.monotonic()
        tracker = ProgressTracker(STAGES)
        while time.monotonic() < begun_s + CALM_SHARE * size.chaos_s:
            if tracker.update(swarm.status(), time.monotonic()).tokens >= tokens:
                break
            time.sleep(POLL_S)
        cost = cost_of_staying_alive(swarm, size.idle_s)
        calm_s = time.monotonic()
        singles: list[Strike] = []
        for _ in range(size.single_kills):
            kill = ChaosEvent(at_s=0.0, blow=Blow.KILL, pick=rng.random(), away_s=RESTART_S)
            singles += strike(swarm, [kill])
            time.sleep(PAUSE_SETTLES_S)
        pair = [ChaosEvent(at_s=0.0, blow=Blow.EMPTY, pick=0.0, away_s=RESTART_S, stage=s) for s in PAIR]
        struck = strike(swarm, pair)
        time.sleep(size.after_pair_s)
        flights = read_flights(folder)
    return Calm(
        flights=flights,
        begun_s=begun_s,
        calm_s=calm_s,
        cost=cost,
        singles=singles,
        pair=struck,
    )


def strike(swarm: LocalSwarm, events: Sequence[ChaosEvent]) -> list[Strike]:
    """Now, and wait until everybody serves again."""
    chaos = Chaos(swarm, iter(events))
    swarm.poll()
    chaos.advance(time.monotonic())
    follow(swarm, chaos, time.monotonic() + CALM_LIMIT_S, until_calm=True)
    return chaos.strikes


def follow(
    swarm: LocalSwarm, chaos: Chaos, until_s: float, watch: Watch | None = None, *, until_calm: bool = False
) -> None:
    """Let chaos happen until then; `until_calm`: or until all that was struck is back."""
    look_s = time.monotonic()
    while (now := time.monotonic()) < until_s and not (until_calm and chaos.is_over):
        swarm.poll()
        for line in chaos.advance(time.monotonic()):
            print(f"  {line}", flush=True)
        if watch is not None and now >= look_s:
            watch.look(swarm)
            look_s = now + LOOK_EVERY_S
        time.sleep(POLL_S)


def cost_of_staying_alive(swarm: LocalSwarm, seconds: float) -> Cost:
    """With the originators paused nobody trains, and all else goes on. Nobody is asked anything meanwhile."""
    busy = _cpu_used(seconds)
    readers = [peer.client for peer in swarm.replicas(0) if peer.client is not None]
    if not readers:
        raise LaunchError("stage 0 has no replica to pause")
    for client in readers:
        client.pause()
    time.sleep(PAUSE_SETTLES_S)
    idle = _cpu_used(seconds)
    for client in readers:
        client.resume()
    time.sleep(START_SETTLES_S)
    return Cost(idle=idle, busy=busy)


def _cpu_used(seconds: float) -> float:
    """CPU seconds a second, of all peers and their daemons."""
    before_s, began_s = cpu_s(), time.monotonic()
    time.sleep(seconds)
    return (cpu_s() - before_s) / (time.monotonic() - began_s)


# ---- bars -----------------------------------------------------------------------------------------------------------


def recovery_bars(calm: Calm, singles: Sequence[Answer]) -> tuple[Bar, ...]:
    round_s = calm.flights.round_s(calm.begun_s, calm.calm_s)
    rounds = [_or_never(answer.microbatch_s) / round_s for answer in singles] or [math.nan]
    return (
        Bar(id="A7-median", value=median(rounds), op="<=", limit=2.0,
            what="round times from kill -9 to the next finished microbatch, single kills, median"),
        Bar(id="A7-worst", value=max(rounds), op="<=", limit=2.0, what="the same, worst"),
        Bar(id="A7-cost", value=calm.cost.of_a_core, op="<=", limit=0.02,
            what="CPU seconds a second of a peer that only stays alive: its share of a core of its own"),
    )  # fmt: skip


def chaos_bars(spec: RunSpec, disturbed: Disturbed, calm: Calm, size: Size) -> tuple[Bar, ...]:
    strikes, watch = disturbed.strikes, disturbed.watch
    emptied = {victim.stage for each in strikes if each.blow is Blow.EMPTY for victim in each.victims}
    unanswered = sum(answer.microbatch_s is None for answer in answers(strikes, disturbed.flights, spec))
    growths = [watch.growth(label) for label in disturbed.survivors] or [(math.nan, math.nan)]
    launcher = watch.growth(LAUNCHER)
    return (
        Bar(id="A10-kills", value=killed(strikes), op=">=", limit=size.kills_min, what="peers killed"),
        Bar(id="A10-emptied", value=len(emptied), op=">=", limit=size.stages_emptied, what="stages that were emptied"),
        Bar(id="A10-stood-still", value=unanswered, op="==", limit=0, what="blows after which nothing was finished"),
        Bar(id="A10-serving", value=disturbed.serving, op="==", limit=PEERS, what="peers that serve at the end"),
        Bar(id="A10-loss", value=disturbed_loss_ratio(spec, disturbed, calm), op="<=", limit=1.02,
            what="validation loss / that of the undisturbed run at equal tokens"),
        Bar(id="A10-memory", value=max(memory for memory, _ in growths), op="<=", limit=1.1,
            what="growth of a survivor's memory, last third / middle third of its life, worst"),
        Bar(id="A10-fds", value=max(fds for _, fds in growths), op="<=", limit=1.1, what="the same of descriptors"),
        Bar(id="A10-launcher", value=max(launcher), op="<=", limit=1.1, what="the same of the launcher, the larger"),
        Bar(id="A10-processes", value=disturbed.processes_left, op="==", limit=0,
            what="processes at the end beyond those of 12 peers"),
    )  # fmt: skip


def pair_bars(spec: RunSpec, calm: Calm) -> tuple[Bar, ...]:
    if len(calm.pair) < len(PAIR):
        return (Bar(id="A5-live", value=math.nan, op="<=", limit=1, what="the pair could not be struck"),)
    struck_s = calm.pair[0].at_s
    trained = calm.flights.trained
    before = max((each.round for each in trained if each.at_s <= struck_s), default=0)
    after = min((each.round for each in trained if each.at_s > struck_s), default=0)
    curve = calm.flights.curve(spec.tokens_per_microbatch)
    return (
        Bar(id="A5-live", value=before - after, op="<=", limit=1,
            what="rounds that were trained again after an adjacent pair of stages was killed"),
        Bar(id="A5-live-loss", value=loss_change(curve, struck_s), op="<=", limit=1.0,
            what="validation loss at the end / the last before the pair was killed"),
    )  # fmt: skip


def killed(strikes: Sequence[Strike]) -> int:
    return sum(len(each.victims) for each in strikes if each.blow is not Blow.FREEZE)


def disturbed_loss_ratio(spec: RunSpec, disturbed: Disturbed, calm: Calm) -> float:
    undisturbed = [
        point for point in calm.flights.curve(spec.tokens_per_microbatch) if point.at_s < calm.calm_s
    ]
    return loss_ratio(disturbed.flights.curve(spec.tokens_per_microbatch), undisturbed)


def loss_change(curve: Sequence[LossPoint], struck_s: float) -> float:
    before = [point.loss for point in curve if point.at_s <= struck_s]
    after = [point.loss for point in curve if point.at_s > struck_s]
    return after[-1] / before[-1] if before and after else math.nan


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _facts(
    spec: RunSpec, disturbed: Disturbed, calm: Calm, singles: Sequence[Answer], pair: Sequence[Answer]
) -> Iterator[tuple[str, str]]:
    found = answers(disturbed.strikes, disturbed.flights, spec)
    yield "round time undisturbed", f"{calm.flights.round_s(calm.begun_s, calm.calm_s):.2f} s"
    yield (
        "CPU s / s of all peers, staying alive, training",
        f"{calm.cost.idle:.3f}, {calm.cost.busy:.3f}: {calm.cost.idle / calm.cost.busy:.1%} where 12 share two cores",
    )
    yield "single kills, s to the next finished microbatch", _listed([each.microbatch_s for each in singles])
    yield (
        "single kills, s until all that was lost with the peer was redone",
        _listed([a.redone_s for a in singles]),
    )
    kills = [each for each in found if each.strike.blow is not Blow.FREEZE]
    yield "kills in chaos, s to the next finished microbatch", _listed([each.microbatch_s for each in kills])
    yield "chaos", f"{killed(disturbed.strikes)} kills, {len(found) - len(kills)} freezes"
    yield "longest time without a finished microbatch", f"{longest_gap_s(disturbed):.1f} s"
    yield "what was done", _done(found)
    yield (
        "adjacent pair killed",
        f"{_done(pair)}; all redone after {_listed([each.redone_s for each in pair])} s",
    )
    for label in (LAUNCHER, *disturbed.survivors):
        memory, fds = disturbed.watch.growth(label)
        last = disturbed.watch.samples[label][-1]
        yield (
            f"{label}: memory, descriptors",
            f"{last.rss_bytes >> 20} MiB x {memory:.3f}, {last.num_fds} x {fds:.3f}",
        )


def _done(found: Sequence[Answer]) -> str:
    rungs = sum((answer.rungs for answer in found), Counter[str]())
    return ", ".join(f"{number} {rung}" for rung, number in rungs.most_common())


def longest_gap_s(disturbed: Disturbed) -> float:
    at_s = [disturbed.begun_s, *(e.at_s for e in disturbed.flights.trained if e.at_s > disturbed.begun_s)]
    return max((later - earlier for earlier, later in pairwise(at_s)), default=math.inf)


def _listed(seconds: Sequence[float | None]) -> str:
    return ", ".join("-" if each is None else f"{each:.2f}" for each in seconds)
