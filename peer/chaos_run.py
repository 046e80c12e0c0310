"""`gossamer up --chaos SEED`: train through drawn misfortunes, then tell what became of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.chaos import Chaos, ChaosEvent, Rates, Strike, draw
from peer.chaos_report import answers, in_words, summary
from peer.config import write_text
from peer.flights import Flights, read_flights
from peer.follow import follow
from peer.launch import LocalSwarm
from peer.progress import ProgressTracker
from peer.status import PeerStatus
from protocols.run_spec import RunSpec

REPORT_FILE = "chaos.json"
SETTINGS = {"flight_recorder": True, "checkpoint_every": 10}  # an originator comes back from its checkpoint


def run_chaos(
    spec: RunSpec,
    layout: Mapping[int, int],
    folder: Path,
    seed: int,
    *,
    rates: Rates,
    compare: bool,
    say: Callable[[str], None],
) -> None:
    """The report is said at the end, and lies in `folder` as JSON, beside the logs."""
    say(f"run {spec.run_id}: {sum(layout.values())} peers, chaos {seed}, logs in {folder / 'chaos' / 'logs'}")
    run = _train(spec, layout, folder / "chaos", draw(seed, spec.num_stages, rates))
    undisturbed: Flights | None = None
    if compare:
        say("once more, undisturbed")
        undisturbed = _train(spec, layout, folder / "undisturbed", iter(())).flights
    found = answers(run.strikes, run.flights, spec)
    told = {"seed": seed, **summary(spec, found, run.flights, run.statuses, undisturbed)}
    write_text(folder / REPORT_FILE, json.dumps(told, indent=2) + "\n")
    say(f"{in_words(found, told)}\nin full: {folder / REPORT_FILE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    strikes: Sequence[Strike]
    statuses: Sequence[PeerStatus]
    flights: Flights


def _train(spec: RunSpec, layout: Mapping[int, int], folder: Path, events: Iterator[ChaosEvent]) -> _Run:
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run: its peers would come back from there
    with LocalSwarm(spec, layout, folder, SETTINGS) as swarm:
        chaos = Chaos(swarm, events)
        follow(swarm, chaos, ProgressTracker(spec.num_stages))
        # before they leave, which looks like a loss to whoever leaves last
        return _Run(strikes=chaos.strikes, statuses=swarm.status(), flights=read_flights(folder))
