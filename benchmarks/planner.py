"""P1 to P4, P6 and P10: the planner against the published scheduler's best plans, and what planning costs.

The opponent is that scheduler's coarse mode, its best in every setting; both sides are timed by our round model, which
gives the published plans their published seconds. Costs are CPU seconds of this process. Larger swarms repeat the
cities of `geo-distributed`, with its shares of peers a stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.bars import Bar, Report, number
from peer.plan_file import GAP_S, GAP_START_S, PublishedPlan, published_matrix, published_plan
from protocols.planning import Crowd, Instance, Plan, Timing, make_instance, plan, plan_crowd, repair
from protocols.planning.round_model import RoundModel
from protocols.swarm import PeerId

SETTINGS = ("geo-distributed", "5-clusters", "single-cluster")
SINGLE_CLUSTER_S = 54.87  # what a path costs that never leaves its town
CITIES = 12  # of geo-distributed; its peers 0 to 11 are in one each
STAGE_OF_20 = (0,) * 5 + tuple(stage for stage in range(1, 6) for _ in range(3))
CROWD_PEERS = 10_000
ACCESS_S = 0.18  # of an own line, one way: half of what two peers in one city need
JITTER, DRAWS, DRAWS_QUICK = 0.2, 60, 20
LOSSES = {20: 20, 100: 12, 1000: 6}  # peers to how many of them are lost, one at a time
LOSSES_QUICK = {20: 6, 100: 3, 1000: 1}


def run(*, quick: bool) -> Report:
    arranged = {setting: published_instance(setting) for setting in SETTINGS}
    free_plans = {setting: timed(plan, replace(arranged[setting], stage_of=None)) for setting in SETTINGS}
    geo = arranged["geo-distributed"]
    geo_s = plan(geo).makespan_s
    free_s = {
        setting: found.makespan_s / known(setting).expected_s for setting, (found, _) in free_plans.items()
    }
    roomy_s = plan(replace(geo, originator_slots=6)).makespan_s
    bars = (
        Bar(id="P1", value=geo_s / known("geo-distributed").expected_s, op="<=", limit=0.93,
            what="geo-distributed, published arrangement: makespan / published"),
        Bar(id="P2-5-clusters", value=free_s["5-clusters"], op="<=", limit=0.78, what="own arrangement: / published"),
        Bar(id="P2-single", value=free_s["single-cluster"], op="<=", limit=1.0, what="single-cluster: / published"),
        Bar(id="P3-20", value=max(cpu_s for _, cpu_s in free_plans.values()), op="<=", limit=1.0,
            what="CPU seconds for 20 peers with arrangement, the slowest setting"),
        *large_bars("P3-1000", "stages dealt in each city", many_peers(1000, arranged=True)),
        *large_bars("P3-1000-free", "own arrangement", many_peers(1000)),
        *crowd_bars(),
        *repair_bars(LOSSES_QUICK if quick else LOSSES),
        Bar(id="P6", value=jittered(geo, DRAWS_QUICK if quick else DRAWS), op="<=", limit=0.975,
            what="all times up to 20 % longer: mean makespan / published in the same draws"),
        Bar(id="P10", value=roomy_s / geo_s, op="<=", limit=0.92, what="originators with 6 slots: makespan / with 3"),
    )  # fmt: skip
    return Report(bars=bars, facts=_facts(geo_s, roomy_s, free_plans))


def published_instance(setting: str) -> Instance:
    """With the published arrangement."""
    return published_matrix(setting).instance(known(setting).arrangement)


def known(setting: str) -> PublishedPlan:
    found = published_plan(published_matrix(setting))
    assert found is not None
    return found


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The result, and its CPU seconds."""
    began_s = time.process_time()
    result = work(*arguments)
    return result, time.process_time() - began_s


def many_peers(num_peers: int, *, arranged: bool = False) -> Instance:
    """Cities and stage shares of geo-distributed; `arranged`: each city deals its peers over the stages."""
    matrix = published_matrix("geo-distributed")
    names = _names(num_peers)
    city_N = np.arange(num_peers) % CITIES
    link_NN = np.array(matrix.link_cost_s)[:CITIES, :CITIES]
    np.fill_diagonal(link_NN, matrix.link_cost_s[0][CITIES])  # peers 0 and 12 are in one city
    return make_instance(
        names,
        [matrix.compute_forward_s[0]] * num_peers,
        link_NN[np.ix_(city_N, city_N)],
        rules=matrix.instance().rules,
        microbatches=matrix.microbatches_per_origin,
        slots=matrix.memory_per_node,
        stage_of=stages_in_shares(num_peers) if arranged else None,
        stage_sizes=[size * num_peers // len(STAGE_OF_20) for size in matrix.stage_sizes],
        timing=Timing(gap_s=GAP_S, gap_start_s=GAP_START_S),
    )


def stages_in_shares(num_peers: int) -> dict[PeerId, int]:
    """City by city, the peers of each are dealt over the stages in the published shares."""
    names = _names(num_peers)
    by_city = sorted(range(num_peers), key=lambda index: (index % CITIES, index))
    return {names[index]: STAGE_OF_20[place % len(STAGE_OF_20)] for place, index in enumerate(by_city)}


def _names(num_peers: int) -> list[PeerId]:
    return [f"{index:05d}" for index in range(num_peers)]


def crowd(num_peers: int) -> Crowd:
    """The cities laid out in space so that distances are links (classical scaling), peers strewn about them."""
    matrix = published_matrix("geo-distributed")
    link_CC = np.minimum(np.array(matrix.link_cost_s)[:CITIES, :CITIES], 4.0)  # without the slip of units
    squared_CC = (link_CC - 2 * ACCESS_S).clip(min=0) ** 2
    np.fill_diagonal(squared_CC, 0.0)
    centring_CC = np.eye(CITIES) - 1 / CITIES
    values, vectors = np.linalg.eigh(-0.5 * centring_CC @ squared_CC @ centring_CC)
    place_CD = vectors[:, -3:] * np.sqrt(values[-3:].clip(min=0))
    draws = np.random.default_rng(0)
    return Crowd(
        peers=tuple(_names(num_peers)),
        stage_of=stages_in_shares(num_peers),
        forward_s=np.full(num_peers, matrix.compute_forward_s[0]),
        coordinates_s=place_CD[np.arange(num_peers) % CITIES] + draws.normal(scale=0.02, size=(num_peers, 3)),
        access_s=draws.uniform(0.5 * ACCESS_S, 1.5 * ACCESS_S, num_peers),
        slots=matrix.memory_per_node,
        rules=matrix.instance().rules,
        microbatches=matrix.microbatches_per_origin,
        timing=Timing(gap_s=GAP_S, gap_start_s=GAP_START_S),
    )


def large_bars(name: str, what: str, instance: Instance) -> list[Bar]:
    found, cpu_s = timed(plan, instance)
    assert not found.shortfall
    return [
        Bar(id=name, value=cpu_s, op="<=", limit=2.0, what=f"CPU seconds for 1,000 peers, 1,500 microbatches, {what}"),
        Bar(id=f"{name}-makespan", value=found.makespan_s / SINGLE_CLUSTER_S, op="<=", limit=1.2,
            what=f"its makespan / that of a single cluster, {what}"),
    ]  # fmt: skip


def crowd_bars() -> list[Bar]:
    plans, cpu_s = timed(plan_crowd, crowd(CROWD_PEERS))
    assert sum(len(found.stage_of) for found in plans) == CROWD_PEERS, "everybody is in a group"
    what = f"CPU seconds for 10,000 peers in {len(plans)} groups, slowest {max(p.makespan_s for p in plans):.1f} s"
    return [Bar(id="P3-10000", value=cpu_s, op="<=", limit=20.0, what=what)]


def repair_bars(losses: dict[int, int]) -> list[Bar]:
    """At each size, the slowest repair, and the worst result against planning anew."""
    bars: list[Bar] = []
    for num_peers, num_losses in losses.items():
        before = plan(
            published_instance("geo-distributed") if num_peers == 20 else many_peers(num_peers, arranged=True)
        )
        gone = before.instance.peers[:: num_peers // num_losses][:num_losses]
        plans = [repair(before, peer) for peer in gone]
        ratios = [after.makespan_s / plan(after.instance).makespan_s for after in plans]
        slowest_s = max(median(timed(repair, before, peer)[1] for _ in range(3)) for peer in gone)
        bars += [
            Bar(id=f"P4-{num_peers}", value=slowest_s, op="<=", limit=0.1,
                what=f"CPU seconds to repair around one of {num_peers} peers, the slowest of {num_losses}"),
            Bar(id=f"P4-{num_peers}-result", value=max(ratios), op="<=", limit=1.10,
                what="its makespan / planned anew, the worst of these"),
        ]  # fmt: skip
    return bars


def jittered(instance: Instance, draws: int) -> float:
    """Mean makespan of a plan made for jitter over that of the published one, each peer and link drawn anew."""
    published = known("geo-distributed")
    paths = plan(instance, jitter=JITTER).paths
    varied = [RoundModel(one) for one in slower(instance, draws)]
    ours_s = mean(model.simulate(paths).makespan_s for model in varied)
    theirs_s = mean(
        model.simulate(published.paths, release_s=published.release_s, after=published.after).makespan_s
        for model in varied
    )
    return ours_s / theirs_s


def slower(instance: Instance, draws: int) -> Iterable[Instance]:
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        yield replace(
            instance,
            forward_s=instance.forward_s * rng.uniform(1, 1 + JITTER, instance.num_peers),
            link_s=instance.link_s * rng.uniform(1, 1 + JITTER, instance.link_s.shape),
        )


def _facts(
    geo_s: float, roomy_s: float, free_plans: dict[str, tuple[Plan, float]]
) -> tuple[tuple[str, str], ...]:
    rows = [
        (f"{setting}, own arrangement", f"{found.makespan_s:.2f} s (published {known(setting).expected_s:.2f} s,"
         f" bound {found.lower_bound_s:.2f} s), {cpu_s:.2f} CPU s")
        for setting, (found, cpu_s) in free_plans.items()
    ]  # fmt: skip
    return (
        *rows,
        (
            "geo-distributed, published arrangement",
            f"{number(geo_s)} s; originators with 6 slots {number(roomy_s)} s",
        ),
    )
