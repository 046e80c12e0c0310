"""Watching a local swarm from start to end: events when they are due, and a view that fits where it is shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from peer.launch import LaunchError, LocalSwarm
from peer.progress import Progress, ProgressTracker, in_words, live_table
from peer.schedule import Misfortunes
from peer.status import PeerStatus

POLL_S = 0.5
LINE_EVERY_S = 5.0
NOTES_SHOWN = 8


class View:
    """A live table on a terminal; otherwise a line every few seconds, and each note when it comes."""

    def __init__(self) -> None:
        self._live: Any = None
        self._notes: list[str] = []
        self._next_line_s = 0.0

    def __enter__(self) -> View:
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(
        self, progress: Progress, statuses: Sequence[PeerStatus], news: Sequence[str], now: float
    ) -> None:
        self._notes += news
        if self._live is not None:
            self._live.update(live_table(progress, statuses, self._notes[-NOTES_SHOWN:]), refresh=True)
            return
        for note in news:
            print(f"  * {note}", flush=True)
        if now >= self._next_line_s:
            self._next_line_s = now + LINE_EVERY_S
            print(in_words(progress), flush=True)


def follow(swarm: LocalSwarm, schedule: Misfortunes, tracker: ProgressTracker) -> Progress:
    """Until the last round is done and validated, and all events are dealt with. LaunchError when rounds stop."""
    stall_limit_s = 2 * swarm.spec.liveness.round_s
    newest_round, moved_s = -1, time.monotonic()
    with View() as view:
        while True:
            statuses, now = swarm.status(), time.monotonic()
            progress = tracker.update(statuses, now)
            view.show(progress, statuses, schedule.advance(now), now)
            if _is_over(swarm, statuses) and schedule.is_over:
                return progress
            if progress.round > newest_round:
                newest_round, moved_s = progress.round, now
            if not statuses:
                raise LaunchError(f"no peer answers any more; their logs are in {swarm.folder / 'logs'}")
            if now - moved_s > stall_limit_s:
                raise LaunchError(
                    f"no round was finished for {now - moved_s:.0f} s; {in_words(progress)}; "
                    f"the peers' logs are in {swarm.folder / 'logs'}"
                )
            time.sleep(POLL_S)


def _is_over(swarm: LocalSwarm, statuses: Sequence[PeerStatus]) -> bool:
    """All originators have taken their last step, and nothing of theirs is on its way (the last validation is in)."""
    originators = [status for status in statuses if status.stage == 0]
    last = swarm.spec.rounds.total_rounds
    return bool(originators) and all(
        status.round >= last and not status.num_in_flight for status in originators
    )
