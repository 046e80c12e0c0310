"""Scenario files: a story that a person can read, and a test that fails when the story changes.

    # What the story is about.
    swarm stages=4 first=2 replicas=2,1,2 slots=3 seed=7
    at 3.0 kill c1
    run until microbatches=6
    ----
    what happened, as the simulator tells it

`tell=peers` in the swarm line leaves the everyday life of the microbatches out.
Peers are named by the letter of their stage and their number in it: `a1` is the first of stage 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from peer.simulator.report import Tell
from peer.simulator.swarm import Simulation, tiny_spec
from protocols.errors import ConfigError

DIVIDER = "----"
_SECTIONS = {  # which part of the RunSpec a word of the `swarm` line belongs to
    **dict.fromkeys(
        ("slots", "microbatches", "window", "total_rounds", "staleness_max", "eval_every"), "rounds"
    ),
    **dict.fromkeys(("path_stages", "swaps_max", "missing_stages_max"), "paths"),
    "inner_steps": "outer",
}


def play(text: str) -> str:
    """The whole file again, with the story as it happens now."""
    script = text.partition(DIVIDER)[0].rstrip()
    lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    if len(lines) < 2 or not lines[0].startswith("swarm ") or not lines[-1].startswith("run until "):
        raise ConfigError("a scenario begins with 'swarm ...' and ends with 'run until ...'")
    simulation = _build(_words(lines[0]))
    for line in lines[1:-1]:
        _direct(simulation, line)
    until = _words(lines[-1])
    report = simulation.run(
        until_microbatches=int(until["microbatches"]) if "microbatches" in until else None,
        **({"until_s": float(until["seconds"])} if "seconds" in until else {}),
    )
    books = f"done {report.finished} skipped {report.skipped} lost {report.lost} leaked {report.leaked}"
    return "\n".join([script, DIVIDER, *report.story, f"{books} digest {report.digest}", ""])


def _words(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", line))


def _build(words: dict[str, str]) -> Simulation:
    num_stages = int(words.pop("stages"))
    tell = Tell(words.pop("tell", Tell.ALL.value))
    layout = {0: int(words.pop("first")), **_replicas(words.pop("replicas"))}
    seed = int(words.pop("seed"))
    changes: dict[str, dict[str, int]] = {}
    for name, value in words.items():
        changes.setdefault(_SECTIONS[name], {})[name] = int(value)
    if max(layout) != num_stages - 1:
        raise ConfigError(f"stages={num_stages}, but replicas are given for {len(layout) - 1} middle stages")
    return Simulation(tiny_spec(num_stages, **changes), layout, seed, tell=tell)


def _replicas(text: str) -> dict[int, int]:
    return {stage: int(count) for stage, count in enumerate(text.split(","), start=1)}


def _direct(simulation: Simulation, line: str) -> None:
    """`at SECONDS VERB ARGUMENTS`"""
    at, seconds, verb, *arguments = line.split()
    if at != "at" or verb not in _VERBS:
        raise ConfigError(f"not understood: {line!r}; verbs: {', '.join(_VERBS)}")
    _VERBS[verb](simulation, arguments, float(seconds))


def _kill(simulation: Simulation, arguments: list[str], at_s: float) -> None:
    stage = _words(arguments[0]).get("stage")
    simulation.kill(arguments[0] if stage is None else int(stage), at_s)


def _join(simulation: Simulation, arguments: list[str], at_s: float) -> None:
    simulation.join(int(_words(arguments[0])["stage"]) if arguments else None, at_s)


def _cut(simulation: Simulation, arguments: list[str], at_s: float) -> None:
    one, other, heal_at_s = arguments
    simulation.cut(one, other, at_s, float(heal_at_s))


_VERBS: dict[str, Callable[[Simulation, list[str], float], None]] = {
    "kill": _kill,
    "join": _join,
    "cut": _cut,
    "stop": lambda simulation, arguments, at_s: simulation.stop(arguments[0], at_s),
    "resume": lambda simulation, arguments, at_s: simulation.resume(arguments[0], at_s),
    "leave": lambda simulation, arguments, at_s: simulation.leave(arguments[0], at_s),
    "pause": lambda simulation, arguments, at_s: simulation.pause(arguments[0], at_s),
    "continue": lambda simulation, arguments, at_s: simulation.go_on(arguments[0], at_s),
    "slow": lambda simulation, arguments, at_s: simulation.slow(arguments[0], float(arguments[1]), at_s),
}
