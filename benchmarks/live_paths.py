"""P7: planned paths in a live swarm, on links shaped like a table of twelve cities.

Twelve peers, each a process in a host of its own (`lab`), serve six stages, two for each; the cities are dealt to the
stages in the table's order, so that a path in stage order crosses oceans. Five swarms run one after the other on the
same links: the pipeline as it is commonly run (two fixed chains), the swarm's own full pipeline with and without the
planner, and 33 % of the stages skipped, with no staleness and with one round of it.

The published cost of a link is one number, latency + bytes / bandwidth for a tensor of 32 MiB, and so is ours: each
link has the table's cost, scaled down, as its latency. Rates are not limited beyond that. Processes share this
machine's cores, hence a tiny model: links must be what binds. Rounds are read from the originators' flight recorders;
averaging between replicas is put off, it concerns no path.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise, permutations
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.bars import Bar, Report
from benchmarks.lab import Lab, Link, all_pairs, why_not
from peer.flights import WANTED, lines_of
from peer.launch import LocalSwarm
from protocols.run_spec import RunSpec, preset

CITIES_FILE = Path(__file__).with_name("cities.csv")  # SkipPipe's published settings, arXiv 2502.19913
PUBLISHED_BYTES = 32 << 20
MEAN_HOP_S = 0.25
FAST = Link(0.0005, 125e6)  # while a swarm starts: that is not what is measured
ACCESS_BYTES_PER_S = 125e6

NUM_STAGES, REPLICAS, SKIP_STAGES = 6, 2, 4
PLAN_AFTER_S, PLAN_LIMIT_S = 20.0, 60.0  # the plan for measured costs comes 30 s after the first
START_LIMIT_S = 60.0
SETTLE_S = 8.0  # rounds in which the last plan runs out
RATIO_MAX, ERROR_MAX = 0.40, 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What one originator's recorder tells of the measured seconds."""

    seconds: tuple[float, ...]  # from the end of a round to the end of the next
    predicted_s: float  # makespan of the plan in use; NaN without one
    losses: dict[int, float]  # mean by round, since the start


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A swarm, or two chains side by side. A round is over when the slower originator's is."""

    originators: tuple[Rounds, ...]

    @property
    def round_s(self) -> float:
        return max((median(each.seconds) for each in self.originators if each.seconds), default=float("nan"))

    @property
    def predicted_s(self) -> float:
        predicted_s = [each.predicted_s for each in self.originators]
        return mean(predicted_s) if predicted_s else float("nan")

    @property
    def num_rounds(self) -> int:
        return min((len(each.seconds) for each in self.originators), default=0)

    @property
    def rounds_done(self) -> int:
        return min((max(each.losses, default=0) for each in self.originators), default=0)

    def loss(self, last_round: int, num_rounds: int = 5) -> float:
        """Mean of the training losses of that many rounds up to `last_round`."""
        rounds = range(last_round - num_rounds + 1, last_round + 1)
        found = [each.losses[r] for each in self.originators for r in rounds if r in each.losses]
        return mean(found) if found else float("nan")


def run(*, quick: bool) -> Report:
    if reason := why_not():
        return Report(skipped=reason)
    seconds = 20.0 if quick else 26.0
    cities, links = city_links()
    with Lab(len(cities), all_pairs(len(cities), FAST)) as lab:
        skip = one_swarm(lab, links, live_spec(SKIP_STAGES), seconds)
        chains = two_chains(lab, links, live_spec(NUM_STAGES, replicas=1, planned=False), seconds)
        others = {} if quick else {
            "full pipeline, no common plan": one_swarm(lab, links, live_spec(NUM_STAGES, planned=False), seconds),
            "full pipeline, planned": one_swarm(lab, links, live_spec(NUM_STAGES), seconds),
            "33 % skipped, staleness 1": one_swarm(lab, links, live_spec(SKIP_STAGES, staleness=1), seconds),
        }  # fmt: skip
    bars = (
        Bar(id="P7-ratio", value=skip.round_s / chains.round_s, op="<=", limit=RATIO_MAX,
            what="round time, 33 % skipped and planned / full pipeline in order, replica i to replica i"),
        Bar(id="P7-predicted", value=abs(skip.round_s / skip.predicted_s - 1), op="<=", limit=ERROR_MAX,
            what="error of the plan's makespan against the measured round"),
    )  # fmt: skip
    named = {"33 % skipped, planned": skip, "full pipeline, two fixed chains": chains, **others}
    return Report(bars=bars, facts=(*_facts(links, named), *_staleness_facts(named)))


def city_links() -> tuple[tuple[str, ...], dict[tuple[int, int], Link]]:
    """The cities in the table's order, and the links between any two of their numbers."""
    with CITIES_FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    cities = tuple(dict.fromkeys([rows[0]["one"], *(row["other"] for row in rows)]))
    cost_s: dict[tuple[int, int], float] = {}
    for row in rows:
        one, other = cities.index(row["one"]), cities.index(row["other"])
        crossing_s = PUBLISHED_BYTES / (float(row["gib_per_s"]) * 2**30)
        cost_s[one, other] = cost_s[other, one] = float(row["latency_ms"]) / 1e3 + crossing_s
    scale = MEAN_HOP_S / mean(cost_s.values())
    pairs = permutations(range(len(cities)), 2)
    return cities, {pair: Link(scale * cost_s[pair], ACCESS_BYTES_PER_S) for pair in pairs}


def live_spec(
    path_stages: int, *, replicas: int = REPLICAS, planned: bool = True, staleness: int = 0
) -> RunSpec:
    """One layer a stage, 256 tokens a microbatch, three microbatches an originator."""
    pico = preset("pico").model_dump(mode="json")
    return RunSpec.model_validate(
        pico
        | {
            "name": "live-paths", "seed": 1, "num_stages": NUM_STAGES,
            "model": pico["model"] | {"num_hidden_layers": NUM_STAGES - 1},
            "rounds": {"rows": 4, "seq_len": 64, "microbatches": 3, "window": 3, "slots": 3, "eval_every": 0,
                       "total_rounds": 100_000, "start_replicas": replicas, "staleness_max": staleness},
            "paths": {"path_stages": path_stages, "planned": planned,
                      "swaps_max": 2 if path_stages < NUM_STAGES else 0},
            "outer": {"inner_steps": 1000},
            # a busy machine must not look like a dead peer
            "liveness": {"attempt_s": 60.0, "round_s": 120.0, "lease_s": 240.0, "ping_s": 4.0},
        }
    )  # fmt: skip


def one_swarm(lab: Lab, links: dict[tuple[int, int], Link], spec: RunSpec, seconds: float) -> Measured:
    """All twelve peers as one swarm."""
    hosts = [stage + NUM_STAGES * replica for stage in range(NUM_STAGES) for replica in range(REPLICAS)]
    return _measured(lab, links, spec, [hosts], seconds)


def two_chains(lab: Lab, links: dict[tuple[int, int], Link], spec: RunSpec, seconds: float) -> Measured:
    """The same peers on the same links, as two pipelines that know nothing of each other."""
    chains = [range(NUM_STAGES * chain, NUM_STAGES * (chain + 1)) for chain in range(REPLICAS)]
    return _measured(lab, links, spec, chains, seconds)


def _measured(
    lab: Lab,
    links: dict[tuple[int, int], Link],
    spec: RunSpec,
    swarms: Sequence[Sequence[int]],
    seconds: float,
) -> Measured:
    """Start each swarm on its hosts (in the order of stages), let it settle on slow links, watch it."""
    lab.shape(all_pairs(len(swarms) * len(swarms[0]), FAST))
    with TemporaryDirectory() as parent, ExitStack() as stack:
        for number, hosts in enumerate(swarms):
            folder = Path(parent) / str(number)
            swarm = stack.enter_context(local_swarm(lab, spec, hosts, folder))
            swarm.wait_round(1, START_LIMIT_S)  # everybody has seen everybody
        lab.shape(links)
        if spec.paths.planned:
            wait_planned(Path(parent), time.monotonic() + PLAN_AFTER_S)
        time.sleep(SETTLE_S)
        since_s = time.monotonic()
        time.sleep(seconds)
        return Measured(originators=tuple(rounds_of(lines, since_s) for lines in originators(Path(parent))))


def wait_planned(folder: Path, after_s: float) -> None:
    """Until every originator has made a plan later than `after_s`; in vain where costs are as they were."""
    deadline_s = after_s + PLAN_LIMIT_S - PLAN_AFTER_S
    while time.monotonic() < deadline_s:
        newest = [max((at_s for at_s, _ in plans(lines)), default=0.0) for lines in originators(folder)]
        if newest and min(newest) > after_s:
            return
        time.sleep(1.0)


def local_swarm(lab: Lab, spec: RunSpec, hosts: Sequence[int], folder: Path) -> LocalSwarm:
    replicas = len(hosts) // NUM_STAGES
    labels = {f"p{number:02d}": host for number, host in enumerate(hosts)}
    settings = {"host_maddrs": ("/ip4/0.0.0.0/tcp/0",), "flight_recorder": True, "checkpoint_every": 0}
    layout = dict.fromkeys(range(NUM_STAGES), replicas)
    return LocalSwarm(spec, layout, folder, settings, enter=lab.door(labels))


# ---- flight recorders ------------------------------------------------------------------------------------------------


def originators(folder: Path) -> list[list[dict[str, Any]]]:
    """What the originators below `folder` have recorded."""
    places = sorted({file.parent for file in folder.glob("*/*/flight.jsonl*")})
    recorded = [list(lines_of(place, WANTED)) for place in places]
    return [lines for lines in recorded if any(line["what"] == "MicrobatchFinished" for line in lines)]


def plans(lines: Iterable[dict[str, Any]]) -> list[tuple[float, str]]:
    """When a plan was made, and what was said of it."""
    return [(line["now"], line["detail"]) for line in lines if line.get("name") == "plan-made"]


def rounds_of(lines: Sequence[dict[str, Any]], since_s: float) -> Rounds:
    """Rounds that ended after `since_s`, while the plan of that moment was in use."""
    made = plans(lines)
    until_s = min((at_s for at_s, _ in made if at_s > since_s), default=float("inf"))
    in_use = [detail for at_s, detail in made if at_s <= since_s]
    ends_s = [line["now"] for line in lines if line["what"] == "RoundFinished"]
    ends_s = [end_s for end_s in ends_s if since_s <= end_s <= until_s]
    losses: dict[int, list[float]] = {}
    for line in lines:
        if line["what"] == "MicrobatchFinished" and line["train"] and line["loss"] is not None:
            losses.setdefault(line["round"], []).append(line["loss"])
    return Rounds(
        seconds=tuple(end_s - begin_s for begin_s, end_s in pairwise(ends_s)),
        predicted_s=makespan_s(in_use[-1]) if in_use else float("nan"),
        losses={round_: mean(values) for round_, values in losses.items()},
    )


def makespan_s(detail: str) -> float:
    """Of `12 peers, 1.234 s a round`."""
    return float(detail.split(", ")[1].split()[0])


# ---- words -----------------------------------------------------------------------------------------------------------


def _facts(links: dict[tuple[int, int], Link], named: dict[str, Measured]) -> Iterator[tuple[str, str]]:
    latencies_s = [link.latency_s for link in links.values()]
    yield (
        "links, seconds one way",
        f"{min(latencies_s):.3f} to {max(latencies_s):.3f}, mean {mean(latencies_s):.3f}",
    )
    chains = named["full pipeline, two fixed chains"]
    for name, measured in named.items():
        predicted = (
            "" if measured.predicted_s != measured.predicted_s else f", planned {measured.predicted_s:.2f}"
        )
        yield (
            name,
            f"{measured.round_s:.2f} s a round{predicted} ({measured.num_rounds} rounds),"
            f" {measured.round_s / chains.round_s:.2f} x the chains",
        )


def _staleness_facts(named: dict[str, Measured]) -> Iterator[tuple[str, str]]:
    """Tokens a second, and loss after as many tokens."""
    fresh, stale = named["33 % skipped, planned"], named.get("33 % skipped, staleness 1")
    if stale is None:
        return
    last_round = min(fresh.rounds_done, stale.rounds_done)
    spec = live_spec(SKIP_STAGES)
    tokens = REPLICAS * spec.rounds.microbatches * spec.tokens_per_microbatch
    for name, measured in (("staleness 0", fresh), ("staleness 1", stale)):
        yield (
            name,
            f"{tokens / measured.round_s:.0f} tokens/s,"
            f" training loss {measured.loss(last_round):.3f} in the 5 rounds up to {last_round}",
        )
