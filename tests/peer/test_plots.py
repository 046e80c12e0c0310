"""The loss curve of a run as numbers and as an image that opens."""

from __future__ import annotations

from pathlib import Path

from peer.plots import draw, write_csv

CURVES = {"with kills": [(0, 6.9), (10, 5.0)], "undisturbed": [(0, 6.9), (20, 4.0)]}


def test_curves_that_were_read_at_different_rounds_share_one_table(tmp_path: Path):
    write_csv(tmp_path / "loss.csv", CURVES)
    assert (tmp_path / "loss.csv").read_text().splitlines() == [
        "round,with kills,undisturbed",
        "0,6.900000,6.900000",
        "10,5.000000,",
        "20,,4.000000",
    ]


def test_the_image_is_written_with_its_yardstick_and_incidents(tmp_path: Path):
    path = tmp_path / "loss.png"
    draw(path, CURVES, title="a run", yardstick=3.85, incidents=[(10, "p1 killed")])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
