"""The simulator must see what it is there to see: each of its checks is made to fail once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from peer.simulator.churn import Churn, layout_of, simulate
from peer.simulator.compute import CostCompute
from peer.simulator.report import InvariantBroken
from peer.simulator.swarm import Simulation, tiny_spec
from protocols.actions import DropStash, FetchBatch, MicrobatchFinished
from protocols.errors import ConfigError
from tests.protocols.builders import key

LAYOUT = {0: 1, 1: 1, 2: 1}


def a_simulation() -> Simulation:
    return Simulation(tiny_spec(3), LAYOUT, 1)


def test_a_stash_that_leaks_is_found(monkeypatch: pytest.MonkeyPatch):
    """Compute that forgets to forget: c1 dies, the attempts are released, b1 keeps their stashes."""
    monkeypatch.setattr(CostCompute, "drop", lambda self, key: None)
    simulation = Simulation(tiny_spec(3), {0: 1, 1: 1, 2: 2}, 1)
    simulation.kill("c1", 2.0)
    simulation.kill("c2", 4.0)
    assert simulation.run(until_s=20.0).leaked > 0


def test_broken_books_of_a_machine_are_found_with_the_seed():
    simulation = a_simulation()
    simulation.members["b1"].core.relay._num_holding = 1
    with pytest.raises(InvariantBroken, match=r"seed 1 .* b1, after .* slots do not add up"):
        simulation.run(until_microbatches=4)


def test_a_microbatch_that_ends_twice_is_found():
    simulation = a_simulation()
    finished = MicrobatchFinished(key=key(0), round=0, train=True, loss=1.0, skipped=())
    simulation.finished(finished)
    with pytest.raises(InvariantBroken, match="finished twice"):
        simulation.finished(finished)


def test_a_microbatch_that_is_fetched_twice_is_found():
    simulation = a_simulation()
    fetch = FetchBatch(key=key(0), round=0, train=True)
    simulation.books.fetched(fetch.key)
    with pytest.raises(InvariantBroken, match="fetched again"):
        simulation.books.fetched(fetch.key)


def test_a_stash_that_is_dropped_while_its_forward_runs_does_not_come_back():
    simulation = a_simulation()
    compute = simulation.members["b1"].compute
    compute._pending.add(key(0))
    compute.drop(DropStash(key=key(0)).key)
    compute._keep(key(0))
    assert compute.stashes == set()


def test_a_halted_swarm_holds_its_microbatches_and_loses_none():
    """Two of three middle stages are gone for good: more than may be skipped."""
    simulation = Simulation(tiny_spec(4), {0: 1, 1: 1, 2: 1, 3: 1}, 1)
    simulation.kill(2, 3.0)
    simulation.kill(3, 3.0)
    report = simulation.run(until_microbatches=1000, until_s=60.0)
    assert report.is_clean
    assert report.held > 0


def test_what_dies_with_its_originator_is_told_apart():
    simulation = Simulation(tiny_spec(3), {0: 2, 1: 1, 2: 1}, 1)
    simulation.kill("a2", 2.35)
    report = simulation.run(until_microbatches=20)
    assert report.is_clean
    assert report.orphaned > 0


def test_a_swarm_that_is_too_small_is_refused():
    with pytest.raises(ConfigError, match="at least 10"):
        layout_of(9)
    assert layout_of(12) == {0: 3, 1: 3, 2: 2, 3: 2, 4: 2}


def test_a_report_says_what_happened():
    report = simulate(peers=10, seed=1, churn=Churn(kills=1), microbatches=20, encode=False, tell=True)
    assert report.summary().startswith(f"finished {report.finished} lost 0 leaked 0 ")
    assert any("kill" in line for line in report.story)


def test_the_cost_only_simulator_needs_no_torch():
    """It starts in a fraction of a second, on machines that have no torch."""
    code = (
        "import sys; from peer.simulator.churn import Churn, simulate; "
        "simulate(peers=10, seed=1, churn=Churn(), microbatches=2, encode=False); "
        "sys.exit('torch' in sys.modules or 'hivemind' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
