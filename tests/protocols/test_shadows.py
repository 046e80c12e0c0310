"""The copy of the next stage's weights: when it is pulled, from whom, and to whom it is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from peer.simulator.compute import CHUNK
from peer.simulator.swarm import tiny_spec
from protocols.actions import Action, Count, Send
from protocols.admission import stage_parameters
from protocols.download import CHUNK_LIMIT_S
from protocols.messages import WeightsChunk, WeightsKind, WeightsRequest
from protocols.shadows import RETRY_ROUNDS, Shadows, holder_stages, interval_rounds, shadowed_stages
from tests.protocols.builders import SPEC, info, view_of

VIEW = view_of("a1", info("b1", round=60), info("c1", round=60), info("d1", round=60))
LATE = 60
ONE = tiny_spec(4, recovery={"shadow_depth": 1})


@pytest.fixture
def shadows() -> Iterator[Shadows]:
    """Of `b1`, which keeps stage 2's."""
    shadows = Shadows("b1", ONE)
    shadows.follow(1, 0)
    yield shadows
    shadows.check_invariants()


def chunk(index: int = 0, *, count: int = 1, kind=WeightsKind.WEIGHTS, **changes) -> WeightsChunk:
    fields = {"snapshot": "s", "sha256": "0" * 64, "round": LATE, "outer_step": 6, "packet": CHUNK, **changes}
    return WeightsChunk(kind=kind, stage=2, index=index, count=count, **fields)


def asked(actions: list[Action]) -> list[tuple[str, WeightsKind, int, int]]:
    wanted = [(one.to, one.message) for one in actions if isinstance(one, Send)]
    return [(to, it.kind, it.stage, it.index) for to, it in wanted if isinstance(it, WeightsRequest)]


def wants(stage: int = 2, index: int = 0) -> WeightsRequest:
    return WeightsRequest(kind=WeightsKind.SHADOW, stage=stage, snapshot="", index=index)


def test_the_copies_are_a_ring():
    """Stage 0's are kept by the last stage: there is no stage that nobody keeps."""
    assert [shadowed_stages(stage, SPEC) for stage in range(4)] == [(1, 2), (2, 3), (3, 0), (0, 1)]
    for stage in range(4):
        assert all(stage in shadowed_stages(holder, SPEC) for holder in holder_stages(stage, SPEC))


def test_a_copy_is_pulled_chunk_by_chunk_and_given_to_whoever_takes_the_stage_over(shadows: Shadows):
    assert asked(shadows.on_round(LATE, VIEW, 0.0)) == [("c1", WeightsKind.WEIGHTS, 2, 0)]
    assert asked(shadows.on_chunk("c1", chunk(0, count=2), 1.0)) == [("c1", WeightsKind.WEIGHTS, 2, 1)]
    assert shadows.held(2) is None
    kept = Count(name="shadow-kept", detail="stage 2: round 60")
    assert shadows.on_chunk("c1", chunk(1, count=2), 2.0) == [kept]
    given = shadows.on_request("d1", wants(index=1)).message
    assert isinstance(given, WeightsChunk)
    assert (given.index, given.count, given.round, given.sha256) == (1, 2, LATE, "0" * 64)


def test_the_next_copy_comes_an_interval_later(shadows: Shadows):
    shadows.on_round(LATE, VIEW, 0.0)
    shadows.on_chunk("c1", chunk(), 1.0)
    interval = interval_rounds(ONE, 2)
    assert shadows.on_round(LATE + interval - 1, VIEW, 2.0) == []
    assert asked(shadows.on_round(LATE + interval, VIEW, 3.0)) != []
    held = shadows.held(2)
    assert held is not None, "the old copy stays until the new one is whole"


def test_copies_cost_at_most_a_fortieth_of_the_work_that_crosses_the_border():
    """A large stage with little work is copied less often than the RunSpec asks for."""
    copy_bytes = 4 * stage_parameters(ONE, 0)
    work_bytes = 2 * ONE.boundary_bytes * ONE.rounds.microbatches
    assert interval_rounds(ONE, 0) >= ONE.recovery.shadow_every
    assert copy_bytes / interval_rounds(ONE, 0) <= 0.025 * work_bytes
    small = tiny_spec(4, recovery={"shadow_depth": 1, "shadow_every": 1})
    assert (interval_rounds(small, 0) - 1) * 0.025 * work_bytes < copy_bytes


def test_two_stages_are_kept_one_pulled_after_the_other_and_each_half_as_often():
    """So that two adjacent stages may be lost at once; the traffic stays what it was."""
    both = Shadows("b1", SPEC)
    both.follow(1, 0)
    assert asked(both.on_round(LATE, VIEW, 0.0)) == [("c1", WeightsKind.WEIGHTS, 2, 0)]
    assert both.on_round(LATE + 1, VIEW, 0.5) == []
    both.on_chunk("c1", chunk(), 1.0)
    assert asked(both.on_round(LATE + 2, VIEW, 2.0)) == [("d1", WeightsKind.WEIGHTS, 3, 0)]
    both.on_chunk("d1", replace(chunk(), stage=3), 3.0)
    assert [held.stage for stage in (2, 3) if (held := both.held(stage))] == [2, 3]
    assert interval_rounds(SPEC, 2) >= 2 * interval_rounds(ONE, 2) - 1
    both.check_invariants()


@pytest.mark.parametrize("what", ["refuses", "is silent", "is lost"])
def test_a_donor_that_fails_is_asked_again_some_rounds_later(shadows: Shadows, what: str):
    shadows.on_round(LATE, VIEW, 0.0)
    if what == "refuses":
        shadows.on_chunk("c1", wants().refusal(), 1.0)
    elif what == "is silent":
        shadows.on_deadline(CHUNK_LIMIT_S)
    else:
        shadows.on_peer_lost("c1")
    assert shadows.next_deadline() is None
    assert shadows.on_round(LATE + RETRY_ROUNDS - 1, VIEW, 30.0) == []
    assert asked(shadows.on_round(LATE + RETRY_ROUNDS, VIEW, 31.0)) != []


def test_nothing_is_pulled_before_training_or_while_nobody_is_there(shadows: Shadows):
    """Records lag: one that says round 0 need not be of a stage that has not trained."""
    assert shadows.on_round(0, VIEW, 0.0) == []
    assert shadows.on_round(LATE, view_of("a1", "b1", "d1"), 1.0) == []
    assert asked(shadows.on_round(LATE + 1, view_of("a1", "b1", "c1"), 2.0)) != []


def test_a_peer_that_moves_keeps_another_stage(shadows: Shadows):
    shadows.on_round(LATE, VIEW, 0.0)
    shadows.on_chunk("c1", chunk(), 1.0)
    shadows.follow(1, 70)
    assert shadows.held(2) is not None, "it starts over where it was"
    shadows.follow(2, 80)
    assert shadows.held(2) is None
    refusal = shadows.on_request("d1", wants()).message
    assert isinstance(refusal, WeightsChunk)
    assert refusal.count == 0


def test_chunks_that_nobody_asked_for_are_ignored(shadows: Shadows):
    assert shadows.on_chunk("c1", chunk(), 0.0) == []
    shadows.on_round(LATE, VIEW, 0.0)
    assert shadows.on_chunk("c2", chunk(), 1.0) == []
    assert shadows.on_chunk("c1", chunk(index=1, count=2), 1.0) == []
    assert shadows.held(2) is None


def test_a_run_may_do_without():
    none = Shadows("b1", tiny_spec(4, recovery={"shadow_depth": 0}))
    none.follow(1, 0)
    assert none.on_round(LATE, VIEW, 0.0) == []
