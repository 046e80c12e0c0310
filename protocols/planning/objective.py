"""What a plan is judged by: its makespan in the round model, or the mean of several when times vary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from protocols.planning.draws import Draws
from protocols.planning.instance import Instance
from protocols.planning.round_model import Path, RoundModel
from protocols.planning.stage_sets import orders_by_set

JITTER_DRAWS = 6


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """Less is better: first the makespan (of jittered rounds, their mean), then how late microbatches are together."""

    makespan_s: float
    together_s: float
    finish_s: tuple[float, ...] = field(compare=False)  # of the undisturbed round
    operations: int = field(compare=False)  # that were simulated to find out


class Objective:
    """Judges plans of one arranged instance. `jitter` 0.2: all times vary by up to 20 % either way, in seeded draws."""

    def __init__(self, instance: Instance, *, jitter: float = 0.0, seed: int = 0) -> None:
        self._model = RoundModel(instance)
        assert instance.stage_of is not None
        self._stage_of: list[int] = instance.stage_of.tolist()
        self._orders = orders_by_set(instance.rules)
        draws = Draws(seed)
        self._varied = [
            RoundModel(_jittered(instance, draws, jitter)) for _ in range(JITTER_DRAWS if jitter else 0)
        ]

    def in_orders(self, path: Path) -> list[Path]:
        """The same peers in all legal orders, the fastest first; empty where two of them serve one stage."""
        relay_of = {self._stage_of[peer]: peer for peer in path}
        orders = self._orders.get(frozenset(relay_of), ()) if len(relay_of) == len(path) else ()
        return sorted((tuple(relay_of[stage] for stage in order) for order in orders), key=self.trip_s)

    def trip_s(self, path: Path) -> float:
        """Of a microbatch that never waits."""
        return self._model.trip(path).rest_s[0]

    def score(self, paths: Sequence[Path], *, cutoff_s: float = math.inf) -> Score:
        """Where the makespan exceeds `cutoff_s`, infinite."""
        rounds = [model.simulate(paths) for model in self._varied]
        undisturbed = self._model.simulate(paths, cutoff_s=math.inf if rounds else cutoff_s)
        operations = sum(one.operations for one in (*rounds, undisturbed))
        makespans_s = [one.makespan_s for one in rounds or [undisturbed]]
        mean_s = math.fsum(makespans_s) / len(makespans_s)
        return Score(mean_s, math.fsum(undisturbed.finish_s), undisturbed.finish_s, operations)


def _jittered(instance: Instance, draws: Draws, jitter: float) -> Instance:
    num_peers = instance.num_peers
    return replace(
        instance,
        forward_s=instance.forward_s * (1 - jitter + 2 * jitter * draws.uniform(num_peers)),
        link_s=instance.link_s * (1 - jitter + 2 * jitter * draws.uniform(num_peers, num_peers)),
    )
