"""Golden conversations: each file tells what happens to a small swarm, and a changed story has to be explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.simulator.scenario import DIVIDER, play
from protocols.errors import ConfigError

SCENARIOS = sorted(Path(__file__).parent.glob("*.txt"))
LINES_MAX = 120  # longer than that is not read


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_story_is_the_one_that_was_written_down(path: Path, request: pytest.FixtureRequest):
    """The same seed plays the same conversation to the last event: see the digest in the last line."""
    told = path.read_text("utf-8")
    played = play(told)
    if request.config.getoption("--rewrite-scenarios"):
        path.write_text(played, "utf-8")
        return
    assert played == told, (
        f"{path.name} has changed; if that is meant: pytest --rewrite-scenarios tests/scenarios"
    )


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_story_is_short_and_ends_well(path: Path):
    """Nothing is lost, nothing leaks, and a person can read it in a minute."""
    lines = path.read_text("utf-8").splitlines()
    assert len(lines) < LINES_MAX
    assert lines[0].startswith("# ")
    assert DIVIDER in lines
    assert " lost 0 leaked 0 " in lines[-1]


@pytest.mark.parametrize(
    "text",
    [
        "at 3.0 kill c1\nrun until microbatches=6\n----\n",
        "swarm stages=3 first=1 replicas=1,1 seed=1\nat 3.0 explode c1\nrun until microbatches=6\n----\n",
        "swarm stages=4 first=1 replicas=1,1 seed=1\nrun until microbatches=6\n----\n",
    ],
    ids=["no swarm", "unknown verb", "a stage without replicas"],
)
def test_a_script_that_makes_no_sense_is_refused(text: str):
    with pytest.raises(ConfigError):
        play(text)
