"""What no plan can beat: lower bounds of the makespan of an arranged instance, whatever paths and orders are chosen.

Four reasons why a round takes long: the busiest originator, the stage with too few hands, the longest trip that an
originator cannot avoid, and an originator's slots, which usually bind: with m microbatches in k slots some slot serves
ceil(m / k), one after the other.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (numpy's stubs leave the types of reductions, .T and .copy() open)

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from protocols.planning.instance import US_PER_S, Instance, Ints
from protocols.planning.stage_sets import stage_sets


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Each bound in seconds; the plan is at least as long as the largest."""

    originator_work_s: float
    stage_work_s: float
    longest_trip_s: float
    originator_slots_s: float

    @property
    def largest_s(self) -> float:
        return max(self.originator_work_s, self.stage_work_s, self.longest_trip_s, self.originator_slots_s)


def lower_bounds(instance: Instance) -> Bounds:
    """For all plans of this arrangement that visit the stages alike."""
    originators = instance.replicas(0)
    last_gap_us = instance.timing.gap_s * US_PER_S  # nobody waits for the pause after the last job
    trips_us = _shortest_trips_us(instance, originators)
    work_us = instance.microbatches * int(instance.origin_us[originators].max()) - last_gap_us
    slots_us = max(
        _slots_us(instance, int(peer), int(trip_us))
        for peer, trip_us in zip(originators, trips_us, strict=True)
    )
    return Bounds(
        originator_work_s=work_us / US_PER_S,
        stage_work_s=(_stage_work_us(instance) - last_gap_us) / US_PER_S,
        longest_trip_s=int(trips_us.max()) / US_PER_S,
        originator_slots_s=slots_us / US_PER_S,
    )


def _stage_work_us(instance: Instance) -> float:
    stages = instance.rules.relayed_stages
    visits = instance.total_microbatches * (instance.rules.path_stages - 1) // len(stages)
    hands = [float((1.0 / instance.relay_us[instance.replicas(stage)].clip(1)).sum()) for stage in stages]
    return visits / min(hands)


def _slots_us(instance: Instance, originator: int, trip_us: int) -> float:
    """Microbatches of `trip_us` each through the originator's slots, which open one after the other."""
    slots, microbatches = int(instance.origin_slots[originator]), instance.microbatches
    timing = instance.timing
    spacing_us = (float(instance.forward_s[originator]) + timing.gap_start_s) * US_PER_S
    turns = -(-microbatches // slots)
    opened = min(slots, microbatches)
    even_us = (microbatches * trip_us + spacing_us * opened * (opened - 1) / 2) / slots
    last_opened_us = turns * trip_us + (microbatches - 1) % slots * spacing_us
    return max(even_us, min(last_opened_us, (turns + 1) * trip_us))


def _shortest_trips_us(instance: Instance, originators: Ints) -> Ints:
    """[O] Of each originator, without waiting: the best order and relays, by dynamic programming over the hops."""
    work_us = _busy_us(instance, instance.timing.loss_factor)[originators]
    best_O = np.full(len(originators), np.iinfo(np.int64).max)
    reached: dict[tuple[int, ...], Ints] = {}
    orders = {
        tuple(order) for orders_WL in stage_sets(instance.rules).orders_SWL.tolist() for order in orders_WL
    }
    for order in sorted(orders):
        cost_OR = _reach(instance, originators, order[1:], reached)
        closing_RO = instance.round_trip_us[np.ix_(instance.replicas(order[-1]), originators)]
        best_O = np.minimum(best_O, (cost_OR + closing_RO.T).min(axis=1))
    return best_O + work_us


def _reach(
    instance: Instance, originators: Ints, stages: tuple[int, ...], reached: dict[tuple[int, ...], Ints]
) -> Ints:
    """[O, R] Cheapest way from each originator through `stages` to each replica of the last of them."""
    if stages not in reached:
        here = instance.replicas(stages[-1])
        if len(stages) == 1:
            cost_OR = instance.round_trip_us[np.ix_(originators, here)].copy()
        else:
            before_OQ = _reach(instance, originators, stages[:-1], reached)
            link_RQ = instance.round_trip_us[np.ix_(here, instance.replicas(stages[-2]))]
            cost_OR = np.stack([(before_OQ + link_Q).min(axis=1) for link_Q in link_RQ], axis=1)
        reached[stages] = cost_OR + _busy_us(instance, 0.0)[here]
    return reached[stages]


def _busy_us(instance: Instance, loss_factor: float) -> Ints:
    """[N] Forward and backward without pauses, which a microbatch need not wait for."""
    factor = 1 + instance.timing.backward_factor + loss_factor
    return np.rint(instance.forward_s * factor * US_PER_S).astype(np.int64)
