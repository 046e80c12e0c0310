"""`python -m benchmarks`."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as program
from benchmarks.bars import Bar, Report


def a_report(value: float) -> Report:
    return Report(bars=(Bar(id="X", value=value, op=">=", limit=1.0, what="x"),))


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sections that were written."""
    names: list[str] = []
    monkeypatch.setattr(program, "save_section", lambda name, report: names.append(name))
    return names


def stand_ins(monkeypatch: pytest.MonkeyPatch, reports: dict[str, Report]) -> None:
    modules = {f"benchmarks.{name}": SimpleNamespace(run=lambda quick, r=r: r) for name, r in reports.items()}
    monkeypatch.setattr(program, "import_module", modules.__getitem__)


@pytest.mark.parametrize("name", program.NAMES)
def test_every_name_is_a_module_that_runs(name: str) -> None:
    """A renamed benchmark must not be noticed a month later."""
    assert callable(import_module(f"benchmarks.{name}").run)


def test_all_goes_on_after_a_failed_bar_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, saved: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first bar fails; the night's run must still measure the others, and keep what it saw."""
    reports = {name: a_report(2.0) for name in program.NAMES}
    reports["throughput"] = a_report(0.5)
    reports["gpu"] = Report(skipped="no card")
    stand_ins(monkeypatch, reports)
    assert program.main(["all"]) == 1
    assert saved == [name for name in program.NAMES if name != "gpu"]
    printed = capsys.readouterr().out
    assert "BAR X 0.5 >= 1 fail" in printed
    assert "skipped: no card" in printed


def test_quick_run_leaves_the_kept_table(monkeypatch: pytest.MonkeyPatch, saved: list[str]) -> None:
    """A small sample must not replace a night's."""
    stand_ins(monkeypatch, {"wire": a_report(2.0)})
    assert program.main(["wire", "--quick"]) == 0
    assert saved == []


def test_unknown_name_is_refused_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error: exit code 2, and what there is."""
    with pytest.raises(SystemExit) as refusal:
        program.main(["thruput"])
    assert refusal.value.code == 2
    assert "throughput" in capsys.readouterr().err
