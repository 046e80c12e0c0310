"""The table of a simulated swarm, whole and split."""

from __future__ import annotations

import pytest

from peer.simulator.clock import Clock
from peer.simulator.swarm import tiny_spec
from peer.simulator.table import Table
from protocols.swarm import PeerInfo, PeerState

SPEC = tiny_spec(3)
TTL_S = SPEC.liveness.record_ttl_s


class Tables:
    """A table and its clock."""

    def __init__(self, **settings: float) -> None:
        self.clock = Clock()
        self.table = Table(self.clock, SPEC, 1, **settings)

    def wait(self, seconds: float) -> None:
        self.clock.after(seconds, lambda: None)
        self.clock.step()

    def store(self, *peers: str) -> None:
        for peer in peers:
            self.table.store(PeerInfo(peer=peer, stage=1, state=PeerState.SERVING))

    def seen(self, reader: str) -> list[str]:
        return [info.peer for info in self.table.view(reader).peers]


@pytest.fixture
def tables() -> Tables:
    return Tables()


def by_letter(peer: str) -> int:
    return 0 if peer[0] == "a" else 1


def test_a_view_is_the_same_object_while_nothing_has_changed(tables: Tables):
    tables.store("a1", "b1")
    before = tables.table.view("a1")
    tables.wait(1.0)
    tables.store("a1")
    assert tables.table.view("a1") is before


def test_beyond_a_split_the_old_records_are_seen_until_they_lapse(tables: Tables):
    """And what is stored there meanwhile is seen when the swarm is whole again, at once."""
    tables.store("a1", "b1")
    tables.table.split(by_letter)
    tables.wait(TTL_S / 2)
    tables.store("a1", "b1", "b2")
    assert tables.seen("a1") == ["a1", "b1"]
    assert tables.seen("b1") == ["a1", "b1", "b2"]
    tables.wait(TTL_S / 2)
    assert tables.seen("a1") == ["a1"]
    assert tables.seen("b1") == ["b1", "b2"]
    tables.table.heal()
    assert tables.seen("a1") == tables.seen("b1") == ["a1", "b1", "b2"]


def test_claims_beyond_a_split_are_seen_only_if_they_are_older(tables: Tables):
    tables.table.claim("b1", 1)
    tables.table.split(by_letter)
    tables.wait(1.0)
    tables.table.claim("b2", 1)
    assert [claimant for claimant, _ in tables.table.claims("a1", 1)] == ["b1"]
    assert [claimant for claimant, _ in tables.table.claims("b1", 1)] == ["b1", "b2"]


def test_claiming_again_makes_no_claim_younger(tables: Tables):
    tables.table.claim("a1", 1)
    tables.wait(10.0)
    tables.table.claim("a1", 1)
    assert tables.table.claims("b1", 1) == (("a1", pytest.approx(10.0)),)
    tables.wait(21.0)
    assert tables.table.claims("b1", 1) == ()


def test_a_lossy_table_says_so():
    tables = Tables(loss_share=0.5)
    info = PeerInfo(peer="a1", stage=1, state=PeerState.SERVING)
    stored = [tables.table.store(info) for _ in range(100)]
    looks = [tables.table.look("a1") for _ in range(100)]
    assert 25 < stored.count(False) < 75
    assert 25 < looks.count(None) < 75


def test_readers_within_the_time_of_a_reading_share_a_view():
    tables = Tables(reading_s=0.1)
    tables.store("a1")
    tables.seen("a1")
    tables.store("b1")
    assert tables.seen("b1") == ["a1"]
    tables.wait(0.1)
    assert tables.seen("b1") == ["a1", "b1"]
