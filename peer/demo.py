"""`gossamer demo`: the main job. A swarm trains a small model on this machine and loses peers on the way.

Nine peers, five stages, two replicas of each but the first. One replica is killed, later every replica of an inner
stage, later a new peer joins. Then the same without kills, for comparison. What must come out: a validation loss below
that of a bigram model of the same text, within 3 % of the undisturbed run (bar F2).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.config import HostConfig, write_text
from peer.follow import follow
from peer.launch import LocalSwarm
from peer.plots import Curve, draw, write_csv
from peer.progress import Progress, ProgressTracker, merge_validation, short_number
from peer.schedule import Incident, Schedule, SwarmEvent, Verb
from protocols.errors import ConfigError
from protocols.run_spec import RunSpec, preset

TOTAL_ROUNDS = 750  # of 1,024 tokens
LAYOUT = {0: 1, 1: 2, 2: 2, 3: 2, 4: 2}
INNER_STAGE = 3
RATIO_MAX = 1.03  # bar F2
START_MAX_S = 30.0
PROMPT = "My fellow citizens"
SAMPLE_TOKENS = 120
WITH_KILLS, UNDISTURBED = "with kills", "undisturbed"
# Loopback peers answer at once: a loss may be noticed sooner than over the internet.
LIVENESS = dict(heartbeat_s=2.0, record_ttl_s=12.0, view_poll_s=1.0)
# Loopback costs nothing: replicas that average often learn as one, so two runs differ by their kills and little else.
OUTER = dict(inner_steps=2)
WARMUP_ROUNDS = 40  # with 20, gradients explode for some rounds at the top of the rate


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """One of the two trainings."""

    curve: Curve
    progress: Progress
    incidents: list[Incident]
    start_s: float
    train_s: float
    stop_s: float

    @property
    def final_loss(self) -> float:
        return self.curve[-1][1]


def make_spec(total_rounds: int) -> RunSpec:
    if total_rounds < 20:
        raise ConfigError(f"{total_rounds} rounds leave no room for the events: take at least 20")
    # a model of this size gains most from many steps, so rounds are small
    rounds = dict(
        total_rounds=total_rounds,
        rows=4,
        eval_every=max(total_rounds // 20, 1),
        eval_microbatches=16,
    )
    return preset(
        "nano",
        "demo",
        rounds=rounds,
        liveness=LIVENESS,
        optimizer=dict(warmup_rounds=WARMUP_ROUNDS),
        outer=OUTER,
    )


def make_events(total_rounds: int) -> tuple[SwarmEvent, ...]:
    """At a fifth, two fifths and three fifths of the way.

    The newcomer takes the place of the first that was killed. Left to choose, it may read text: a second originator
    doubles the tokens of a round, and then the two runs are no longer one training with and without kills.
    """
    return (
        SwarmEvent(verb=Verb.KILL, stage=2, replica=1, round=total_rounds // 5),
        SwarmEvent(verb=Verb.KILL, stage=INNER_STAGE, round=2 * total_rounds // 5),
        SwarmEvent(verb=Verb.JOIN, stage=2, round=3 * total_rounds // 5),
    )


def run_demo(out: Path, total_rounds: int = TOTAL_ROUNDS) -> bool:
    """Everything; False when a bar is missed. Results in `out`, which is emptied of an earlier demo's first."""
    from peer.data import bigram_loss, load_data  # torch

    began_s = time.monotonic()
    spec = make_spec(total_rounds)
    _make_room(out)
    print(f"run {spec.run_id}: {sum(LAYOUT.values())} peers, {spec.num_stages} stages, {total_rounds} rounds")
    data = load_data(spec, HostConfig().cache_dir)
    yardstick = bigram_loss(data.train, data.validation, data.vocab_size)
    print(f"bigram model of the same text: {yardstick:.3f} nats a token")
    kills = _train(spec, make_events(total_rounds), out / "with-kills", export_to=out / "model")
    undisturbed = _train(spec, (), out / "undisturbed")
    return _report(out, spec, yardstick, kills, undisturbed, time.monotonic() - began_s)


def _make_room(out: Path) -> None:
    for name in ("with-kills", "undisturbed", "model"):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)


def _train(
    spec: RunSpec, events: Sequence[SwarmEvent], folder: Path, export_to: Path | None = None
) -> RunOutcome:
    print(f"\n== {UNDISTURBED if not events else WITH_KILLS}: logs in {folder / 'logs'}", flush=True)
    began_s = time.monotonic()
    swarm = LocalSwarm(spec, LAYOUT, folder, {"checkpoint_every": 0, "resume": False})
    with swarm:
        started_s = time.monotonic()
        print(f"all peers serve after {started_s - began_s:.1f} s", flush=True)
        schedule = Schedule(swarm, events)
        progress = follow(swarm, schedule, ProgressTracker(spec.num_stages))
        trained_s = time.monotonic()
        curve = merge_validation(swarm.status())
        if export_to is not None:
            _export(swarm, folder / "checkpoints", export_to, progress, curve)
        leaving_s = time.monotonic()
    return RunOutcome(
        curve=curve,
        progress=progress,
        incidents=schedule.incidents,
        start_s=started_s - began_s,
        train_s=trained_s - started_s,
        stop_s=time.monotonic() - leaving_s,
    )


def _export(swarm: LocalSwarm, checkpoints: Path, target: Path, progress: Progress, curve: Curve) -> None:
    from peer.export import export_from_checkpoints

    facts = {"tokens": progress.tokens, "validation loss (nats a token)": curve[-1][1]}
    export_from_checkpoints(swarm.checkpoints(checkpoints), target, facts=facts)


def _report(
    out: Path, spec: RunSpec, yardstick: float, kills: RunOutcome, undisturbed: RunOutcome, wall_s: float
) -> bool:
    from peer.generate import generate

    curves = {WITH_KILLS: kills.curve, UNDISTURBED: undisturbed.curve}
    write_csv(out / "loss.csv", curves)
    marks = [(incident.round, incident.what) for incident in kills.incidents]
    draw(
        out / "loss.png",
        curves,
        title=f"{spec.run_id}, State of the Union",
        yardstick=yardstick,
        incidents=marks,
    )
    sample = generate(out / "model", PROMPT, max_new_tokens=SAMPLE_TOKENS, temperature=0.8, seed=1)
    ratio = kills.final_loss / undisturbed.final_loss
    start_s = max(kills.start_s, undisturbed.start_s)
    bars = [
        ("F2.bigram", kills.final_loss, "<", yardstick, kills.final_loss < yardstick),
        ("F2.ratio", ratio, "<=", RATIO_MAX, ratio <= RATIO_MAX),
        ("demo.start_s", start_s, "<=", START_MAX_S, start_s <= START_MAX_S),
    ]
    print("\n== what happened\n" + _table(kills.incidents))
    print(f"\n== sample\n{PROMPT}{sample}\n")
    for name, outcome in ((WITH_KILLS, kills), (UNDISTURBED, undisturbed)):
        print(
            f"{name}: validation loss {outcome.final_loss:.3f}, {short_number(outcome.progress.tokens)} tokens in "
            f"{outcome.train_s:.0f} s, {short_number(outcome.progress.tokens / outcome.train_s)} tokens/s"
        )
    print(f"bigram {yardstick:.3f}, ratio {ratio:.4f}, {wall_s:.0f} s in all")
    print(
        f"results: {out / 'loss.png'}, {out / 'loss.csv'}, {out / 'summary.json'}, model in {out / 'model'}\n"
    )
    for name, value, relation, limit, passed in bars:
        print(f"BAR {name} {value:.4g} {relation} {limit:.4g} {'pass' if passed else 'fail'}")
    summary = {
        "run_id": spec.run_id,
        "bigram_loss": yardstick,
        "ratio": ratio,
        "wall_s": wall_s,
        "runs": {WITH_KILLS: _facts(kills), UNDISTURBED: _facts(undisturbed)},
        "bars": {name: passed for name, *_, passed in bars},
        "sample": PROMPT + sample,
    }
    write_text(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    return all(passed for *_, passed in bars)


def _table(incidents: Sequence[Incident]) -> str:
    rows = [("round", "what happened", "what was done", "seconds")]
    rows += [
        (str(i.round), i.what, i.outcome, "-" if i.seconds is None else f"{i.seconds:.1f}") for i in incidents
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def _facts(outcome: RunOutcome) -> dict[str, object]:
    return {
        "validation_loss": outcome.final_loss,
        "tokens": outcome.progress.tokens,
        "start_s": outcome.start_s,
        "train_s": outcome.train_s,
        "stop_s": outcome.stop_s,
        "events": [
            {"round": i.round, "what": i.what, "outcome": i.outcome, "seconds": i.seconds}
            for i in outcome.incidents
        ],
    }
