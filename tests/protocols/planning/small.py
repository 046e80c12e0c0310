"""Small planning problems, drawn at random, and what a plan must keep to, checked apart from the planner."""

from __future__ import annotations

from collections import Counter
from itertools import permutations, product
from typing import Any

from hypothesis import strategies as st

from protocols.planning.instance import Instance, PathRules, Timing, make_instance
from protocols.planning.plan import Plan
from protocols.planning.round_model import Path
from protocols.stage_order import is_legal


@st.composite
def problems(draw: st.DrawFn, *, peers_max: int = 10, microbatches_max: int = 3) -> dict[str, Any]:
    """Arguments of `make_instance`, with a fixed arrangement and room enough for every legal share of the visits."""
    num_stages = draw(st.integers(2, 5))
    path_stages = draw(st.integers(2, num_stages))
    extra = draw(st.lists(st.integers(0, num_stages - 1), max_size=peers_max - num_stages))
    stages = [*range(num_stages), *extra]
    names = [f"p{number}" for number in draw(st.permutations(range(len(stages))))]
    seconds = st.integers(0, 50).map(lambda tenths: tenths / 10)
    links = st.lists(seconds, min_size=len(stages), max_size=len(stages))
    microbatches = draw(st.integers(1, microbatches_max))
    return {
        "peers": names,
        "forward_s": draw(
            st.lists(st.integers(1, 20).map(lambda it: it / 10), min_size=len(stages), max_size=len(stages))
        ),
        "link_s": draw(st.lists(links, min_size=len(stages), max_size=len(stages))),
        "rules": PathRules(num_stages=num_stages, path_stages=path_stages),
        "microbatches": microbatches,
        "slots": microbatches * stages.count(0),
        "stage_of": dict(zip(names, stages, strict=True)),
        "timing": Timing(gap_s=draw(st.sampled_from([0.0, 0.1])), gap_start_s=0.05),
    }


def instances(**limits: int) -> st.SearchStrategy[Instance]:
    return problems(**limits).map(lambda problem: make_instance(**problem))


def stages_of(instance: Instance, path: Path) -> tuple[int, ...]:
    assert instance.stage_of is not None
    return tuple(int(instance.stage_of[peer]) for peer in path)


def keeps(rules: PathRules, order: tuple[int, ...]) -> bool:
    """Whether the order is legal, by the checker that knows nothing of the planner."""
    return is_legal(
        order,
        rules.num_stages,
        rules.path_stages,
        swaps_max=rules.swaps_max,
        skip_width_max=rules.skip_width_max,
    )


def broken_rules(plan: Plan) -> list[str]:
    """What is wrong with a plan, in words."""
    instance, rules = plan.instance, plan.instance.rules
    illegal = [path for path in plan.paths if not keeps(rules, stages_of(instance, path))]
    found = [f"path {path} is not legal" for path in illegal]
    own = Counter(path[0] for path in plan.paths)
    if own != dict.fromkeys(instance.replicas(0).tolist(), instance.microbatches):
        found.append(f"originators have {own} microbatches")
    visits = Counter(stage for path in plan.paths for stage in stages_of(instance, path)[1:])
    counts = [visits[stage] for stage in rules.relayed_stages]
    if max(counts) > min(counts) + 1:
        found.append(f"visits are not equal: {counts}")
    loads = Counter(peer for path in plan.paths for peer in path[1:])
    over = sum(max(0, load - int(instance.room[peer])) for peer, load in loads.items())
    if over != plan.shortfall:
        found.append(f"{over} visits beyond the relays' room, and the plan says {plan.shortfall}")
    return found


def legal_paths(instance: Instance, originator: int) -> list[Path]:
    """All of them, by trying every sequence of stages and every replica."""
    rules = instance.rules
    found: list[Path] = []
    for order in permutations(range(1, rules.num_stages), rules.path_stages - 1):
        if keeps(rules, (0, *order)):
            choices = [instance.replicas(stage).tolist() for stage in order]
            found += [(originator, *relays) for relays in product(*choices)]
    return found
