"""The published instances and plans, read for tests, and the published simulator's clock in our own words.

That simulator (SkipPipe's, see `peer/assets/skippipe/README.md`) goes through time in whole seconds. In each it looks
fifteen times at every peer in the order of their numbers, and lets it do what has arrived, by arrival. What arrives
*during* that look from a peer with a higher number is seen a look later: meanwhile a job that came later may have been
started. A microbatch that finds no slot looks again 0.1 s later and then arrived later. One that must wait for its
predecessor keeps its time, and is lost when the clock has passed it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import floor
from typing import Any

from protocols.planning.instance import Instance, PathRules, Timing, make_instance
from protocols.planning.round_model import Path

SETTINGS = ("geo-distributed", "5-clusters", "single-cluster")
PAUSES = {"gap_s": 0.13, "gap_start_s": 0.09}
LOOKS = 15  # at each peer, in a tick


@dataclass(frozen=True)
class Sends:
    """A list of microbatches as the published runtime sends them: a second one on a path follows the first."""

    paths: tuple[Path, ...]
    release_s: tuple[float, ...]
    after: tuple[int | None, ...]


@lru_cache
def asset(name: str) -> Any:
    return json.loads((files("peer") / "assets" / "skippipe" / name).read_text("utf-8"))


def official(setting: str) -> Any:
    return asset("official_runs.json")["settings"][setting]


def published_instance(setting: str, *, path_stages: int | None = None) -> Instance:
    """With the published arrangement."""
    data = asset(f"instance_{setting}.json")
    return arranged_instance(
        data["compute_forward_s"],
        data["link_cost_s"],
        official(setting)["partitions"],
        path_stages=path_stages or data["path_length"],
    )


def arranged_instance(
    forward_s: list[float], link_s: list[list[float]], arrangement: list[list[int]], *, path_stages: int
) -> Instance:
    names = [f"{number:02d}" for number in range(len(link_s))]
    return make_instance(
        names,
        forward_s,
        link_s,
        rules=PathRules(num_stages=len(arrangement), path_stages=path_stages),
        microbatches=6,
        slots=3,
        stage_of={names[peer]: stage for stage, peers in enumerate(arrangement) for peer in peers},
        timing=Timing(**PAUSES),
    )


def agents(paths: list[list[int]], *, apart_s: float, repeats: int = 2, wave_s: float = 2.5) -> Sends:
    """Three agents an originator, `apart_s` between their starts; an agent's microbatches go one after the other.

    A coarse plan has one path for all three agents of an originator.
    """
    fine = [tuple(path) for path in paths for _ in range(15 // len(paths) if len(paths) == 5 else 1)]
    numbered = [(agent, turn) for agent in range(len(fine)) for turn in range(repeats)]
    return Sends(
        paths=tuple(fine[agent] for agent, _ in numbered),
        release_s=tuple(agent % 3 * apart_s + turn * wave_s for agent, turn in numbered),
        after=tuple(index - 1 if turn else None for index, (_, turn) in enumerate(numbered)),
    )


def full_pipeline(arrangement: list[list[int]], microbatches: int) -> tuple[Path, ...]:
    """Three chains, first to first, second to second; all stages in order."""
    chains = [tuple(peers[rank] for peers in arrangement) for rank in range(3)]
    return tuple(chain for chain in chains for _ in range(microbatches // 3))


@dataclass
class _Arrival:
    at_s: float
    came_s: float
    microbatch: int
    step: int
    done: bool = False


class PublishedClock:
    """`finish_s` of the microbatches that finish. The shorter the tick, the less depends on the peers' numbers."""

    def __init__(self, instance: Instance, sends: Sends, *, ticks_per_s: int = 1) -> None:
        self._instance, self._sends, self._ticks_per_s = instance, sends, ticks_per_s
        self._path_stages = len(sends.paths[0])
        self._inbox: list[list[_Arrival]] = [[] for _ in instance.peers]
        self._free = instance.slots.tolist()
        self._last_s = [0.0] * instance.num_peers
        self.sent_s: dict[int, float] = {}
        self.finish_s: dict[int, float] = {}
        for microbatch, release_s in enumerate(sends.release_s):
            self._arrive(microbatch, 0, release_s)

    def run(self, until_s: int) -> PublishedClock:
        for tick in range(until_s * self._ticks_per_s):
            for _ in range(LOOKS):
                for peer in range(self._instance.num_peers):
                    self._look(peer, tick)
        return self

    def _peer(self, microbatch: int, step: int) -> int:
        path = self._sends.paths[microbatch]
        return (*path, path[0], *reversed(path))[step]

    def _arrive(self, microbatch: int, step: int, at_s: float) -> None:
        self._inbox[self._peer(microbatch, step)].append(_Arrival(at_s, at_s, microbatch, step))

    def _look(self, peer: int, tick: int) -> None:
        inbox = self._inbox[peer]
        inbox.sort(key=lambda arrival: (arrival.at_s, arrival.came_s if arrival.step else 10_000.0))
        for arrival in inbox:
            if floor(arrival.at_s * self._ticks_per_s) != tick:
                continue
            if arrival.at_s < self._last_s[peer]:
                arrival.at_s = self._last_s[peer]
            elif not arrival.done and self._may_start(peer, arrival):
                self._start(peer, arrival)

    def _may_start(self, peer: int, arrival: _Arrival) -> bool:
        if arrival.step < self._path_stages and not self._free[peer]:
            arrival.at_s += 0.1
            return False
        predecessor = self._sends.after[arrival.microbatch] if arrival.step == 0 else None
        return predecessor is None or predecessor in self.finish_s

    def _start(self, peer: int, arrival: _Arrival) -> None:
        loss = self._path_stages
        factor = 1.0 if arrival.step < loss else 0.25 if arrival.step == loss else 1.5
        end_s = arrival.at_s + float(self._instance.forward_s[peer]) * factor
        self._free[peer] += (arrival.step > loss) - (arrival.step < loss)
        self._last_s[peer] = end_s + (0.13 if arrival.step else 0.09)
        for other in self._inbox[peer]:
            if other.microbatch != arrival.microbatch and arrival.at_s <= other.at_s < self._last_s[peer]:
                other.at_s = self._last_s[peer]
        arrival.done = True
        if arrival.step == 0:
            self.sent_s[arrival.microbatch] = arrival.at_s
        if arrival.step == 2 * loss:
            self.finish_s[arrival.microbatch] = end_s
        else:
            onward = self._peer(arrival.microbatch, arrival.step + 1)
            link_s = float(self._instance.link_s[peer, onward])
            self._arrive(arrival.microbatch, arrival.step + 1, end_s + link_s)
