"""What a benchmark reports: bars (a value against its limit) and facts; how both are printed and kept in RESULTS.md.

A value that could not be measured (NaN) fails its bar. RESULTS.md holds one section a benchmark between markers, so
that a full run replaces its own section and leaves the others.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from operator import eq, ge, le
from pathlib import Path

RESULTS_FILE = Path(__file__).with_name("RESULTS.md")
_HEADER = (
    "# Benchmark results\n\n"
    "The last full run of each benchmark. Ratios were measured in one run on one machine;"
    " a rate by itself says little about another machine.\n"
)
_OPERATORS: dict[str, Callable[[float, float], bool]] = {">=": ge, "<=": le, "==": eq}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One promise: `value op limit`."""

    id: str
    value: float
    op: str
    limit: float
    what: str

    @property
    def passed(self) -> bool:
        return not math.isnan(self.value) and _OPERATORS[self.op](self.value, self.limit)

    @property
    def verdict(self) -> str:
        return "pass" if self.passed else "fail"

    def line(self) -> str:
        return f"BAR {self.id} {number(self.value)} {self.op} {number(self.limit)} {self.verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything one benchmark found out. `skipped` says why nothing could be measured here; that is no failure."""

    bars: tuple[Bar, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    skipped: str = ""

    @property
    def passed(self) -> bool:
        return all(bar.passed for bar in self.bars)

    def lines(self) -> list[str]:
        """What a person sees: the facts, then the bars."""
        if self.skipped:
            return [f"skipped: {self.skipped}"]
        return [*(f"{name}: {value}" for name, value in self.facts), *(bar.line() for bar in self.bars)]


def number(value: float) -> str:
    """Whole numbers in full, others with four significant digits."""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"


def save_section(name: str, report: Report, file: Path = RESULTS_FILE) -> None:
    """Put `report` in place of the section `name`, or at the end."""
    text = file.read_text(encoding="utf-8") if file.exists() else _HEADER
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{_section(name, report)}\n{end}"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    text, replaced = pattern.subn(lambda _: section, text, count=1)
    if not replaced:
        text = f"{text.rstrip()}\n\n{section}\n"
    temporary = file.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def _section(name: str, report: Report) -> str:
    date = datetime.now(timezone.utc).date().isoformat()
    parts = [f"## {name}\n\n{date}, {machine()}"]
    if report.bars:
        rows = [
            f"| {bar.id} | {bar.what} | {number(bar.value)} | {bar.op} {number(bar.limit)} | {bar.verdict} |"
            for bar in report.bars
        ]
        parts.append("\n".join(["| bar | what | value | limit | |", "|---|---|---|---|---|", *rows]))
    if report.facts:
        rows = [f"| {name} | {value} |" for name, value in report.facts]
        parts.append("\n".join(["| measured | |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def machine() -> str:
    """CPU model, cores and versions, in one line."""
    return (
        f"{_cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()},"
        f" Python {platform.python_version()}, torch {version('torch')}"
    )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = (
        re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    )
    return found[1] if found else platform.processor() or "unknown CPU"
