"""How far a run is, from the statuses of peers: one line, or a live table on a terminal.

The clock is a parameter, so the arithmetic is tested without waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peer.status import STATE_MEANINGS, PeerStatus
from protocols.swarm import PeerId, PeerState

if TYPE_CHECKING:
    from rich.console import Group

RATE_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Of the run as far as the given peers know it."""

    round: int
    total_rounds: int
    loss: float | None
    validation_loss: float | None
    tokens: int
    tokens_per_s: float
    peers_per_stage: tuple[int, ...]
    eta_s: float | None


def merge_validation(statuses: Iterable[PeerStatus]) -> list[tuple[int, float]]:
    """(round, loss) over all originators, weighted by their shares of the validation microbatches."""
    sums: dict[int, tuple[float, int]] = {}
    for status in statuses:
        for point in status.validation:
            total, number = sums.get(point.round, (0.0, 0))
            sums[point.round] = (
                total + point.loss * point.num_microbatches,
                number + point.num_microbatches,
            )
    return [(round_, total / number) for round_, (total, number) in sorted(sums.items()) if number]


class ProgressTracker:
    """Remembers what dead originators had trained, and measures rates over the last half minute."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._tokens_of: dict[PeerId, int] = {}
        self._marks: deque[tuple[float, int, int]] = deque()  # (now, round, tokens)

    def update(self, statuses: Sequence[PeerStatus], now: float) -> Progress:
        for status in statuses:
            self._tokens_of[status.peer] = max(status.tokens, self._tokens_of.get(status.peer, 0))
        originators = [status for status in statuses if status.stage == 0] or list(statuses)
        round_ = max((status.round for status in originators), default=0)
        total_rounds = max((status.total_rounds for status in statuses), default=0)
        losses = [status.loss for status in originators if status.loss is not None]
        validation = merge_validation(originators)
        tokens = sum(self._tokens_of.values())
        tokens_per_s, rounds_per_s = self._rates(now, round_, tokens)
        return Progress(
            round=round_,
            total_rounds=total_rounds,
            loss=sum(losses) / len(losses) if losses else None,
            validation_loss=validation[-1][1] if validation else None,
            tokens=tokens,
            tokens_per_s=tokens_per_s,
            peers_per_stage=self._peers_per_stage(statuses),
            eta_s=max(total_rounds - round_, 0) / rounds_per_s if rounds_per_s > 0 else None,
        )

    def _peers_per_stage(self, statuses: Sequence[PeerStatus]) -> tuple[int, ...]:
        """One peer only has its view; the peers of a whole local swarm speak for themselves."""
        if len(statuses) == 1:
            return statuses[0].peers_per_stage(self._num_stages)
        serving = [status.stage for status in statuses if status.state is PeerState.SERVING]
        return tuple(serving.count(stage) for stage in range(self._num_stages))

    def _rates(self, now: float, round_: int, tokens: int) -> tuple[float, float]:
        self._marks.append((now, round_, tokens))
        while now - self._marks[0][0] > RATE_WINDOW_S and len(self._marks) > 2:
            self._marks.popleft()
        then, round_then, tokens_then = self._marks[0]
        span_s = now - then
        return ((tokens - tokens_then) / span_s, (round_ - round_then) / span_s) if span_s > 0 else (0.0, 0.0)


def in_words(progress: Progress) -> str:
    """One line for logs and pipes."""
    parts = [f"round {progress.round}/{progress.total_rounds}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.validation_loss is not None:
        parts.append(f"validation {progress.validation_loss:.3f}")
    parts.append(f"{short_number(progress.tokens)} tokens at {short_number(progress.tokens_per_s)}/s")
    parts.append("peers per stage " + " ".join(map(str, progress.peers_per_stage)))
    if progress.eta_s is not None:
        parts.append(f"ETA {short_time(progress.eta_s)}")
    return "  ".join(parts)


def short_number(value: float) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def short_time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def live_table(progress: Progress, statuses: Sequence[PeerStatus], notes: Sequence[str]) -> Group:
    """What a terminal shows, anew at each update: the line above, every peer, the last notes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("peer", "stage", "state", "round", "loss", "in flight", "queue"):
        table.add_column(heading, justify="left" if heading in ("peer", "state") else "right")
    for status in sorted(statuses, key=lambda status: (status.stage is None, status.stage, status.name)):
        table.add_row(
            f"{status.name} ({status.peer[-6:]})",
            "-" if status.stage is None else str(status.stage),
            "paused" if status.paused else status.state.value,
            str(status.round),
            "" if status.loss is None else f"{status.loss:.3f}",
            str(status.num_in_flight),
            str(status.queue_depth),
        )
    return Group(Text(in_words(progress), style="bold"), table, *(Text(note, style="dim") for note in notes))


def describe_state(status: PeerStatus) -> str:
    if status.is_bootstrap:
        return "serving: introduces peers to each other"
    return f"{status.state.value}: {STATE_MEANINGS[status.state]}"
