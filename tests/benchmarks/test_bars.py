"""Bars as they are printed and kept."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.bars import Bar, Report, machine, save_section


def a_bar(value: float, op: str = ">=", limit: float = 0.85) -> Bar:
    return Bar(id="F3-plain", value=value, op=op, limit=limit, what="swarm / plain")


@pytest.mark.parametrize(
    ("value", "op", "limit", "line"),
    [
        (0.91251, ">=", 0.85, "BAR F3-plain 0.9125 >= 0.85 pass"),
        (0.85, ">=", 0.85, "BAR F3-plain 0.85 >= 0.85 pass"),
        (0.8499999, ">=", 0.85, "BAR F3-plain 0.85 >= 0.85 fail"),
        (0, "==", 0, "BAR F3-plain 0 == 0 pass"),
        (3, "==", 0, "BAR F3-plain 3 == 0 fail"),
        (16.0, "<=", 15, "BAR F3-plain 16 <= 15 fail"),
        (23456.7, ">=", 20000, "BAR F3-plain 2.346e+04 >= 20000 pass"),
    ],
)
def test_line_names_value_limit_and_verdict(value: float, op: str, limit: float, line: str) -> None:
    """Scripts and people read the same line."""
    assert a_bar(value, op, limit).line() == line


def test_what_could_not_be_measured_has_failed() -> None:
    """A division by nothing must not slip through a comparison."""
    assert a_bar(math.nan).line() == "BAR F3-plain nan >= 0.85 fail"
    assert not Report(bars=(a_bar(1.0), a_bar(math.nan))).passed


def test_skipped_report_says_why_and_passes() -> None:
    """No CUDA card is no failure, but it is said."""
    report = Report(skipped="torch sees no CUDA card")
    assert report.passed
    assert report.lines() == ["skipped: torch sees no CUDA card"]


def test_full_run_replaces_its_own_section_only(tmp_path: Path) -> None:
    """Two benchmarks share RESULTS.md; one is measured again a month later."""
    results = tmp_path / "RESULTS.md"
    save_section("throughput", Report(bars=(a_bar(0.9),)), results)
    save_section("wire", Report(facts=(("CPU ms of one hop", r"3.1 \1 (a backslash is no group)"),)), results)
    save_section("throughput", Report(bars=(a_bar(0.95),)), results)
    text = results.read_text(encoding="utf-8")
    assert "| F3-plain | swarm / plain | 0.95 | >= 0.85 | pass |" in text
    assert "0.9 |" not in text
    assert r"| CPU ms of one hop | 3.1 \1 (a backslash is no group) |" in text
    assert text.index("## throughput") < text.index("## wire")
    assert text.count("<!-- begin ") == text.count("<!-- end ") == 2


def test_results_name_the_machine() -> None:
    """A rate without its machine means nothing."""
    assert "cores" in machine()
    assert "torch 2." in machine()
