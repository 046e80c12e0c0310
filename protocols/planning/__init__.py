"""SkipPipe's planner: who serves which stage, which way each microbatch goes, how long the round will take.

    instance -> rows -> anneal -> mend -> settle (polish) -> Plan        all times judged by round_model
    Plan -> repair -> Plan        after a loss
    a large swarm -> groups -> a Plan for each

Pure and deterministic: peers that start from the same instance get the same plan. (SkipPipe, arXiv 2502.19913.)
"""

from __future__ import annotations

from protocols.planning.arrangement import arrange
from protocols.planning.groups import Crowd, plan_crowd, plan_in_groups
from protocols.planning.instance import Instance, PathRules, Timing, make_instance
from protocols.planning.paths import find_paths
from protocols.planning.plan import Plan, PlannedMicrobatch
from protocols.planning.repair import repair

__all__ = [
    "Crowd",
    "Instance",
    "PathRules",
    "Plan",
    "PlannedMicrobatch",
    "Timing",
    "make_instance",
    "plan",
    "plan_crowd",
    "plan_in_groups",
    "repair",
]


def plan(instance: Instance, *, seed: int = 0, jitter: float = 0.0) -> Plan:
    """The best plan that was found: who serves what, where that is free, and all paths.

    `jitter` 0.2 prefers plans that stay short when all times vary by up to 20 %.
    """
    if instance.stage_of is None:
        return arrange(instance, seed=seed, jitter=jitter)
    return find_paths(instance, seed=seed, jitter=jitter)
