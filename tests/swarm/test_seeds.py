"""Whole swarms under churn: nothing is lost, nothing leaks, whatever the seed. Bar F4, a part of it."""

from __future__ import annotations

import pytest

from peer.simulator.churn import Churn, simulate
from peer.simulator.swarm import Simulation, tiny_spec

KILLS = Churn(kills=3)
STORM = Churn(kills=3, joins=3, stops=2, cuts=3, leaves=2, loss_share=0.001)


def say(seed: int, peers: int) -> str:
    return f"gossamer simulate --peers {peers} --seed {seed} --story"


@pytest.mark.parametrize("seed", range(20))
def test_three_kills_among_twenty_peers_lose_nothing(seed: int):
    """200 microbatches, three kills with signal 9 at drawn moments; all invariants after every event."""
    report = simulate(peers=20, seed=seed, churn=KILLS, microbatches=200)
    assert report.finished >= 200, say(seed, 20)
    assert (report.lost, report.leaked) == (0, 0), say(seed, 20)


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_loses_nothing(seed: int):
    """Kills, joins, freezes, leaves, cut links and lost acks at once: slower, but every microbatch ends once."""
    report = simulate(peers=20, seed=seed, churn=STORM, microbatches=120)
    assert report.finished >= 120
    assert (report.lost, report.leaked) == (0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_with_rounds_planned_together_loses_nothing(seed: int):
    """The same weather where originators plan, repair around losses, and plan anew."""
    report = simulate(peers=20, seed=seed, churn=STORM, microbatches=120, planned=True)
    assert report.finished >= 120
    assert (report.lost, report.leaked) == (0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_a_thin_swarm_outlives_the_loss_of_whole_stages(seed: int):
    """Ten peers, six of them killed and six others joining: stages are skipped, adopted, rebuilt."""
    report = simulate(peers=10, seed=seed, churn=Churn(kills=6, joins=6), microbatches=60)
    assert report.finished >= 60, say(seed, 10)
    assert (report.lost, report.leaked) == (0, 0)


@pytest.mark.parametrize("planned", [False, True])
def test_two_stages_wait_for_the_next_peer_when_the_second_is_lost(planned: bool):
    """Where one relay is all there is, nothing can be skipped: work is held until somebody joins."""
    simulation = Simulation(tiny_spec(2, paths={"planned": planned}), {0: 1, 1: 1}, seed=1)
    simulation.kill(1, 3.0)
    simulation.join(1, 20.0)
    report = simulation.run(until_microbatches=40, until_s=200.0)
    assert report.finished >= 40
    assert (report.lost, report.leaked) == (0, 0)


def test_the_same_seed_gives_the_same_events():
    """A failure that a seed has found can be looked at again, event by event."""
    first, again, other = (
        simulate(peers=20, seed=seed, churn=STORM, microbatches=60).digest for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


def test_encoding_changes_nothing():
    """What a message says survives its bytes: the events are the same with and without them."""
    digests = {
        simulate(peers=10, seed=3, churn=KILLS, microbatches=60, encode=encode, check=encode).digest
        for encode in (True, False)
    }
    assert len(digests) == 1
