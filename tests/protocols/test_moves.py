"""When a peer changes its stage, and when it does not; where a joiner goes that has nothing to go by."""

from __future__ import annotations

from math import inf

from peer.simulator.swarm import tiny_spec
from protocols.actions import PutClaim, ReadClaims, WeighStages
from protocols.core import PeerCore
from protocols.costs import Costs
from protocols.events import ClaimsRead, LeaveRequested, StagesWeighed, Started, ViewChanged
from protocols.moves import CLAIM_SETTLE_S, CONFIRM_S, LOOK_S, MARGIN, Moves
from protocols.recovery import RecoveryState
from protocols.swarm import SwarmView
from tests.protocols.builders import info, view_of

SPEC = tiny_spec(4, paths={"planned": True})
CROWDED = view_of("a1", "b1", "b2", "b3", "c1", "d1")  # b3 is the one to move
NOW_S = 2 * LOOK_S


def weighed(*seconds: float) -> StagesWeighed:
    return StagesWeighed(seconds=tuple(enumerate(seconds)))


def looking(view: SwarmView = CROWDED) -> Moves:
    """b3, with its first question out."""
    moves = Moves("b3", SPEC, Costs("b3"))
    moves.on_view(0.0)
    (action,) = moves.on_deadline(view, 1, NOW_S)
    assert isinstance(action, WeighStages)
    return moves


def asked_again(moves: Moves) -> None:
    (action,) = moves.on_deadline(CROWDED, 1, NOW_S + 2 * CONFIRM_S)
    assert isinstance(action, WeighStages)


def claiming() -> Moves:
    """Twice the same answer: stage 2 is to be claimed."""
    moves = looking()
    assert moves.on_weighed(weighed(1.0, 1.0, 0.5, 1.0), 1, NOW_S) == []
    asked_again(moves)
    actions = moves.on_weighed(weighed(1.0, 1.0, 0.5, 1.0), 1, NOW_S + 2 * CONFIRM_S)
    assert actions[-1] == PutClaim(stage=2)
    assert moves.on_deadline(CROWDED, 1, NOW_S + 2 * CONFIRM_S + CLAIM_SETTLE_S) == [ReadClaims(stage=2)]
    return moves


def test_a_move_is_confirmed_claimed_and_then_made():
    assert claiming().on_claims(ClaimsRead(stage=2, claims=(("b3", 3.0),)), CROWDED, 1) == 2


def test_of_several_that_claim_the_same_stage_one_goes():
    """The older claim wins; of two made together, that of the lower id."""
    assert claiming().on_claims(ClaimsRead(stage=2, claims=(("b3", 3.0), ("d9", 9.0))), CROWDED, 1) is None
    assert claiming().on_claims(ClaimsRead(stage=2, claims=(("b3", 3.0), ("a0", 3.5))), CROWDED, 1) is None


def test_a_gain_below_the_margin_and_a_second_thought_are_no_reason():
    moves = looking()
    assert moves.on_weighed(weighed(1.0, 1.0, 1.0 - MARGIN / 2, 1.0), 1, NOW_S) == []
    assert moves.on_deadline(CROWDED, 1, NOW_S + 2 * CONFIRM_S) == []  # not before the next look
    moves = looking()
    moves.on_weighed(weighed(1.0, 1.0, 0.5, 1.0), 1, NOW_S)
    asked_again(moves)
    assert moves.on_weighed(weighed(1.0, 1.0, 1.0, 0.5), 1, NOW_S + 2 * CONFIRM_S) == []


def test_nobody_moves_where_no_plan_could_be_made_at_all():
    """Infinite everywhere: that is no gain, however often it is confirmed."""
    moves = looking()
    for now in (NOW_S, NOW_S + 2 * CONFIRM_S):
        assert moves.on_weighed(weighed(inf, inf, inf, inf), 1, now) == []
        assert moves.on_deadline(CROWDED, 1, now + 2 * CONFIRM_S) == []


def test_an_only_replica_and_a_first_stage_peer_stay():
    for peer, stage in (("c1", 2), ("a1", 0), ("b1", 1)):
        moves = Moves(peer, SPEC, Costs(peer))
        moves.on_view(0.0)
        assert moves.on_deadline(CROWDED, stage, NOW_S) == []


def a_joiner() -> PeerCore:
    """It has seen the table twice and asks which stage would gain most."""
    core = PeerCore("z9", SPEC)
    core.handle(Started(view=SwarmView()), 0.0)
    everybody = view_of("a1", "b1", "b2", "c1", "d1", "d2", info("z9", stage=None))
    core.handle(ViewChanged(view=everybody), 1.0)
    actions = core.handle(ViewChanged(view=everybody), 2.0)
    assert any(isinstance(action, WeighStages) for action in actions)
    return core


def test_a_joiner_goes_where_the_plan_gains_most():
    core = a_joiner()
    core.handle(weighed(4.0, 3.0, 2.0, 1.0), 3.0)
    assert core.stage == 3


def test_a_joiner_without_any_plan_goes_where_replicas_are_fewest():
    core = a_joiner()
    core.handle(weighed(inf, inf, inf, inf), 3.0)
    assert core.stage == 2


def test_a_joiner_that_was_told_to_leave_takes_no_stage():
    """The answer comes from a thread, and may come late."""
    core = a_joiner()
    core.handle(LeaveRequested(), 2.5)
    assert core.handle(weighed(4.0, 3.0, 2.0, 1.0), 3.0) == []
    assert core.stage is None
    assert core.recovery.state is RecoveryState.JOINING
