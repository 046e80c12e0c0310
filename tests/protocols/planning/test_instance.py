"""A planning problem is checked before anything is searched; the message names the entry and the remedy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from protocols.errors import ConfigError
from protocols.planning.instance import COST_MAX_S, PathRules, make_instance

RULES = PathRules(num_stages=3, path_stages=2)
PROBLEM: dict[str, Any] = {
    "peers": ["c", "a", "b"],
    "forward_s": [3.0, 1.0, 2.0],
    "link_s": [[9.0, 0.1, 0.2], [0.3, 9.0, 0.4], [0.5, 0.6, 9.0]],
    "rules": RULES,
    "microbatches": 4,
    "slots": 3,
    "stage_of": {"a": 0, "b": 1, "c": 2},
}


def test_peers_are_sorted_by_id_with_all_that_is_theirs():
    instance = make_instance(**PROBLEM)
    assert instance.peers == ("a", "b", "c")
    assert instance.forward_s.tolist() == [1.0, 2.0, 3.0]
    assert instance.link_s.tolist() == [[0.0, 0.4, 0.3], [0.6, 0.0, 0.5], [0.1, 0.2, 0.0]]
    assert instance.replicas(2).tolist() == [2]


def test_a_relay_may_serve_an_originators_microbatches_in_waves():
    """As the published caps have it: 3 slots and 6 microbatches make two waves."""
    assert make_instance(**PROBLEM).waves == 2
    assert make_instance(**PROBLEM | {"microbatches": 6}).room.tolist() == [6, 6, 6]
    assert make_instance(**PROBLEM | {"microbatches": 3}).waves == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"link_s": [[0.0, 1.0], [1.0, 0.0]]}, "link costs are 2 x 2, but 3 peers need 3 x 3"),
        ({"link_s": [[0.0, 1.0, 2.0]] * 2}, "link costs are 2 x 3, but 3 peers need 3 x 3"),
        ({"link_s": [[0.0, 1.0, 2.0], [1.0, 2.0], [0.0]]}, "link costs are no 3 x 3 numbers"),
        ({"link_s": [[0.0, 1.0, "far"]] * 3}, "link costs are no 3 x 3 numbers"),
        ({"link_s": 1.0}, "a single number"),
        ({"link_s": [[0.0, -0.5, 1.0]] * 3}, r"link of peer c to a is -0.5 s \(3 such entries\)"),
        ({"link_s": [[0.0, 1.0, math.inf]] * 3}, "link of peer c to b is inf s"),
        ({"forward_s": [1.0, math.nan, 1.0]}, "forward time of peer a is nan s"),
        ({"forward_s": [1.0, 1.0, COST_MAX_S * 2]}, "forward time of peer b is 172800.0 s"),
        ({"forward_s": [1.0, 1.0]}, "forward time costs are 2, but 3 peers need 3"),
        ({"peers": ["a", "a", "b"]}, "named twice"),
        ({"peers": ["a"]}, "1 peers: a plan needs 2 at least"),
        ({"stage_of": {"a": 0, "b": 1, "c": 1}}, "stage 2 has no peer"),
        ({"stage_of": {"a": 1, "b": 1, "c": 2}}, "stage 0 has no peer"),
        ({"stage_of": {"a": 0, "b": 1}}, "leaves out 1 peers, c first"),
        ({"stage_of": {"a": 0, "b": 1, "c": 3}}, "peer c is placed on stage 3"),
        ({"stage_of": {"a": 0, "b": 1, "c": 2, "d": 2}}, "names peer d"),
        ({"stage_of": None, "stage_sizes": [1, 1, 2]}, "4 peers together, but there are 3"),
        ({"stage_of": None, "stage_sizes": [1, 2, 0]}, "stage 2 has no peer"),
        ({"stage_of": None, "stage_sizes": [1, 2]}, "2 stage sizes for 3 stages"),
        ({"stage_of": None}, "0 stage sizes for 3 stages"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"slots": 0}, "slots is 0"),
        ({"slots": [3, 3, -1]}, "slots is -1"),
        ({"originator_slots": -2}, "originator slots is -2"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make_instance(**PROBLEM | change)


@pytest.mark.parametrize("path_stages", [0, 1, 4])
def test_a_path_that_cannot_fit_the_model_is_refused(path_stages: int):
    with pytest.raises(ConfigError, match=f"a path of {path_stages} stages does not fit"):
        PathRules(num_stages=3, path_stages=path_stages)


def test_costs_are_copied():
    """A caller that goes on measuring must not change a plan under way."""
    links = np.full((3, 3), 0.5)
    instance = make_instance(**PROBLEM | {"link_s": links})
    links[:] = 7.0
    assert instance.link_s.max() == 0.5
