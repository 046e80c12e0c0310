"""The schedule of a local swarm, against a swarm that is played by hand: what is said and when an event is over."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from peer.schedule import Schedule, SwarmEvent, Verb, parse_events
from peer.status import PeerStatus
from protocols.errors import ConfigError
from protocols.swarm import PeerState


@dataclass(eq=False)
class APeer:
    label: str
    status: PeerStatus | None
    is_alive: bool = True

    @property
    def name(self) -> str:
        return self.label


def serving(label: str, stage: int | None, round_: int = 0, state: PeerState = PeerState.SERVING) -> APeer:
    return APeer(
        label, PeerStatus(peer=label, name=label, run_id="r", stage=stage, state=state, round=round_)
    )


@dataclass
class ASwarm:
    """Says who is there; kills and adds without processes."""

    peers: list[APeer] = field(default_factory=list)

    def replicas(self, stage: int) -> list[APeer]:
        return [peer for peer in self.peers if peer.is_alive and peer.status and peer.status.stage == stage]

    def kill_peer(self, peer: APeer) -> None:
        peer.is_alive = False

    def add(self, stage: int | None) -> APeer:
        self.peers.append(APeer(f"p{len(self.peers)}", None))
        return self.peers[-1]

    def reach(self, round_: int) -> None:
        first = self.peers[0]
        first.status = serving(first.label, 0, round_).status


@pytest.fixture
def swarm() -> ASwarm:
    return ASwarm([serving("p0", 0), serving("p1", 1), serving("p2", 1), serving("p3", 2), serving("p4", 2)])


def test_events_are_read_from_text_in_the_order_of_their_rounds():
    text = "join at round=100; kill stage=2 replica=1 at round=40;kill stage=3 at round=80; leave stage=1 at round=9"
    assert parse_events(text) == (
        SwarmEvent(verb=Verb.LEAVE, stage=1, round=9),
        SwarmEvent(verb=Verb.KILL, stage=2, replica=1, round=40),
        SwarmEvent(verb=Verb.KILL, stage=3, round=80),
        SwarmEvent(verb=Verb.JOIN, round=100),
    )
    assert parse_events(" ; ") == ()


@pytest.mark.parametrize(
    "text", ["kill at round=3", "kill stage=1", "join replica=0 at round=1", "stop stage=1 at round=2"]
)
def test_an_event_that_cannot_be_meant_is_refused_with_examples(text: str):
    with pytest.raises(ConfigError, match="event"):
        parse_events(text)


def test_the_loss_of_one_replica_is_over_when_rounds_go_on(swarm: ASwarm):
    schedule = Schedule(swarm, parse_events("kill stage=1 replica=1 at round=5"))  # type: ignore[arg-type]
    swarm.reach(4)
    assert schedule.advance(now=10.0) == []
    swarm.reach(5)
    assert schedule.advance(now=12.0) == ["round 5: stage 1: p2 killed"]
    assert not swarm.peers[2].is_alive
    assert swarm.peers[1].is_alive
    assert not schedule.is_over
    swarm.reach(7)
    [news] = schedule.advance(now=15.0)
    assert news.endswith("training went on with 1 replica of the stage after 3.0 s")
    assert schedule.is_over


def test_the_loss_of_a_stage_is_over_when_somebody_else_serves_it(swarm: ASwarm):
    """Rounds that skip the stage are not the end of it: the stage must be served again."""
    schedule = Schedule(swarm, parse_events("kill stage=2 at round=1"))  # type: ignore[arg-type]
    swarm.reach(1)
    schedule.advance(now=0.0)
    assert [peer.is_alive for peer in swarm.peers] == [True, True, True, False, False]
    swarm.reach(9)
    assert schedule.advance(now=4.0) == []
    swarm.peers[2].status = serving("p2", 2, state=PeerState.CATCHING_UP).status
    assert schedule.advance(now=5.0) == []
    swarm.peers[2].status = serving("p2", 2).status
    [news] = schedule.advance(now=8.0)
    assert news.endswith("p2 took the stage over after 8.0 s")
    assert [(i.round, i.seconds) for i in schedule.incidents] == [(1, 8.0)]


def test_a_join_is_over_when_the_newcomer_serves(swarm: ASwarm):
    schedule = Schedule(swarm, parse_events("join at round=0"))  # type: ignore[arg-type]
    assert schedule.advance(now=0.0) == ["round 0: p5 joins"]
    assert schedule.advance(now=1.0) == []
    swarm.peers[5].status = serving("p5", 1, state=PeerState.CATCHING_UP).status
    assert schedule.advance(now=2.0) == []
    swarm.peers[5].status = serving("p5", 1).status
    assert schedule.advance(now=3.5) == ["p5 joins: p5 serves stage 1 after 3.5 s"]
    assert schedule.is_over
