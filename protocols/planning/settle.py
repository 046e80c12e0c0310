"""The second half of planning: microbatches that share relays are polished together, one by one.

Only those that somebody touched, and whatever shares a peer with them; the others neither wait for them nor make them
wait, so their times stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocols.planning.draws import Draws
from protocols.planning.instance import Instance
from protocols.planning.mend import Mend
from protocols.planning.objective import Objective
from protocols.planning.plan import Plan
from protocols.planning.polish import Polish
from protocols.planning.round_model import NEVER_S, Path

SPARE = 4  # idle relays of each stage that may be brought in


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoroughness:
    """What settling may cost. A simulated operation takes some 4 us."""

    operations_max: int
    touched_max: int = 128  # microbatches; a larger tangle is timed as a whole and left as it is
    shakes: int = 0


def settle(
    instance: Instance,
    mend: Mend,
    finish_s: Sequence[float],
    thoroughness: Thoroughness,
    *,
    jitter: float = 0.0,
    seed: int = 0,
) -> Plan:
    """The plan after `mend`; `finish_s` is of its paths before they were changed."""
    paths, times_s = list(mend.paths), list(finish_s)
    touched = mend.touched()
    if len(touched) > thoroughness.touched_max:
        times_s = list(Objective(instance).score(paths).finish_s)
    elif touched:
        polish, back = _polish_of(instance, mend, touched, thoroughness, jitter=jitter, seed=seed)
        polish.run()
        shakes = Draws(seed)
        for _ in range(thoroughness.shakes):
            polish.shake(shakes)
        for index, path, done_s in zip(touched, polish.paths, polish.score.finish_s, strict=True):
            paths[index], times_s[index] = tuple(back[hop] for hop in path), done_s
    if max(times_s) == NEVER_S:
        paths = [_in_order(instance, path) for path in paths]
        times_s = list(Objective(instance).score(paths).finish_s)
    return Plan(instance=instance, paths=tuple(paths), finish_s=tuple(times_s))


def _in_order(instance: Instance, path: Path) -> Path:
    """Its stages ascending, which is always legal; microbatches that all go so never wait for each other for good."""
    stage_of = instance.stage_of
    assert stage_of is not None
    return tuple(sorted(path, key=lambda hop: int(stage_of[hop])))


def _polish_of(
    instance: Instance,
    mend: Mend,
    touched: Sequence[int],
    thoroughness: Thoroughness,
    *,
    jitter: float,
    seed: int,
) -> tuple[Polish, list[int]]:
    """The touched microbatches with their peers and a few idle ones, as an instance of their own; and the way back."""
    peers = {hop for index in touched for hop in mend.paths[index]}
    for stage in instance.rules.relayed_stages:
        idle = [peer for peer in instance.replicas(stage).tolist() if not mend.loads[peer]]
        peers.update(idle[:SPARE])
    back = sorted(peers)
    to = {peer: at for at, peer in enumerate(back)}
    paths = [tuple(to[hop] for hop in mend.paths[index]) for index in touched]
    part = instance.subset(np.array(back, dtype=np.int64))
    assert part.stage_of is not None
    stage_of: list[int] = part.stage_of.tolist()
    elsewhere = mend.visits.copy()
    elsewhere.subtract(stage_of[hop] for path in paths for hop in path[1:])
    objective = Objective(part, jitter=jitter, seed=seed)
    operations_max = thoroughness.operations_max
    return Polish(part, objective, paths, operations_max=operations_max, visits_elsewhere=elsewhere), back
