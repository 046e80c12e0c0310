"""Planning problems in files: what is read, what is refused, and what is known of the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peer.plan_file import MatrixFile, published_matrix, published_plan, read_arrangement, read_matrix
from protocols.errors import ConfigError

SMALL: dict[str, Any] = {
    "link_cost_s": [[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]],
    "compute_forward_s": [1.0, 2.0, 3.0],
    "stage_sizes": [1, 2],
    "path_length": 2,
    "memory_per_node": 3,
    "microbatches_per_origin": 6,
    "backward_factor": 1.5,
    "loss_factor": 0.25,
    "a field of somebody else": "ignored",
}


def written(folder: Path, content: Any) -> Path:
    path = folder / "costs.json"
    path.write_text(json.dumps(content))
    return path


def test_the_arrangement_of_the_file_wins_over_its_stage_sizes(tmp_path: Path):
    instance = read_matrix(written(tmp_path, SMALL)).instance(((2, 0), (1,)), slots=4, originator_slots=5)
    assert instance.peers == ("0", "1", "2")
    assert instance.stage_of is not None
    assert instance.stage_of.tolist() == [0, 1, 0]
    assert instance.link_s[1, 2] == 3.0
    assert (instance.slots.tolist(), instance.origin_slots.tolist()) == ([4] * 3, [5] * 3)
    free = read_matrix(written(tmp_path, SMALL)).instance()
    assert (free.stage_of, free.stage_sizes) == (None, (1, 2))


def test_names_sort_like_numbers():
    """A plan breaks ties by id: 10 must not come before 9."""
    matrix = MatrixFile.model_validate(SMALL | {"compute_forward_s": [1.0] * 12})
    assert list(matrix.names()) == sorted(matrix.names())
    assert [int(name) for name in matrix.names()] == list(range(12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"link_cost_s": SMALL["link_cost_s"][:2]}, "link costs are 2 x 3, but 3 peers need 3 x 3"),
        ({"link_cost_s": [[0.0] * 3, [0.0] * 2, [0.0] * 3]}, "not square: row 1 has 2 entries for 3 peers"),
        ({"link_cost_s": [[0.0, -1.0, 0.0]] * 3}, "link of peer 0 to 1 is -1.0 s"),
        ({"compute_forward_s": [1.0, float("nan"), 1.0]}, "forward time of peer 1 is nan s"),
        ({"stage_sizes": [3, 0]}, "stage 1 has no peer"),
        ({"path_length": 3}, "a path of 3 stages does not fit a model of 2"),
        ({"memory_per_node": 0}, "slots is 0"),
        (
            {"stage_visits_max_per_wave": 2},
            r"visited 6 times a round, but stage_visits_max_per_wave allows 2 x 2 waves = 4: 2 too few",
        ),
        ({"backward_factor": -1.0}, "backward_factor"),
        ({"loss_factor": float("inf")}, "loss_factor"),
        ({"link_cost_s": "far"}, "link_cost_s"),
    ],
)
def test_bad_costs_are_named(tmp_path: Path, change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read_matrix(written(tmp_path, SMALL | change)).instance()


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "\x00", "[1, 2]", "null"])
def test_what_is_no_instance_is_refused_without_a_traceback(tmp_path: Path, content: str):
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"costs\.json is no"):
        read_matrix(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_matrix(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("arrangement", "message"),
    [
        ([[0, 0], [1, 2]], "names peer 0 twice"),
        ([[0, 3], [1, 2]], "names peer 3, but peers are numbered 0 to 2"),
        ([[0], [1]], "leaves out 1 peers, 2 first"),
        ([[0, 1, 2], []], "stage 1 has no peer"),
        ([[0], ["b"]], "no arrangement"),
        ({"0": [1]}, "no arrangement"),
    ],
)
def test_bad_arrangements_are_named(tmp_path: Path, arrangement: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        MatrixFile.model_validate(SMALL).instance(read_arrangement(written(tmp_path, arrangement)))


def test_a_published_instance_is_known_as_long_as_no_number_of_it_is_changed():
    matrix = published_matrix("5-clusters")
    known = published_plan(matrix)
    assert known is not None
    assert known.expected_s == pytest.approx(70.667, abs=1e-3)
    assert len(known.paths) == 30
    assert published_plan(matrix.model_copy(update={"memory_per_node": 4})) is None
    assert published_plan(matrix.model_copy(update={"setting": "my-own"})) is None
