"""Memory, descriptors and processes of a local swarm over time: what survivors and their launcher pile up."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import psutil

from peer.launch import LocalSwarm

LAUNCHER = "launcher"
SAMPLES_MIN = 5  # in each of the two halves that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A peer is its process and its libp2p daemon."""

    at_s: float
    rss_bytes: int
    num_fds: int


@dataclass(slots=True)
class Watch:
    """Samples by label, of this process and of every peer below it."""

    samples: dict[str, list[Sample]] = field(default_factory=dict[str, list[Sample]])
    num_processes: list[int] = field(default_factory=list[int])  # below this one

    def look(self, swarm: LocalSwarm) -> None:
        me = psutil.Process()
        below = me.children(recursive=True)
        self.num_processes.append(len(below))
        self._add(LAUNCHER, [me])
        for peer in swarm.peers:
            if peer.is_alive and not peer.is_frozen:
                pid = peer.process.pid
                self._add(peer.label, [each for each in below if pid in (each.pid, _parent(each))])

    def _add(self, label: str, processes: Iterable[psutil.Process]) -> None:
        try:
            rss_bytes = sum(process.memory_info().rss for process in processes)
            num_fds = sum(process.num_fds() for process in processes)
        except psutil.Error:
            return  # just ended
        sample = Sample(at_s=time.monotonic(), rss_bytes=rss_bytes, num_fds=num_fds)
        self.samples.setdefault(label, []).append(sample)

    def survivors(self, labels: Iterable[str], lived_s: float) -> list[str]:
        """Of `labels`, those that were watched for so long."""
        return [
            label
            for label in labels
            if (found := self.samples.get(label)) and found[-1].at_s - found[0].at_s >= lived_s
        ]

    def growth(self, label: str) -> tuple[float, float]:
        """(memory, descriptors): median of the last third / of the middle third, the first being a start."""
        found = self.samples[label]
        third = len(found) // 3
        if third < SAMPLES_MIN:
            return float("nan"), float("nan")
        middle, last = found[third : 2 * third], found[-third:]
        return _ratio([s.rss_bytes for s in middle], [s.rss_bytes for s in last]), _ratio(
            [s.num_fds for s in middle], [s.num_fds for s in last]
        )


def _ratio(earlier: Sequence[int], later: Sequence[int]) -> float:
    return median(later) / median(earlier)


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return -1


def cpu_s() -> float:
    """Of all processes below this one, so far; steady only while none of them ends."""
    total_s = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total_s += times.user + times.system
    return total_s
