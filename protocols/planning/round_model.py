"""How long a round takes: an event-driven model of peers, slots and links. SkipPipe (arXiv 2502.19913).

Every peer is one server that does one job at a time. A microbatch runs forward along its path, returns to its
originator for the loss, and runs backward along the same path. A peer holds it from the start of its forward to the end
of its backward; a forward that finds no slot waits, losses and backwards need none. Links carry any number of
transfers at once. Queues are first come first served, or backward before loss before forward; either way what starts a
new microbatch comes last. Nothing is ever dropped: paths that block each other for good are reported as unfinished.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from itertools import accumulate, chain, pairwise
from operator import add

import numpy as np

from protocols.planning.instance import Instance

ROUNDING_S = 1e-9  # sums of the same times in another order differ by less
_Queued = tuple[int, float, int]  # rank, arrival, operation
Path = tuple[int, ...]  # indices of peers, the originator first, without the return
NEVER_S = math.inf  # when a stuck microbatch finishes


class Work(IntEnum):
    FORWARD = 0
    LOSS = 1
    BACKWARD = 2


@dataclass(frozen=True, slots=True)
class Job:
    """One bar of the timeline."""

    peer: int
    start_s: float
    end_s: float
    work: Work
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What happened. `finish_s` by microbatch in injection order, NEVER_S where it is stuck."""

    makespan_s: float
    finish_s: tuple[float, ...]
    busy_s: tuple[float, ...]  # by peer, pauses left out
    jobs: tuple[Job, ...]
    operations: int  # jobs that were started: what the simulation cost

    @property
    def unfinished(self) -> int:
        return sum(finish_s == NEVER_S for finish_s in self.finish_s)

    def idle_share(self) -> float:
        """Of all peers' time until the makespan."""
        return 1 - sum(self.busy_s) / (self.makespan_s * len(self.busy_s)) if self.makespan_s else 0.0


class RoundModel:
    """Simulates plans of one arranged instance; remembers what a path costs."""

    def __init__(self, instance: Instance) -> None:
        assert instance.stage_of is not None
        self.steps = 2 * instance.rules.path_stages + 1
        self.ranks = _ranks(instance.rules.path_stages, backward_first=instance.timing.backward_first)
        held_max = np.where(instance.stage_of == 0, instance.origin_slots, instance.slots)
        self.held_max: list[int] = held_max.tolist()
        self._instance = instance
        self._trips: dict[Path, _Trip] = {}

    def simulate(
        self,
        paths: Sequence[Path],
        *,
        release_s: Sequence[float] | None = None,
        after: Sequence[int | None] | None = None,
        cutoff_s: float = NEVER_S,
        keep_jobs: bool = False,
    ) -> Round:
        """`paths` in injection order; a microbatch starts at its release, once the one that it comes `after` is done.

        As soon as it is clear that the makespan exceeds `cutoff_s`, the rest is left unfinished.
        """
        run = _Run(self, paths, cutoff_s, keep_jobs=keep_jobs)
        return run.go(release_s or [0.0] * len(paths), after or [None] * len(paths))

    def trip(self, path: Path) -> _Trip:
        trip = self._trips.get(path)
        if trip is None:
            trip = self._trips[path] = _Trip.along(path, self._instance)
        return trip


def _ranks(path_stages: int, *, backward_first: bool) -> list[int]:
    """By step, what is taken first from a queue; the start of a microbatch is always last."""
    if not backward_first:
        return [3, *[0] * (2 * path_stages)]
    return [3, *[2] * (path_stages - 1), 1, *[0] * path_stages]


@dataclass(frozen=True, slots=True)
class _Trip:
    """A path unrolled into its 2 L + 1 steps: L forwards, the loss, L backwards."""

    peers: list[int]
    work_s: list[float]
    pause_s: list[float]
    onward_s: list[float]  # the link to the next step's peer
    rest_s: list[float]  # from a step's start to the end of the last one, without waiting

    @classmethod
    def along(cls, path: Path, instance: Instance) -> _Trip:
        timing = instance.timing
        peers = [*path, path[0], *reversed(path)]
        forwards = [instance.forward_s.item(peer) for peer in path]
        backwards = [forward_s * timing.backward_factor for forward_s in reversed(forwards)]
        work_s = [*forwards, forwards[0] * timing.loss_factor, *backwards]
        onward_s = [instance.link_s.item(left, right) for left, right in pairwise(peers)] + [0.0]
        rest_s = list(accumulate(reversed([*map(add, work_s, onward_s)])))[::-1]
        pause_s = [timing.gap_start_s] + [timing.gap_s] * (len(peers) - 1)
        return cls(peers, work_s, pause_s, onward_s, rest_s)


class _Run:
    """One simulation. An operation is `microbatch * steps + step`; all that is known of it lies in lists by operation.

    An event is an operation's arrival (its number), or that a peer with something to do is free (-1 - its index).
    All that happens at one instant is taken in before any peer chooses its next job, so the order of events at one
    instant changes nothing.
    """

    def __init__(self, model: RoundModel, paths: Sequence[Path], cutoff_s: float, *, keep_jobs: bool) -> None:
        trips = [model.trip(path) for path in paths]
        self._steps = model.steps
        self._peers = list(chain.from_iterable(trip.peers for trip in trips))
        self._work_s = list(chain.from_iterable(trip.work_s for trip in trips))
        self._pause_s = list(chain.from_iterable(trip.pause_s for trip in trips))
        self._onward_s = list(chain.from_iterable(trip.onward_s for trip in trips))
        self._rest_s = list(chain.from_iterable(trip.rest_s for trip in trips))
        self._ranks = model.ranks * len(trips)
        path_stages = model.steps // 2
        self._takes_slot = [*[True] * path_stages, *[False] * (path_stages + 1)] * len(trips)
        self._frees_slot = [*[False] * (path_stages + 1), *[True] * path_stages] * len(trips)
        num_peers = len(model.held_max)
        self._events: list[tuple[float, int]] = []
        self._queues: list[list[_Queued]] = [[] for _ in range(num_peers)]
        self._waiting: dict[int, list[_Queued]] = {}  # by peer, forwards for which it has no slot
        self._free_slots = list(model.held_max)
        self._free_at_s = [0.0] * num_peers  # when its job and the pause after it are over
        self._wakes = [False] * num_peers  # is there an event for that?
        self._cutoff_s = cutoff_s + ROUNDING_S
        self._followers: dict[int, list[tuple[float, int]]] = {}
        self._jobs: list[Job] | None = [] if keep_jobs else None
        self._operations = 0
        self._busy_s = [0.0] * num_peers
        self._finish_s = [NEVER_S] * len(trips)

    def go(self, release_s: Sequence[float], after: Sequence[int | None]) -> Round:
        events = self._events
        for microbatch, (start_s, first) in enumerate(zip(release_s, after, strict=True)):
            if first is None:
                heappush(events, (start_s, microbatch * self._steps))
            else:
                self._followers.setdefault(first, []).append((start_s, microbatch * self._steps))
        while events:
            now_s = events[0][0]
            for peer in self._take_in(now_s):
                if self._free_at_s[peer] <= now_s:
                    self._choose(peer, now_s)
        return Round(
            makespan_s=max(self._finish_s, default=0.0),
            finish_s=tuple(self._finish_s),
            busy_s=tuple(self._busy_s),
            jobs=tuple(self._jobs or ()),
            operations=self._operations,
        )

    def _take_in(self, now_s: float) -> list[int]:
        """All events of this instant; the peers that may start something."""
        events, peers, queues, free_at_s = self._events, self._peers, self._queues, self._free_at_s
        touched: list[int] = []
        while events and events[0][0] == now_s:
            event = heappop(events)[1]
            if event < 0:
                peer = -event - 1
                self._wakes[peer] = False
            else:
                peer = peers[event]
                heappush(queues[peer], (self._ranks[event], now_s, event))
                if free_at_s[peer] > now_s:
                    self._wake_later(peer)
                    continue
            touched.append(peer)
        return touched

    def _wake_later(self, peer: int) -> None:
        if not self._wakes[peer]:
            self._wakes[peer] = True
            heappush(self._events, (self._free_at_s[peer], -peer - 1))

    def _choose(self, peer: int, now_s: float) -> None:
        """Start the first queued operation that may run; forwards that find no slot step aside."""
        queue = self._queues[peer]
        while queue:
            entry = heappop(queue)
            operation = entry[2]
            if self._takes_slot[operation]:
                if not self._free_slots[peer]:
                    self._waiting.setdefault(peer, []).append(entry)
                    continue
                self._free_slots[peer] -= 1
            self._start(peer, operation, now_s)
            if queue:
                self._wake_later(peer)
            return

    def _start(self, peer: int, operation: int, now_s: float) -> None:
        """All that follows from it is known: when the peer is free, when the next step's peer has it."""
        if now_s + self._rest_s[operation] > self._cutoff_s:
            self._cutoff_s = -math.inf  # too late whatever comes: start nothing more
            return
        self._operations += 1
        work_s = self._work_s[operation]
        end_s = now_s + work_s
        self._busy_s[peer] += work_s
        self._free_at_s[peer] = end_s + self._pause_s[operation]
        if self._frees_slot[operation]:  # at its end, but before that the peer starts nothing anyway
            self._free_slots[peer] += 1
            for entry in self._waiting.pop(peer, ()):
                heappush(self._queues[peer], entry)
        microbatch, step = divmod(operation, self._steps)
        if step < self._steps - 1:
            heappush(self._events, (end_s + self._onward_s[operation], operation + 1))
        else:
            self._finish_s[microbatch] = end_s
            for start_s, event in self._followers.get(microbatch, ()):
                heappush(self._events, (max(end_s, start_s), event))
        if self._jobs is not None:
            work = Work((step >= self._steps // 2) + (step > self._steps // 2))
            self._jobs.append(Job(peer, now_s, end_s, work, microbatch))
