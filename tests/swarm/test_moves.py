"""Peers find their place: a joiner goes where the plan gains most, and a crowded stage gives to a thin one."""

from __future__ import annotations

from collections import Counter

from peer.simulator.report import Report
from peer.simulator.swarm import Simulation, tiny_spec

PLANNED = {"planned": True}


def stages_of(simulation: Simulation) -> Counter[int | None]:
    return Counter(member.core.stage for member in simulation.members.values() if member.is_alive)


def run_for(simulation: Simulation, seconds: float) -> Report:
    return simulation.run(until_s=seconds)


def test_a_crowded_stage_gives_one_peer_at_a_time_until_no_move_pays():
    """Five replicas of stage 1, one of stage 2 that all must pass: stage 2 gets help, no stage is ever empty."""
    spec = tiny_spec(3, paths=PLANNED, rounds={"microbatches": 6, "window": 6, "slots": 3})
    simulation = Simulation(spec, {0: 2, 1: 5, 2: 1}, seed=3)
    fewest = []

    def look() -> None:
        fewest.append(min(len(simulation.table.view().replicas(stage)) for stage in range(3)))

    for second in range(5, 450):
        simulation.clock.at(float(second), look)
    report = run_for(simulation, 450.0)
    after = stages_of(simulation)
    assert after[2] >= 2
    assert after[1] >= 2
    assert sum(after.values()) == 8
    assert min(fewest) >= 1
    assert (report.lost, report.leaked) == (0, 0)


def test_nobody_moves_where_all_stages_are_served_alike():
    """Weighing finds nothing that pays by the margin: moving costs the swarm a replica for a while."""
    spec = tiny_spec(3, paths=PLANNED, rounds={"microbatches": 4})
    simulation = Simulation(spec, {0: 2, 1: 2, 2: 2}, seed=5)
    run_for(simulation, 300.0)
    assert stages_of(simulation) == {0: 2, 1: 2, 2: 2}


def test_a_joiner_goes_where_the_makespan_falls_most_not_where_replicas_are_fewest():
    """Both middle stages have two replicas, but those of stage 2 are ten times slower."""
    spec = tiny_spec(3, paths=PLANNED, rounds={"microbatches": 6, "window": 6, "slots": 3})
    simulation = Simulation(spec, {0: 2, 1: 2, 2: 2}, seed=7)
    for peer in ("c1", "c2"):
        simulation.slow(peer, 10.0, 1.0)
    simulation.join(None, 40.0)
    run_for(simulation, 70.0)
    assert stages_of(simulation) == {0: 2, 1: 2, 2: 3}
