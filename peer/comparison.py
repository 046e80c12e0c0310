"""A plan beside what it has to beat: the full pipeline without skips, and the published plan where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from peer.plan_file import MatrixFile, PublishedPlan
from protocols.planning import Instance, Plan
from protocols.planning.round_model import Path, Round, RoundModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to run the round, as the round model sees it."""

    name: str
    round: Round


def pipeline_paths(instance: Instance, order: Sequence[Sequence[int]] | None = None) -> tuple[Path, ...]:
    """All stages in order, the first replica of each to the first of the next, and so on: as many chains as that gives.

    The round's microbatches are dealt over the chains. `order`: the replicas of each stage in another order than by id.
    """
    stages = [stage for stage in range(instance.rules.num_stages) if stage not in instance.rules.missing]
    replicas = [order[stage] if order else instance.replicas(stage).tolist() for stage in stages]
    chains = list(zip(*replicas, strict=False))
    return tuple(chains[index % len(chains)] for index in range(instance.total_microbatches))


def full_pipeline(instance: Instance, order: Sequence[Sequence[int]] | None = None) -> Contender:
    rules = instance.rules
    whole = replace(instance, rules=replace(rules, path_stages=1 + len(rules.relayed_stages)))
    return Contender(
        name="full pipeline",
        round=RoundModel(whole).simulate(pipeline_paths(instance, order)),
    )


def published(matrix: MatrixFile, known: PublishedPlan) -> Contender:
    """With its own arrangement and slots, sent as its own runtime sends."""
    model = RoundModel(matrix.instance(known.arrangement))
    found = model.simulate(known.paths, release_s=known.release_s, after=known.after)
    return Contender(name="published coarse plan", round=found)


def ours(plan: Plan) -> Contender:
    return Contender(name="this plan", round=plan.simulate())


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Microbatches of one originator that go the same way, `path` with its originator; `done_s`: the last is back."""

    path: Path
    microbatches: int
    done_s: float


def in_seconds(length_s: float) -> str:
    """Rounds on one machine take milliseconds, rounds over oceans minutes."""
    return f"{length_s:.{2 if length_s >= 10 else 3}f} s"


def routes(plan: Plan) -> list[Route]:
    """By originator, the path with most microbatches first."""
    finished = sorted(zip(plan.paths, plan.finish_s, strict=True))
    found = []
    for path, group in groupby(finished, key=lambda pair: pair[0]):
        finish_s = [done_s for _, done_s in group]
        found.append(Route(path=path, microbatches=len(finish_s), done_s=max(finish_s)))
    return sorted(found, key=lambda route: (route.path[0], -route.microbatches, route.path))
