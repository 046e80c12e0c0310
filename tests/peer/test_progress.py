"""Progress: the arithmetic behind the line that a person watches for hours."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from peer.progress import ProgressTracker, in_words, live_table, merge_validation, short_number, short_time
from peer.status import PeerStatus, ValidationPoint
from protocols.swarm import PeerInfo, PeerState


def a_status(peer: str, stage: int | None = 0, **fields: Any) -> PeerStatus:
    fields = {"state": PeerState.SERVING, "total_rounds": 100, **fields}
    return PeerStatus(peer=peer, name=f"{peer}-fox", run_id="r", stage=stage, **fields)


def test_rates_and_time_left_come_from_the_last_half_minute():
    """A run that stood still for an hour must not predict days."""
    tracker = ProgressTracker(num_stages=2)
    tracker.update([a_status("a"), a_status("b", 1)], now=0.0)
    tracker.update([a_status("a", round=1, tokens=10), a_status("b", 1)], now=3600.0)
    progress = tracker.update([a_status("a", round=21, tokens=210), a_status("b", 1)], now=3620.0)
    assert (progress.tokens_per_s, progress.eta_s) == (10.0, 79.0)
    assert progress.peers_per_stage == (1, 1)


def test_tokens_of_a_dead_originator_still_count():
    tracker = ProgressTracker(num_stages=1)
    tracker.update([a_status("a", tokens=100), a_status("b", tokens=50)], now=0.0)
    assert tracker.update([a_status("b", tokens=60)], now=1.0).tokens == 160


def test_validation_is_weighted_by_the_shares_of_the_originators():
    shares = [
        a_status("a", validation=(ValidationPoint(round=0, loss=4.0, num_microbatches=3),)),
        a_status("b", validation=(ValidationPoint(round=0, loss=8.0), ValidationPoint(round=5, loss=2.0))),
    ]
    assert merge_validation(shares) == [(0, 5.0), (5, 2.0)]


def test_one_peer_alone_reports_what_it_sees_of_the_others():
    view = tuple(
        PeerInfo(peer=p, stage=s, state=PeerState.SERVING) for p, s in (("a", 0), ("b", 1), ("c", 1))
    )
    progress = ProgressTracker(num_stages=3).update([a_status("b", 1, peers=view)], now=0.0)
    assert progress.peers_per_stage == (1, 2, 0)
    assert progress.eta_s is None


def test_the_line_says_all_that_was_asked_for():
    tracker = ProgressTracker(num_stages=1)
    tracker.update([a_status("a")], now=0.0)
    status = a_status(
        "a", round=50, loss=3.25, tokens=1_200_000, validation=(ValidationPoint(round=40, loss=3.5),)
    )
    line = in_words(tracker.update([status, a_status("b", None, state=PeerState.JOINING)], now=10.0))
    assert line == (
        "round 50/100  loss 3.250  validation 3.500  1.2 M tokens at 120 k/s  peers per stage 1  ETA 10 s"
    )


def test_the_live_table_shows_every_peer_and_the_notes():
    statuses = [
        a_status("a", loss=3.5),
        a_status("b", None, state=PeerState.JOINING),
        a_status("c", 1, paused=True),
    ]
    progress = ProgressTracker(num_stages=2).update(statuses, now=0.0)
    console = Console(width=100, file=None, record=True, quiet=False)
    with console.capture() as capture:
        console.print(live_table(progress, statuses, ["p3 killed"]))
    text = capture.get()
    assert all(
        word in text for word in ("a-fox", "3.500", "joining", "paused", "p3 killed", "peers per stage 1 1")
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (1_234, "1.23 k"), (5_600_000, "5.6 M"), (2e9, "2 G")]
)
def test_numbers_are_short(value: float, text: str):
    assert short_number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (600, "10 min"), (7200, "2.0 h")])
def test_times_are_short(seconds: float, text: str):
    assert short_time(seconds) == text
