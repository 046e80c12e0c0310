"""The recovery studies as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.recovery_churn import ITERATION_S, REDUNDANT_ITERATION_S, Course
from benchmarks.recovery_outages import Depth

COLOURS = ("#3b6fb6", "#e08a2e", "#2f9e6e", "#7a5ba8", "#c2a11f", "#8a94a3", "#20808d")
BARE, OURS = "#222831", "#d6204e"
EXCESS_TICKS = (-1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50)  # percent
Curve = Sequence[tuple[float, float]]


def _figure(width_in: float, height_in: float) -> tuple[Any, Any, Any]:
    """Two axes side by side."""
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(width_in, height_in), layout="constrained")
    for one in axes:
        one.grid(color="#dfe3e8", linewidth=0.6)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes, pyplot


def draw_courses(
    path: Path, courses: Mapping[str, Course], ladder: Course, bare: Mapping[int, float], target: float
) -> None:
    """Loss against rounds, and against modelled hours; `bare` is the run without a loss."""
    figure, (by_rounds, by_hours), pyplot = _figure(13, 5.4)
    until = max(course.rounds for course in (*courses.values(), ladder))
    points = [(rounds, loss) for rounds, loss in bare.items() if rounds <= until]
    styles: list[tuple[str, Curve, Curve, str, float]] = [
        ("no losses", points, _hours(points, ITERATION_S), BARE, 2.2),
        ("redundant computation", [], _hours(points, REDUNDANT_ITERATION_S), COLOURS[5], 1.4),
    ]
    colours = [colour for colour in COLOURS if colour != COLOURS[5]]
    for (name, course), colour in zip(courses.items(), colours, strict=False):
        styles.append((name, _by_rounds(course), _by_hours(course), colour, 1.2))
    styles.append(("our ladder", _by_rounds(ladder), _by_hours(ladder), OURS, 2.2))
    for name, rounds_curve, hours_curve, colour, width in styles:
        by_rounds.plot(*_columns(rounds_curve), label=name, color=colour, linewidth=width)
        by_hours.plot(*_columns(hours_curve), color=colour, linewidth=width)
    for axes, label in ((by_rounds, "rounds trained, repeated ones included"), (by_hours, "modelled hours")):
        axes.axhline(target, linestyle="--", color="gray", linewidth=0.8)
        axes.set(xlabel=label, ylabel="validation loss, nats a token")
        axes.set_ylim(min(points[-1][1], target) - 0.05, target + 0.7)
    by_rounds.set_xlim(left=next(rounds for rounds, loss in points if loss < target + 0.9))
    by_hours.set_xlim(left=by_rounds.get_xlim()[0] * ITERATION_S / 3600)
    by_rounds.text(by_rounds.get_xlim()[0], target, " target", va="bottom", fontsize=8.5, color="gray")
    by_rounds.set_title("every middle stage lost at 16 % an hour", loc="left", fontsize=11)
    by_hours.set_title("with the published seconds of a round and of a rebuild", loc="left", fontsize=11)
    by_rounds.legend(frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _columns(curve: Curve) -> tuple[list[float], list[float]]:
    return [x for x, _ in curve], [y for _, y in curve]


def _hours(points: Curve, round_s: float) -> Curve:
    return [(rounds * round_s / 3600, loss) for rounds, loss in points]


def _by_rounds(course: Course) -> Curve:
    return [(point.rounds, point.loss) for point in course.points]


def _by_hours(course: Course) -> Curve:
    return [(point.modelled_s / 3600, point.loss) for point in course.points]


def draw_outages(path: Path, depths: Mapping[int, Depth], jumps: Mapping[str, float]) -> None:
    """Left: how rising outages cost loss, by policy and depth. Right: the jump after one loss, by remedy."""
    figure, (axes, bars), pyplot = _figure(13, 5.0)
    for (depth, one), colour in zip(depths.items(), COLOURS, strict=False):
        base = one.none[0].loss
        multiples = [1, *one.further]
        runs = [
            one.published(),
            *((skip.loss / base, drop.loss / base) for skip, drop in one.further.values()),
        ]
        for index, (policy, line) in enumerate((("skip the stage", "-"), ("drop the replica", ":"))):
            excess = [100 * (pair[index] - 1) for pair in runs]
            axes.plot(multiples, excess, line, marker="o", color=colour, label=f"{depth} stages, {policy}")
    axes.axhline(0.5, linestyle="--", color="gray", linewidth=0.8)
    axes.text(
        multiples[-1],
        0.5,
        "bar at the published rate: 0.5 %",
        ha="right",
        va="bottom",
        fontsize=8.5,
        color="gray",
    )
    axes.set_xscale("log", base=4)
    axes.set_xticks(multiples, [f"{multiple} x" for multiple in multiples])
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_yticks(EXCESS_TICKS, [f"{tick:g}" for tick in EXCESS_TICKS])
    axes.set(
        xlabel="outages, in multiples of the published rate",
        ylabel="loss above the run without outages, %",
    )
    axes.set_title("one replica's inner stages away for 6 rounds", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8.5)
    names = sorted(jumps, key=lambda name: jumps[name], reverse=True)
    bars.barh(range(len(names)), [jumps[name] for name in names], color=[_bar_colour(name) for name in names])
    bars.set_yticks(range(len(names)), names)
    bars.axvline(0, color=BARE, linewidth=0.8)
    bars.set(xlabel="jump of the validation loss, nats a token")
    bars.set_title("one inner stage lost, right after the remedy", loc="left", fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bar_colour(name: str) -> str:
    return OURS if name in ("shadow", "mix + refit") else COLOURS[0]
