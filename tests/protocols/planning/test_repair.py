"""After one peer left: legal again, nothing lost, no worse than it must be, and what it costs is local."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import LocalProtocolError
from protocols.planning import plan, repair
from protocols.planning.instance import Instance
from protocols.planning.round_model import RoundModel
from tests.protocols.planning.published import published_instance
from tests.protocols.planning.small import broken_rules, instances


@pytest.mark.parametrize("gone", ["00", "06", "10", "11", "17", "03", "14", "12"])
def test_a_published_swarm_without_one_peer_is_planned_about_as_well_as_anew(gone: str):
    """P4: within 1.10 of a full plan. A lost originator takes its microbatches along, a lost relay leaves all 30."""
    instance = published_instance("geo-distributed")
    repaired = repair(plan(instance), gone)
    lost_stage = plan(instance).stage_of[gone]
    assert gone not in repaired.stage_of
    assert len(repaired.paths) == (24 if lost_stage == 0 else 30)
    assert [rule for rule in broken_rules(repaired) if "beyond" in rule] == []
    anew = plan(repaired.instance)
    assert repaired.shortfall <= anew.shortfall
    assert repaired.makespan_s <= 1.10 * anew.makespan_s


@given(instances(), st.data())
@settings(max_examples=12)
def test_repaired_plans_keep_every_rule_that_can_be_kept(instance: Instance, data: st.DataObject):
    before = plan(instance)
    gone = data.draw(st.sampled_from(instance.peers))
    if instance.stage_sizes[0] == 1 and before.stage_of[gone] == 0:
        with pytest.raises(LocalProtocolError, match="last originator"):
            repair(before, gone)
        return
    if (
        len(instance.rules.relayed_stages) == 1
        and instance.stage_sizes[1] == 1
        and before.stage_of[gone] == 1
    ):
        return  # nobody is left to relay: not a plan any more
    after = repair(before, gone)
    assert gone not in after.stage_of
    assert broken_rules(after) == []
    assert after.makespan_s == pytest.approx(RoundModel(after.instance).simulate(after.paths).makespan_s)


def test_a_stage_without_a_replica_is_skipped_by_all():
    """Its last replica died: paths are legal without it, and no microbatch is dropped."""
    now = plan(published_instance("geo-distributed"))
    for gone in ("03", "05", "02"):
        assert now.stage_of[gone] == 3
        now = repair(now, gone)
    assert len(now.paths) == 30
    assert now.instance.rules.missing == {3}
    assert 3 not in now.stage_of.values()
    assert max(now.finish_s) < 1000


def test_the_same_loss_is_repaired_alike_by_everybody():
    """Two originators that see the same loss must not collide."""
    before = plan(published_instance("5-clusters"))
    assert repair(before, "18").microbatches == repair(before, "18").microbatches
