"""From what a person typed to the layers that run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.export import PROVENANCE_NAME
from peer.partial import check_order, layers_of, parse_stages, read_run, without
from protocols.errors import ConfigError
from protocols.run_spec import preset

NANO = preset("nano")  # five stages: both ends, then four of one layer
MICRO = preset("micro")  # two layers in the first stage, one in each of four


def test_stages_are_typed_with_commas():
    assert parse_stages("0,1,3") == (0, 1, 3)
    assert parse_stages("0, 3, 2") == (0, 3, 2)


@pytest.mark.parametrize("text", ["", "0,", "0;1", "first", "1-3", "0,1.5"])
def test_what_is_no_list_of_numbers_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="such as 0,1,3"):
        parse_stages(text)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((1, 2), "stage 0 must come first"),
        ((1, 0), "stage 0 must come first"),
        ((0, 5), "stage 5: this model has the stages 0 to 4"),
        ((0, -1), "stage -1"),
        ((0, 2, 2), "stages 0,2,2: each can be named once"),
    ],
)
def test_order_that_cannot_run_is_refused(stages, message):
    """Each is a slip of the keyboard, and running something else instead would mislead."""
    with pytest.raises(ConfigError, match=message):
        check_order(NANO, stages)


def test_any_order_after_stage_0_can_run():
    """Training has rules for skips and swaps; whoever samples wants to see what happens."""
    for stages in ((0,), (0, 4, 1), (0, 3, 2, 1)):
        check_order(NANO, stages)


@pytest.mark.parametrize(
    ("dropped", "message"),
    [((0,), "stage 0 cannot be dropped"), ((9,), "stages 0 to 4"), ((1, 1), "each can be named once")],
)
def test_stages_that_cannot_be_dropped_are_refused(dropped, message):
    with pytest.raises(ConfigError, match=message):
        without(NANO, dropped)


@given(st.sets(st.integers(1, 4)))
def test_dropped_and_kept_stages_are_all_stages(dropped):
    """In the model's order, whatever order they were dropped in."""
    kept = without(NANO, sorted(dropped, reverse=True))
    assert kept == tuple(sorted(kept))
    assert set(kept) | dropped == set(range(5))
    assert not set(kept) & dropped


def test_layers_follow_the_order_of_the_stages():
    """micro's first stage has two layers of its own."""
    assert layers_of(NANO, (0, 3, 1)) == [2, 0]
    assert layers_of(MICRO, (0, 2, 4)) == [0, 1, 3, 5]


def test_run_of_an_export_is_read_back(tmp_path):
    """The export writes the whole spec."""
    (tmp_path / PROVENANCE_NAME).write_text(json.dumps({"spec": json.loads(MICRO.to_json())}))
    assert read_run(tmp_path, MICRO.model) == MICRO


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "export again"),
        ("{}", "export again"),
        ("no json", "export again"),
        ('{"spec": {"num_stages": "five"}}', "num_stages"),
        (json.dumps({"spec": json.loads(MICRO.to_json())}), "other sizes"),
    ],
)
def test_folder_that_does_not_say_how_the_model_is_cut_is_refused(tmp_path, content, message):
    """From another program, damaged, or about another model."""
    if content is not None:
        (tmp_path / PROVENANCE_NAME).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_run(tmp_path, NANO.model)
