"""Exactly one peer takes over an empty stage."""

from __future__ import annotations

from protocols.actions import (
    CallPeer,
    Count,
    PutClaim,
    ReadClaims,
)
from protocols.adoption import CLAIM_SETTLE_S, Adoption
from protocols.events import ClaimsRead, PingDone
from protocols.swarm import PeerState
from tests.protocols.builders import SPEC, info, view_of

GONE = view_of("a1", "b1", "b2", "d1", "d2", "d3")  # nobody at stage 2; d1 is who would move
CONFIRM = SPEC.liveness.empty_confirm
CLAIM = [Count(name="stage-claimed", detail="stage 2 has no replica", notable=True), PutClaim(stage=2)]


def look(adoption: Adoption, view, now: float) -> list:
    """One poll; without the calls to thin stages, which go on all the time."""
    return [action for action in adoption.on_view(view, now) if not isinstance(action, CallPeer)]


def polls(adoption: Adoption, view, number: int = CONFIRM) -> list:
    return [action for poll in range(number) for action in look(adoption, view, float(poll))]


def test_an_empty_stage_is_claimed_after_several_looks():
    """One poll that misses a record must not move anybody."""
    adoption = Adoption("d1", SPEC)
    assert polls(adoption, GONE, CONFIRM - 1) == []
    assert look(adoption, GONE, 9.0) == CLAIM
    assert adoption.next_deadline() == 9.0 + CLAIM_SETTLE_S
    assert adoption.on_deadline(9.0 + CLAIM_SETTLE_S) == [ReadClaims(stage=2)]


def test_nobody_else_claims():
    for other in ("b1", "d2", "a1"):
        assert polls(Adoption(other, SPEC), GONE) == []


def test_a_stage_that_comes_back_is_left_alone():
    adoption = Adoption("d1", SPEC)
    polls(adoption, GONE, CONFIRM - 1)
    adoption.on_view(view_of("a1", "b1", "b2", "c1", "d1", "d2", "d3"), 8.0)
    assert look(adoption, GONE, 9.0) == []


def test_a_stage_that_somebody_is_rebuilding_is_left_alone():
    """Found by the simulator: a second peer claimed the stage while the first was still fetching weights."""
    coming = view_of("a1", "b1", "b2", "d1", "d2", "d3", info("c9", state=PeerState.CATCHING_UP))
    assert polls(Adoption("d1", SPEC), coming) == []


def test_a_thin_stage_is_watched_by_direct_calls():
    """A record outlives its peer by its time to live; a refused call tells at once."""
    thin = view_of("a1", "b1", "b2", "c1", "d1", "d2", "d3")
    adoption = Adoption("d1", SPEC)
    watched = {action.peer for action in adoption.on_view(thin, 0.0) if isinstance(action, CallPeer)}
    assert "c1" in watched
    adoption.on_ping(PingDone(peer="c1", ok=False, is_gone=True, seconds=0.1))
    assert polls(adoption, thin) == CLAIM


def test_a_slow_replica_is_not_a_gone_one():
    thin = view_of("a1", "b1", "b2", "c1", "d1", "d2", "d3")
    adoption = Adoption("d1", SPEC)
    adoption.on_view(thin, 0.0)
    adoption.on_ping(PingDone(peer="c1", ok=False, seconds=2.0))
    assert polls(adoption, thin, 10) == []


def claimed(me: str) -> Adoption:
    adoption = Adoption(me, SPEC)
    polls(adoption, GONE)
    adoption._claimed = 2  # as if its own view had named it
    return adoption


def test_of_two_claims_at_once_the_lower_id_wins_everywhere():
    """Views differed: b1 and d1 both believed that it was theirs to move."""
    claims = ClaimsRead(stage=2, claims=(("b1", 1.4), ("d1", 1.6)))
    assert claimed("b1").on_claims(claims) == 2
    assert claimed("d1").on_claims(claims) is None


def test_an_older_claim_has_won_already():
    claims = ClaimsRead(stage=2, claims=(("b1", 1.5), ("d1", 9.0)))
    assert claimed("b1").on_claims(claims) is None
    assert claimed("d1").on_claims(claims) == 2


def test_a_claim_that_did_not_reach_the_table_is_none():
    assert claimed("d1").on_claims(ClaimsRead(stage=2, claims=())) is None
    assert claimed("d1").on_claims(ClaimsRead(stage=1, claims=(("d1", 2.0),))) is None
