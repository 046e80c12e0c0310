"""What the flight recorders of a local swarm tell together: microbatches, rounds and notable events, in time.

All peers of a machine stamp their lines with one monotonic clock, that of `time.monotonic()`. Recorders outlive their
peers, so the dead are heard as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

WANTED = ("MicrobatchFinished", "RoundFinished", "Count")  # a hundredth of all lines
TAIL = 6  # characters of a peer id that names a peer in logs and counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A microbatch that came home; `loss` None: given up."""

    at_s: float
    originator: str  # the tail of its id
    counter: int
    round: int
    train: bool
    loss: float | None
    skipped: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Something that a peer counted, and what it said of it."""

    at_s: float
    name: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """Mean validation loss (nats/token) of a round, and how much the swarm had trained when it began."""

    at_s: float
    round: int
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flights:
    """All in the order of time. `round_ends_s` are of each originator's life, by its folder."""

    finished: tuple[Finished, ...]
    counted: tuple[Counted, ...]
    round_ends_s: dict[str, tuple[float, ...]]

    @property
    def trained(self) -> list[Finished]:
        return [each for each in self.finished if each.train and each.loss is not None]

    def round_s(self, since_s: float = 0.0, until_s: float = float("inf")) -> float:
        """Median time from the end of an originator's round to the end of its next; NaN without any."""
        gaps_s = [
            later - earlier
            for ends_s in self.round_ends_s.values()
            for earlier, later in pairwise(ends_s)
            if earlier >= since_s and later <= until_s
        ]
        return median(gaps_s) if gaps_s else float("nan")

    def curve(self, tokens_per_microbatch: int) -> list[LossPoint]:
        """By round, validation of all originators together."""
        trained_s = np.array([each.at_s for each in self.trained])
        by_round: dict[int, list[Finished]] = {}
        for each in self.finished:
            if not each.train and each.loss is not None:
                by_round.setdefault(each.round, []).append(each)
        points: list[LossPoint] = []
        for round_, group in sorted(by_round.items()):
            tokens = int(np.searchsorted(trained_s, group[0].at_s)) * tokens_per_microbatch
            loss = fmean(each.loss for each in group if each.loss is not None)
            points.append(LossPoint(at_s=group[0].at_s, round=round_, tokens=tokens, loss=loss))
        return points


def read_flights(folder: Path) -> Flights:
    """Of all peers whose folders lie in `folder`; a peer that was killed may have left half a line."""
    finished: list[Finished] = []
    counted: list[Counted] = []
    round_ends_s: dict[str, tuple[float, ...]] = {}
    for place in sorted({path.parent for path in folder.glob("*/flight.jsonl*")}):
        ends_s: list[float] = []
        originates = False
        for line in lines_of(place, WANTED):
            match line["what"]:
                case "RoundFinished":
                    ends_s.append(line["now"])
                case "Count":
                    counted.append(Counted(at_s=line["now"], name=line["name"], detail=line["detail"]))
                case _:
                    finished.append(_finished(line))
                    originates = True
        if originates:
            round_ends_s[place.name] = tuple(ends_s)
    return Flights(
        finished=tuple(sorted(finished, key=lambda each: each.at_s)),
        counted=tuple(sorted(counted, key=lambda each: each.at_s)),
        round_ends_s=round_ends_s,
    )


def lines_of(place: Path, whats: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What one peer has recorded of these events and actions. Oldest first: `.2`, `.1`, then the file being written."""
    for file in sorted(place.glob("flight.jsonl*"), key=lambda file: file.name, reverse=True):
        with file.open(encoding="utf-8") as lines:
            yield from _wanted(lines, whats)


def _wanted(lines: Iterable[str], whats: Sequence[str]) -> Iterator[dict[str, Any]]:
    words = [f'"{what}"' for what in whats]
    for line in lines:
        if any(word in line for word in words):
            try:
                told = json.loads(line)
            except ValueError:
                continue  # cut off by a kill, or glued to such a line, or being written
            if told["what"] in whats:
                yield told


def _finished(line: dict[str, Any]) -> Finished:
    key = line["key"]
    return Finished(
        at_s=line["now"],
        originator=key["originator"][-TAIL:],
        counter=key["counter"],
        round=line["round"],
        train=line["train"],
        loss=line["loss"],
        skipped=tuple(line["skipped"]),
    )


def loss_ratio(curve: list[LossPoint], against: list[LossPoint], last: int = 3) -> float:
    """Mean of the last points / the other curve at as many tokens, by interpolation; NaN if that ends before."""
    if not against:
        return float("nan")
    common = [point for point in curve if point.tokens <= against[-1].tokens][-last:]
    if not common:
        return float("nan")
    tokens, losses = [point.tokens for point in against], [point.loss for point in against]
    expected = [float(np.interp(point.tokens, tokens, losses)) for point in common]
    return fmean(point.loss for point in common) / fmean(expected)
