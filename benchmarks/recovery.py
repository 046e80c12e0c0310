"""A3, A4, A5, A8, A9, A13: what losing stages costs a model, by every remedy that we know.

A tiny LLaMa of 7 stages (embedding and head, then 6 of one layer) learns from the embedded text in this process.
Whole stages are lost, with Adam's state; the remedies are those of `benchmarks.recovery_rules`. Compared are runs with
the same first weights, the same text in the same order, the same losses at the same rounds.

What is not measured here: that anybody notices a loss, and in what time (A7: live processes).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch

from benchmarks import recovery_gaps, recovery_jumps, recovery_outages
from benchmarks.bars import Report
from benchmarks.recovery_base import failure_free
from benchmarks.recovery_findings import Findings
from benchmarks.recovery_gaps import Gaps, Reached
from benchmarks.recovery_jumps import Jumps, Pairs, Prepared
from benchmarks.recovery_plots import draw_courses, draw_outages
from benchmarks.recovery_sizes import QUICK, SIZES, Size

PICTURES = Path(__file__).parent
OTHER_PICTURES = Path("out") / "recovery"
COURSES_PNG, OUTAGES_PNG = "recovery_courses.png", "recovery_outages.png"


@dataclass(slots=True)
class Found:
    """Every list has a value a seed."""

    jumps: list[Jumps] = field(default_factory=list)
    pairs: list[Pairs] = field(default_factory=list)
    prepared: dict[float, list[Prepared]] = field(default_factory=lambda: defaultdict(list))
    gaps: dict[str, list[Gaps]] = field(default_factory=lambda: defaultdict(list))
    reached: dict[str, list[Reached]] = field(default_factory=lambda: defaultdict(list))


def run(*, quick: bool, size: str = "tiny") -> Report:
    """`quick`: one seed, few rounds, and no more than that everything runs."""
    chosen = QUICK if quick and size == "tiny" else SIZES[size]
    if chosen.device == "cuda" and not torch.cuda.is_available():
        return Report(skipped=f"size {size} needs a CUDA card; --size tiny runs on the CPU")
    torch.set_num_threads(1)
    folder = PICTURES if size == "tiny" and not quick else OTHER_PICTURES / size
    folder.mkdir(parents=True, exist_ok=True)
    return study(chosen, folder)


def study(size: Size, folder: Path) -> Report:
    """All of it; pictures go into `folder`."""
    found, facts = Found(), list[tuple[str, str]]()
    for seed in size.seeds:
        facts += of_seed(size, seed, found, folder)
    depths = {
        depth: recovery_outages.study(size, depth, further=True) for depth in recovery_outages.SEEDS_AT_DEPTH
    }
    names = found.jumps[0].jump
    draw_outages(
        folder / OUTAGES_PNG, depths, {name: fmean(one.jump[name] for one in found.jumps) for name in names}
    )
    parts: list[Findings] = [
        recovery_jumps.jump_findings(size, found.jumps),
        recovery_gaps.gap_findings(found.gaps),
        recovery_jumps.pair_findings(found.pairs),
        recovery_gaps.target_findings(found.reached),
        recovery_outages.findings(depths),
        recovery_jumps.prepared_findings(found.prepared),
    ]
    pictures = ", ".join(f"[{name}]({name})" for name in (COURSES_PNG, OUTAGES_PNG))
    return Report(
        bars=tuple(bar for part in parts for bar in part.bars),
        facts=(*(fact for part in parts for fact in part.facts), *facts, ("pictures", pictures)),
    )


def of_seed(size: Size, seed: int, found: Found, folder: Path) -> tuple[tuple[str, str], ...]:
    """Every study that branches off one failure-free run; the first seed's also tries all other remedies."""
    base = failure_free(size, seed)
    found.jumps.append(recovery_jumps.jumps(base))
    found.pairs.append(recovery_jumps.pairs(base))
    for share in recovery_jumps.SHARES if seed == size.seeds[0] else recovery_jumps.SHARES[:1]:
        found.prepared[share].append(recovery_jumps.prepared(base, share))
    for name, probability in recovery_gaps.CHURN_RATES.items():
        found.gaps[name].append(recovery_gaps.gaps(base, probability))
    for percent in recovery_gaps.TARGET_LIMITS:
        found.reached[percent].append(recovery_gaps.to_target(base, percent))
    tell(f"seed {seed}", found)
    if seed != size.seeds[0]:
        return ()
    others = recovery_gaps.others(base)
    ladder = found.reached[recovery_gaps.WORST][-1].course
    draw_courses(folder / COURSES_PNG, others, ladder, base.curve, base.target)
    return recovery_gaps.other_facts(base, others)


def tell(name: str, found: Found) -> None:
    """What the last seed gave: a full run is long, and a person wants to see it move."""
    print(f"{name}: {found.jumps[-1]}, {found.pairs[-1]}", flush=True)
    for share, prepared in found.prepared.items():
        print(f"{name}, {share} skip: {prepared}", flush=True)
    for rate, gaps in found.gaps.items():
        print(f"{name}, {rate}: {gaps[-1]}", flush=True)
    for percent, reached in found.reached.items():
        print(f"{name}, {percent} %: {reached[-1].rounds_ratio:.3f}, {reached[-1].rungs}", flush=True)
