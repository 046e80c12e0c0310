"""After one peer left: only what touches it is planned anew, everything else keeps its path and its time.

A lost relay's visits go to its stage's other replicas; a lost originator takes its microbatches along, and the stages
that they visited hand visits over until all are visited alike again. What changed, and whatever shares a relay with it,
is then settled together. Where the caps cannot be met any more, visits go beyond them and the plan says by how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from protocols.errors import LocalProtocolError
from protocols.planning.anneal import Effort, Judge, anneal
from protocols.planning.groups import GROUP_PEERS_MAX
from protocols.planning.instance import Instance
from protocols.planning.mend import GONE, Mend
from protocols.planning.objective import Objective
from protocols.planning.paths import best_first, evened, in_turns
from protocols.planning.plan import Plan
from protocols.planning.round_model import Path
from protocols.planning.rows import rows_of_paths
from protocols.planning.settle import Thoroughness, settle
from protocols.swarm import PeerId

QUICK = Thoroughness(operations_max=3_500)
QUICKER = Thoroughness(operations_max=2_000)  # where handling many paths takes most of the time
SEARCH = Effort(searches=8, steps=120)
TRIED = 8  # of what was found, the best by estimate


def repair(plan: Plan, gone: PeerId, *, seed: int = 0) -> Plan:
    """The plan without `gone`.

    Raises only where none is left: LocalProtocolError for the last originator, ConfigError for the last relay of all.
    """
    before = plan.instance
    lost = before.peers.index(gone)
    assert before.stage_of is not None
    lost_stage = int(before.stage_of[lost])
    instance = before.subset(np.delete(np.arange(before.num_peers), lost))
    if not instance.stage_sizes[0]:
        raise LocalProtocolError("the last originator left: there is nothing to plan")
    if not instance.stage_sizes[lost_stage]:
        instance = replace(instance, rules=instance.rules.without(lost_stage))
    kept = [(path, done_s) for path, done_s in zip(plan.paths, plan.finish_s, strict=True) if path[0] != lost]
    left = [tuple(GONE if hop == lost else hop - (hop > lost) for hop in path) for path, _ in kept]
    objective = Objective(instance)
    mend = Mend(instance, objective, left)
    mend.replace_lost(lost_stage)
    mend.level()
    finish_s = [done_s for _, done_s in kept]
    if instance.num_peers < GROUP_PEERS_MAX:  # so small that whole rows can be searched anew as well
        mends = [mend, *_searched(instance, objective, left, lost_stage, seed)]
        score, mend = best_first(instance, objective, mends, kept=1)[0]
        mend.touch_all()
        return settle(instance, mend, score.finish_s, QUICK)
    return settle(instance, mend, finish_s, QUICKER)


def _searched(
    instance: Instance, objective: Objective, left: Sequence[Path], lost_stage: int, seed: int
) -> list[Mend]:
    """All rows searched anew, in brief: whole rows move to another relay first, and what is too much spills over."""
    mend = Mend(instance, objective, left)
    mend.replace_lost(lost_stage, whole_paths=True)
    rows = rows_of_paths(instance, mend.paths)
    found = anneal(instance, rows, SEARCH, seed=seed)
    found.sort(key=Judge.of(instance, rows).estimate)
    distinct = dict.fromkeys(in_turns(instance, state) for state in found[:TRIED])
    return [evened(instance, objective, paths) for paths in distinct]
