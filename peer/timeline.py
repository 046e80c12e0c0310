"""A planned round as a picture: what every peer does when, and how long other plans would take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.comparison import Contender, in_seconds
from protocols.errors import ConfigError
from protocols.planning.round_model import Job, Work
from protocols.swarm import PeerId

if TYPE_CHECKING:
    from protocols.planning import Plan

FORMATS = (".png", ".svg")
COLOURS = {Work.FORWARD: "#3b6fb6", Work.LOSS: "#2f9e6e", Work.BACKWARD: "#e08a2e"}
NAMES = {Work.FORWARD: "forward", Work.LOSS: "loss", Work.BACKWARD: "backward"}
BAND, GRID, INK, MUTED = "#f3f5f8", "#dfe3e8", "#222831", "#8a94a3"
WIDTH_IN, ROW_IN, ROWS_IN_MAX = 15.0, 0.27, 40.0
DPI = 130
SHORTEST_S = 1e-6  # an axis of no length cannot be drawn
BAR_SHARE = 0.78  # of a row's height
LABEL_SIZE = 6.5  # points, of the number in a bar
DIGIT_SHARE = 0.62  # of its size, how wide a digit is
PLOT_SHARE = 0.86  # of the picture's width, about; the rest is names
RIM_PT = 0.7  # white, between bars that touch


def check_format(path: Path) -> None:
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{path} names no format for a picture: end it with {' or '.join(FORMATS)}")


def draw(
    path: Path, plan: Plan, contenders: Sequence[Contender], labels: Mapping[PeerId, str], *, title: str
) -> None:
    """The last contender is `plan` itself: its timeline above, all makespans below."""
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    order = sorted(plan.stage_of, key=lambda peer: (plan.stage_of[peer], peer))
    rows_in = min(ROW_IN * len(order), ROWS_IN_MAX)
    bars_in = 0.34 * (len(contenders) + 1) + 0.5
    figure, (rounds, lengths) = pyplot.subplots(
        2,
        1,
        figsize=(WIDTH_IN, rows_in + bars_in + 1.1),
        layout="constrained",
        height_ratios=[rows_in, bars_in],
    )
    _draw_round(rounds, plan, order, contenders[-1], labels, rows_in * 72 / len(order))
    rounds.set_title(title, loc="left", fontsize=12, color=INK, pad=10)
    _draw_lengths(lengths, contenders, plan.lower_bound_s)
    metadata: Any = {"Date": None} if path.suffix.lower() == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "gossamer"}):  # the same plan, the same bytes
        figure.savefig(path, dpi=DPI, metadata=metadata)
    pyplot.close(figure)


def _draw_round(
    axes: Any,
    plan: Plan,
    order: Sequence[PeerId],
    contender: Contender,
    labels: Mapping[PeerId, str],
    row_pt: float,
) -> None:
    from matplotlib.collections import PolyCollection

    row_of = {peer: row for row, peer in enumerate(order)}
    bars = [(job, row_of[plan.instance.peers[job.peer]]) for job in contender.round.jobs]
    makespan_s = max(contender.round.makespan_s, SHORTEST_S)
    pt_per_s = WIDTH_IN * PLOT_SHARE * 72 / makespan_s
    for work in Work:
        mine = [(job, row) for job, row in bars if job.work is work]
        rims_pt = [RIM_PT if (job.end_s - job.start_s) * pt_per_s > 8 * RIM_PT else 0.0 for job, _ in mine]
        boxes = PolyCollection(
            [_box(job, row) for job, row in mine],
            facecolors=COLOURS[work],
            edgecolors="white",
            linewidths=rims_pt,
            label=NAMES[work],
        )
        axes.add_collection(boxes)
    if row_pt * BAR_SHARE > LABEL_SIZE:
        _number(axes, bars, pt_per_s)
    _mark_stages(axes, plan, order)
    size = min(8.0, row_pt * 0.55)
    if size >= 3:
        axes.set_yticks(range(len(order)), [labels[peer] for peer in order], fontsize=size, color=INK)
    else:
        axes.set_yticks([])
    axes.set(xlim=(0, makespan_s * 1.004), ylim=(len(order) - 0.4, -0.6), xlabel="seconds of the round")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=9)
    _tidy(axes)


def _box(job: Job, row: int) -> list[tuple[float, float]]:
    top, bottom = row - BAR_SHARE / 2, row + BAR_SHARE / 2
    return [(job.start_s, top), (job.end_s, top), (job.end_s, bottom), (job.start_s, bottom)]


def _number(axes: Any, bars: Sequence[tuple[Job, int]], pt_per_s: float) -> None:
    """The microbatch's number, from 1, in the bars that have room for it."""
    for job, row in bars:
        text = str(job.microbatch + 1)
        if (job.end_s - job.start_s) * pt_per_s > (len(text) + 0.6) * DIGIT_SHARE * LABEL_SIZE:
            middle_s = (job.start_s + job.end_s) / 2
            axes.text(
                middle_s, row, text, ha="center", va="center_baseline", fontsize=LABEL_SIZE, color="white"
            )


def _mark_stages(axes: Any, plan: Plan, order: Sequence[PeerId]) -> None:
    """A band behind every other stage, its number at the right."""
    for stage in sorted(set(plan.stage_of.values())):
        rows = [row for row, peer in enumerate(order) if plan.stage_of[peer] == stage]
        if stage % 2 == 0:
            axes.axhspan(rows[0] - 0.5, rows[-1] + 0.5, color=BAND, zorder=0, linewidth=0)
        axes.annotate(
            f"stage {stage}",
            (1.004, (rows[0] + rows[-1]) / 2),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8.5,
            color=MUTED,
        )


def _draw_lengths(axes: Any, contenders: Sequence[Contender], lower_bound_s: float) -> None:
    for row, contender in enumerate(contenders):
        is_ours = row == len(contenders) - 1
        length_s = contender.round.makespan_s
        axes.barh(row, length_s, height=0.62, color=COLOURS[Work.FORWARD] if is_ours else "#b9c3d0")
        idle = f"{in_seconds(length_s)}, peers idle {contender.round.idle_share():.0%}"
        axes.annotate(
            idle,
            (length_s, row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    axes.axvline(lower_bound_s, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    axes.annotate(
        f"no plan of this arrangement is shorter than {in_seconds(lower_bound_s)}",
        (lower_bound_s, -0.5),
        xytext=(5, 3),
        textcoords="offset points",
        fontsize=8.5,
        color=INK,
    )
    axes.set_yticks(range(len(contenders)), [one.name for one in contenders], fontsize=9, color=INK)
    longest_s = max(SHORTEST_S, *(one.round.makespan_s for one in contenders))
    axes.set(xlim=(0, longest_s * 1.15), ylim=(len(contenders) - 0.4, -1.0), xlabel="makespan, seconds")
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.tick_params(length=0, labelcolor=INK)
    axes.xaxis.label.set_color(MUTED)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
