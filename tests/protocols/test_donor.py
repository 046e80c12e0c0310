"""Serving one's weights, chunk by chunk, to whoever pulls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from peer.simulator.compute import CHUNK
from protocols.actions import Count, Send, TakeSnapshot
from protocols.donor import SERVED_LEASE_S, SNAPSHOT_FRESH_ROUNDS, SNAPSHOT_LEASE_S, WAITERS_MAX, Donor
from protocols.events import SnapshotTaken
from protocols.messages import WeightsChunk, WeightsKind, WeightsRequest

SHA256 = "0" * 64


@pytest.fixture
def donor() -> Iterator[Donor]:
    """`c1`, at stage 2."""
    donor = Donor("c1")
    donor.stage = 2
    yield donor
    donor.check_invariants()


def request(snapshot: str = "", index: int = 0, *, kind=WeightsKind.FULL, stage: int = 2) -> WeightsRequest:
    return WeightsRequest(kind=kind, stage=stage, snapshot=snapshot, index=index)


def taken(snapshot: str = "c1-1", *, kind=WeightsKind.FULL) -> SnapshotTaken:
    return SnapshotTaken(kind=kind, snapshot=snapshot, sha256=SHA256, outer_step=0, packets=(CHUNK, CHUNK))


def chunk(to: str, index: int, snapshot: str = "c1-1", round_: int = 0) -> Send:
    message = WeightsChunk(
        kind=WeightsKind.FULL,
        stage=2,
        snapshot=snapshot,
        index=index,
        count=2,
        sha256=SHA256,
        round=round_,
        outer_step=0,
        packet=CHUNK,
    )
    return Send(to=to, message=message)


def is_refusal(actions) -> bool:
    return [action.message.count for action in actions] == [0]


def test_a_joiner_pulls_a_snapshot_chunk_by_chunk(donor: Donor):
    assert donor.on_request("c2", request(), 0.0) == [TakeSnapshot(kind=WeightsKind.FULL, snapshot="c1-1")]
    assert donor.on_taken(taken(), 1.0) == [Count(name="snapshot-taken", detail="full"), chunk("c2", 0)]
    assert donor.on_request("c2", request("c1-1", 1), 2.0) == [chunk("c2", 1)]


def test_joiners_that_come_together_share_a_snapshot(donor: Donor):
    """Ten joiners after a power cut must not stop the donor ten times."""
    donor.on_request("c2", request(), 0.0)
    assert donor.on_request("c3", request(), 0.1) == []
    assert donor.on_taken(taken(), 1.0)[1:] == [chunk("c2", 0), chunk("c3", 0)]
    donor.round = SNAPSHOT_FRESH_ROUNDS
    assert donor.on_request("c4", request(), 2.0) == [chunk("c4", 0)]
    donor.round += 1
    assert donor.on_request("c5", request(), 3.0) == [TakeSnapshot(kind=WeightsKind.FULL, snapshot="c1-2")]


def test_a_snapshot_ends_with_its_lease(donor: Donor):
    """The receiver died half way, or has all of it: the snapshot is a second copy of the weights in memory."""
    donor.on_request("c2", request(), 0.0)
    donor.on_taken(taken(), 1.0)
    assert donor.next_deadline() == 1.0 + SNAPSHOT_LEASE_S
    donor.on_request("c2", request("c1-1", 1), 5.0)
    assert donor.next_deadline() == 5.0 + SERVED_LEASE_S
    donor.on_deadline(5.0 + SERVED_LEASE_S)
    assert is_refusal(donor.on_request("c2", request("c1-1", 1), 40.0))


@pytest.mark.parametrize(
    "asked", [request(stage=1), request("c1-9", 0), request("c1-1", 2)], ids=["stage", "snapshot", "index"]
)
def test_what_it_does_not_have_it_refuses(donor: Donor, asked: WeightsRequest):
    donor.on_request("c2", request(), 0.0)
    donor.on_taken(taken(), 1.0)
    assert is_refusal(donor.on_request("c2", asked, 2.0))


def test_the_number_of_snapshots_and_of_waiters_is_bounded(donor: Donor):
    for number in range(WAITERS_MAX):
        donor.on_request(f"c{number + 2}", request(), 0.0)
    assert is_refusal(donor.on_request("c99", request(), 0.0))
    donor.on_taken(taken(), 0.0)
    donor.round = 100
    donor.on_request("c2", request(), 1.0)
    donor.on_taken(taken("c1-2"), 1.0)
    donor.round = 200
    assert is_refusal(donor.on_request("c2", request(), 2.0))


def test_a_snapshot_of_the_stage_that_was_left_is_thrown_away(donor: Donor):
    """It would be served as the new stage's weights: same shapes, wrong layers, and nobody could tell."""
    donor.on_request("c2", request(), 0.0)
    donor.forget()
    donor.stage = 1
    assert donor.on_taken(taken(), 1.0) == []
    assert donor.on_request("b2", request(stage=1), 2.0) == [
        TakeSnapshot(kind=WeightsKind.FULL, snapshot="c1-2")
    ]


def test_a_snapshot_that_failed_can_be_asked_for_again(donor: Donor):
    donor.on_request("c2", request(), 0.0)
    donor.on_failed()
    assert donor.on_request("c2", request(), 1.0) == [TakeSnapshot(kind=WeightsKind.FULL, snapshot="c1-2")]


def test_a_snapshot_is_of_the_round_that_the_donor_has_reached(donor: Donor):
    """Also where it had no work in the last ones, and its weights took no step: they were averaged with others.

    Found live: a joiner that was told the round of the last step was left behind where it began, and began again,
    hundreds of times.
    """
    donor.round = 13
    donor.on_request("c2", request(), 0.0)
    assert donor.on_taken(taken(), 1.0)[1:] == [chunk("c2", 0, round_=13)]
    assert donor.on_request("c3", request(), 2.0) == [chunk("c3", 0, round_=13)]
    donor.round = 13 + SNAPSHOT_FRESH_ROUNDS + 1
    assert donor.on_request("c4", request(), 3.0) == [TakeSnapshot(kind=WeightsKind.FULL, snapshot="c1-2")]
