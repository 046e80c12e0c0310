"""A small part of A11, and its witness: the whole is `python -m benchmarks swarm_churn`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import swarm_churn
from benchmarks.swarm_churn import Size, bound_s, churn_spec, lateness, layout_of, play, report_of
from benchmarks.swarm_churn_witness import Adoption, Gap, Witness, overlaps_s
from protocols.actions import Action, Count, RecoverySource
from protocols.adoption import Adoption as AdoptionMachine
from protocols.recovery import RecoveryState

SMALL = Size(seeds=4, peers=60, stages=6)


def a_member(peer: str, stage: int, **changes: Any) -> Any:
    """As much of a Member as a witness looks at."""
    recovery = SimpleNamespace(state=RecoveryState.SERVING, stage=stage, source=RecoverySource.SHADOW)
    core = SimpleNamespace(stage=stage, recovery=recovery, relay=SimpleNamespace(draining=False))
    return SimpleNamespace(**{"peer": peer, "core": core, "is_alive": True, "is_stopped": False, **changes})


class Scene:
    """A witness of three stages, all served, and what befalls them."""

    def __init__(self) -> None:
        self.witness = Witness(3)
        self.members = {peer: a_member(peer, stage) for peer, stage in (("b1", 1), ("c1", 2), ("c2", 2))}
        for member in self.members.values():
            self.witness.happened(0.0, member, [])
        self.witness.has_begun = True

    def kill(self, peer: str, now: float) -> None:
        self.members[peer].is_alive = False
        self.witness.befell(now, self.members[peer])

    def does(self, peer: str, now: float, *actions: Action) -> None:
        self.witness.happened(now, self.members[peer], actions)


def test_small_swarms_keep_the_bars() -> None:
    """Four seeds of sixty peers, in one of which the first claimant is killed; stages were lost, and adopted."""
    outcomes = [play(seed, peers=SMALL.peers, stages=SMALL.stages) for seed in range(SMALL.seeds)]
    report = report_of({SMALL: outcomes})
    assert report.passed, report.lines()
    assert all(outcome.gaps for outcome in outcomes)
    assert any(adoption.source is not None for outcome in outcomes for adoption in outcome.adoptions)


def test_a_swarm_that_adopts_nothing_fails_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdoptionMachine, "on_view", lambda self, view, now: [])
    monkeypatch.setattr(swarm_churn, "LATEST_S", 140.0)
    outcome = play(0, peers=SMALL.peers, stages=SMALL.stages)
    failed = [bar.id for bar in report_of({SMALL: [outcome]}).bars if not bar.passed]
    assert failed == ["A11-empty"]


def test_the_layout_has_thin_stages_and_even_ones() -> None:
    layout = layout_of(1000, 20)
    assert sum(layout.values()) == 1000
    assert [layout[stage] for stage in (0, 1, 2)] == [3, 2, 2]
    assert {layout[stage] for stage in range(3, 20)} == {58, 59}


def test_a_gap_lasts_from_the_last_death_to_the_first_who_serves() -> None:
    scene = Scene()
    scene.kill("b1", 10.0)
    assert [(gap.stage, gap.began_s) for gap in scene.witness.open_gaps] == [(1, 10.0)]
    scene.members["c1"].core.stage = 1
    scene.does("c1", 40.0, Count(name="recovery-done", detail="stage 1: shadow", notable=True))
    assert [(gap.ended_s, gap.blows) for gap in scene.witness.gaps] == [(40.0, 0)]


def test_a_stopped_replica_serves_nobody() -> None:
    scene = Scene()
    scene.members["b1"].is_stopped = True
    scene.witness.befell(5.0, scene.members["b1"])
    scene.members["b1"].is_stopped = False
    scene.witness.befell(8.0, scene.members["b1"])
    assert [(gap.began_s, gap.ended_s) for gap in scene.witness.gaps] == [(5.0, 8.0)]


def test_the_death_of_the_next_in_turn_is_in_the_way() -> None:
    """c1 would adopt stage 1; its claim, had it one, and its record have to lapse. c2's death is nobody's trouble."""
    scene = Scene()
    scene.kill("b1", 10.0)
    scene.kill("c2", 20.0)
    assert scene.witness.open_gaps[0].blows == 0
    scene.kill("c1", 30.0)
    gap = scene.witness.open_gaps[0]
    assert (gap.blows, gap.way_is_free_s) == (1, 30.0)


def test_while_the_swarm_is_split_each_side_counts_for_itself() -> None:
    scene = Scene()
    scene.witness.split(10.0, lambda peer: int(peer == "c2"))
    assert [(gap.stage, gap.side) for gap in scene.witness.open_gaps] == [(1, 1)]
    scene.witness.split(30.0, None)
    assert [(gap.began_s, gap.ended_s) for gap in scene.witness.gaps] == [(10.0, 30.0)]
    assert scene.witness.open_gaps == []


def test_two_who_adopt_one_stage_at_once_are_seen() -> None:
    scene = Scene()
    adopted = Count(name="stage-adopted", detail="stage 2 -> 1", notable=True)
    scene.does("c1", 10.0, adopted)
    scene.does("c2", 14.0, adopted)
    scene.witness.end(20.0)
    assert overlaps_s(scene.witness.adoptions) == [6.0]
    assert overlaps_s([Adoption(peer="x", stage=stage, began_s=0.0, ended_s=9.0) for stage in (1, 2)]) == []


def test_the_bound_is_the_sum_that_the_module_promises() -> None:
    """20 s for a record to lapse, four polls of 2 s, 1.5 s for claims, 4 s of draining, 5 s of copying."""
    gap = Gap(stage=1, side=0, began_s=0.0, ended_s=19.25)
    spec = churn_spec(3)
    assert bound_s(gap, spec) == 38.5
    assert lateness(gap, cast("Any", SimpleNamespace(seconds=100.0, spec=spec))) == 0.5
    gap.blows_s, gap.neighbours = [5.0], 1
    assert bound_s(gap, spec) == 38.5 + 10.0 + 9.5
    gap.failed_donors, gap.donors_s = 1, 20.0
    assert bound_s(gap, spec) == 38.5 + 10.0 + 9.5 + 22.0


def test_claims_that_compete_cost_no_time() -> None:
    gap = Gap(stage=1, side=0, began_s=0.0, claims_s=[30.0, 31.0, 37.0])
    assert gap.claims_spent == 1
