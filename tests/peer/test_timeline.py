"""A planned round as a picture that opens."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from peer.comparison import full_pipeline, ours
from peer.plan_file import published_matrix, published_plan
from peer.timeline import check_format, draw
from protocols.errors import ConfigError
from protocols.planning import Plan, plan


def a_plan() -> Plan:
    matrix = published_matrix("5-clusters")
    known = published_plan(matrix)
    assert known is not None
    return plan(matrix.instance(known.arrangement))


def drawn(path: Path, found: Plan) -> None:
    labels = {peer: f"peer {peer}" for peer in found.stage_of}
    draw(path, found, [full_pipeline(found.instance), ours(found)], labels, title="five towns")


def test_a_png_has_a_row_for_each_peer(tmp_path: Path):
    path = tmp_path / "round.png"
    drawn(path, a_plan())
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width > 1500
    assert height > 20 * 30  # pixels of a readable row


def test_an_svg_is_the_same_each_time_and_names_stages_and_peers(tmp_path: Path):
    found = a_plan()
    for name in ("one.svg", "two.svg"):
        drawn(tmp_path / name, found)
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    for words in ("peer 07", "stage 5", "five towns", "forward", "backward", "full pipeline"):
        assert f"<!-- {words} -->" in text


def test_a_round_that_takes_no_time_can_be_drawn(tmp_path: Path):
    """Costs of zero are legal, if not likely."""
    instance = a_plan().instance
    instance = replace(instance, forward_s=instance.forward_s * 0, link_s=instance.link_s * 0)
    instance = replace(instance, timing=replace(instance.timing, gap_s=0.0, gap_start_s=0.0))
    drawn(tmp_path / "nothing.png", plan(instance))


@pytest.mark.parametrize("name", ["round.gif", "round", ".png"])
def test_other_formats_are_refused(name: str):
    with pytest.raises(ConfigError, match=r"end it with \.png or \.svg"):
        check_format(Path(name))
