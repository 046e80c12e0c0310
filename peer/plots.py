"""Loss curves as numbers and as an image."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = Sequence[tuple[int, float]]  # (round, nats/token)


def write_csv(path: Path, curves: Mapping[str, Curve]) -> None:
    """One row a round; a curve without a point there has an empty cell."""
    columns = {name: dict(curve) for name, curve in curves.items()}
    rounds = sorted({round_ for column in columns.values() for round_ in column})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["round", *columns])
        for round_ in rounds:
            writer.writerow([round_, *(f"{c[round_]:.6f}" if round_ in c else "" for c in columns.values())])


def draw(
    path: Path,
    curves: Mapping[str, Curve],
    *,
    title: str,
    yardstick: float,
    incidents: Sequence[tuple[int, str]],
) -> None:
    """Validation curves, a dashed line at the yardstick, a mark at each incident."""
    import matplotlib  # slow to import, and only the end of a run needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    for name, curve in curves.items():
        axes.plot([round_ for round_, _ in curve], [loss for _, loss in curve], label=name)
    axes.axhline(yardstick, linestyle="--", color="gray", label=f"bigram model, {yardstick:.2f}")
    top = axes.get_ylim()[1]
    for round_, text in incidents:
        axes.axvline(round_, linestyle=":", color="firebrick", linewidth=1)
        axes.text(round_, top, f" {text}", rotation=90, va="top", ha="left", fontsize=7, color="firebrick")
    axes.set(title=title, xlabel="round", ylabel="validation loss, nats a token")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
