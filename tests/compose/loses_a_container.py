"""A stack that `docker compose up --build --wait` has brought up: kill one trainer, training must go on.

Run beside the compose file, with DOCKER_HOST where it is not the default: `python tests/compose/loses_a_container.py`.
Exit code 0: rounds went on after the kill; 1: they did not, and what each container says is printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

ROUNDS_BEFORE = 5
ROUNDS_AFTER = 10  # more than what was under way at the kill
LIMIT_S = 300.0
LOOK_EVERY_S = 3.0
PROJECT = "label=com.docker.compose.project=gossamer"


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def containers(service: str) -> list[str]:
    return docker(
        "ps", "-q", "--filter", PROJECT, "--filter", f"label=com.docker.compose.service={service}"
    ).split()


def status(container: str) -> dict[str, Any]:
    """Of the one peer in it; empty while it does not answer."""
    try:
        peers = json.loads(docker("exec", container, "gossamer", "status", "--json"))
    except ValueError:
        return {}
    return peers[0] if peers else {}


def wait_for_round(container: str, round_: int) -> dict[str, Any]:
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        now = status(container)
        if now.get("round", -1) >= round_:
            return now
        time.sleep(LOOK_EVERY_S)
    raise SystemExit(
        f"round {round_} did not come within {LIMIT_S:.0f} s: {status(container)}\n{_everyone()}"
    )


def _everyone() -> str:
    """The last words of each container."""
    found = [*containers("bootstrap"), *containers("first"), *containers("peer")]
    return "\n".join(f"== {name}\n{docker('logs', '--tail', '12', name)}" for name in found)


def main() -> None:
    (first,) = containers("first")
    before = wait_for_round(first, ROUNDS_BEFORE)
    stages = {peer: status(peer).get("stage") for peer in containers("peer")}
    print(f"round {before['round']}, loss {before['loss']}; stages {sorted(map(str, stages.values()))}")
    victim = min(stages, key=lambda peer: (list(stages.values()).count(stages[peer]), peer))
    docker("kill", victim)
    print(
        f"killed {victim}, stage {stages[victim]}, {list(stages.values()).count(stages[victim])} of that stage served"
    )
    at_kill = status(first)["round"]
    began_s = time.monotonic()
    after = wait_for_round(first, at_kill + ROUNDS_AFTER)
    print(f"round {at_kill} -> {after['round']} in {time.monotonic() - began_s:.0f} s, loss {after['loss']}")
    if victim in containers("peer"):
        sys.exit(f"{victim} is still there")


if __name__ == "__main__":
    main()
