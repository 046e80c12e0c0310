"""Instances met in real swarms, with the best plan that anybody has found for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocols.planning import Instance, PathRules, Timing, make_instance
from protocols.planning.paths import find_paths
from protocols.planning.round_model import RoundModel

CASES = Path(__file__).with_name("cases")


def case(name: str) -> tuple[Instance, list[tuple[int, ...]]]:
    data: dict[str, Any] = json.loads((CASES / f"{name}.json").read_text("utf-8"))
    names = data["peers"]
    instance = make_instance(
        names,
        [data["forward_s"]] * len(names),
        data["link_s"],
        rules=PathRules(
            num_stages=data["num_stages"], path_stages=data["path_stages"], swaps_max=data["swaps_max"]
        ),
        microbatches=data["microbatches"],
        slots=data["slots"],
        originator_slots=data["originator_slots"],
        stage_of=dict(zip(names, data["stage_of"], strict=True)),
        timing=Timing(
            backward_factor=data["backward_factor"], loss_factor=data["loss_factor"], backward_first=True
        ),
    )
    return instance, [tuple(path) for path in data["known_plan"]]


def test_twelve_cities_with_coordinates_that_are_nine_percent_off():
    """Two originators with three microbatches each; exchanging one row at a time ended at 2.02 s."""
    instance, known = case("twelve_cities")
    best_s = max(RoundModel(instance).simulate(known).finish_s)
    assert find_paths(instance).makespan_s <= best_s
    assert find_paths(instance, brief=True).makespan_s <= best_s
