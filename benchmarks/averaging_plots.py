"""The averaging study as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.averaging_team import Outcome

COLOURS = (
    "#222831",
    "#8a94a3",
    "#20808d",
    "#e08a2e",
    "#b5485d",
    "#d6204e",
    "#3b6fb6",
    "#7a5ba8",
    "#2f9e6e",
    "#c2a11f",
    "#5f6b2d",
    "#9a5b3c",
    "#4d4d9f",
    "#a8a8a8",
)


def draw(path: Path, outcomes: Mapping[str, Outcome], *, round_tokens: int, num_weights: int) -> None:
    """Mean loss of the replicas against tokens of the swarm, and against bytes that a replica has sent."""
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_tokens, by_bytes) = pyplot.subplots(
        1, 2, figsize=(13, 5.4), layout="constrained", sharey=True
    )
    for (name, outcome), colour in zip(outcomes.items(), COLOURS, strict=False):
        rounds = [round_number for round_number, _ in outcome.curve]
        losses = [loss for _, loss in outcome.curve]
        by_tokens.plot([number * round_tokens / 1e3 for number in rounds], losses, label=name, color=colour)
        sent_mb = [number * outcome.round_bytes * num_weights / 1e6 for number in rounds]
        by_bytes.plot(sent_mb, losses, color=colour)
    by_bytes.set_xscale("log")
    lowest = min(loss for outcome in outcomes.values() for _, loss in outcome.curve)
    for axes in (by_tokens, by_bytes):
        axes.grid(color="#dfe3e8", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(lowest - 0.1, lowest + 1.5)
    by_tokens.set(
        xlabel="tokens of all replicas, thousands", ylabel="validation loss of a replica, nats a token"
    )
    by_bytes.set(xlabel="MB that a replica has sent")
    by_tokens.legend(frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
