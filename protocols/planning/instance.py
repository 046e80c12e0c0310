"""A planning problem: who is there, what their work and their links cost, which paths are legal.

The search adds whole microseconds: sums of integers are the same on every machine, whatever its numerics library does
with the last bit of a float, and so is the plan. The round model adds Python floats in one fixed order, which is as
reproducible. Peers are sorted by id, so the order in which somebody lists them changes nothing. The constraints are
SkipPipe's (arXiv 2502.19913).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (numpy's stubs leave the types of reductions, .T and .copy() open)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mode

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protocols.errors import ConfigError
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

US_PER_S = 1_000_000
COST_MAX_S = 86_400.0  # a forward or a transfer of a day is a slip of units
PEERS_MAX = 4_000  # with one matrix; larger swarms come as coordinates (`groups`)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRules:
    """What every path must look like (the run's PathSpec)."""

    num_stages: int
    path_stages: int
    swaps_max: int = 2
    skip_width_max: int = 4
    missing: frozenset[int] = frozenset()  # stages without a replica, which every path must skip

    def __post_init__(self) -> None:
        if not 2 <= self.path_stages <= self.num_stages - len(self.missing):
            raise ConfigError(
                f"a path of {self.path_stages} stages does not fit a model of {self.num_stages - len(self.missing)}:"
                " give 2 at least, and at most as many as there are"
            )

    @property
    def relayed_stages(self) -> tuple[int, ...]:
        """Those after the first that somebody serves: all of them are to be visited alike."""
        return tuple(stage for stage in range(1, self.num_stages) if stage not in self.missing)

    @classmethod
    def of_run(cls, spec: RunSpec, missing: frozenset[int]) -> PathRules:
        """Of a run in which nobody serves the `missing` stages."""
        whole = cls(
            num_stages=spec.num_stages,
            path_stages=spec.path_stages,
            swaps_max=spec.paths.swaps_max,
            skip_width_max=spec.paths.skip_width_max,
        )
        return whole.without(*missing)

    def without(self, *stages: int) -> PathRules:
        """What is legal while nobody serves these stages: shorter paths where they ran them all, and wider skips."""
        missing = self.missing | set(stages)
        return replace(
            self,
            missing=missing,
            path_stages=min(self.path_stages, self.num_stages - len(missing)),
            skip_width_max=max(self.skip_width_max, len(missing) + 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What a visit takes beyond its forward, and in which order a peer does its work."""

    backward_factor: float = 1.5
    loss_factor: float = 0.25  # of the originator's forward
    gap_s: float = 0.0  # a peer's pause after each job
    gap_start_s: float = 0.0  # after the forward that starts a microbatch
    backward_first: bool = False  # as the live runtime does; else first come, first served


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """The problem, checked and immutable; made by `make_instance`. N peers, indices in the order of their ids."""

    peers: tuple[PeerId, ...]
    rules: PathRules
    timing: Timing
    microbatches: int  # of each originator in a round
    stage_sizes: tuple[int, ...]  # peers of each stage
    stage_of: Ints | None  # [N]; None: the planner arranges
    forward_s: Floats  # [N]
    link_s: Floats  # [N, N], one way, an activation or its gradient
    slots: Ints  # [N], microbatches held between forward start and backward end
    originator_slots: int | None  # the same for first-stage peers; None: as `slots` says
    waves: int  # a peer may serve slots x waves microbatches of a round
    averaging_factor: float  # averaging seconds for each second of the worst link inside a stage

    @property
    def num_peers(self) -> int:
        return len(self.peers)

    @property
    def total_microbatches(self) -> int:
        return self.microbatches * self.stage_sizes[0]

    @cached_property
    def round_trip_us(self) -> Ints:
        """[N, N] Both ways: a path crosses each of its links twice."""
        one_way_us = _us(self.link_s)
        return one_way_us + one_way_us.T

    @cached_property
    def relay_us(self) -> Ints:
        """[N] What a relayed microbatch occupies a peer for."""
        timing = self.timing
        return _us(self.forward_s * (1 + timing.backward_factor) + 2 * timing.gap_s)

    @cached_property
    def origin_us(self) -> Ints:
        """[N] What an own microbatch occupies a peer for, were it an originator."""
        timing = self.timing
        factor = 1 + timing.loss_factor + timing.backward_factor
        return _us(self.forward_s * factor + 2 * timing.gap_s + timing.gap_start_s)

    @property
    def origin_slots(self) -> Ints:
        """[N] Own microbatches that a peer may have in flight, were it an originator."""
        return (
            self.slots if self.originator_slots is None else np.full_like(self.slots, self.originator_slots)
        )

    @property
    def room(self) -> Ints:
        """[N] Microbatches that a peer may relay in a round."""
        return self.slots * self.waves

    def arranged(self, stage_of: Ints) -> Instance:
        """The same problem, with everybody's stage fixed."""
        return replace(self, stage_of=stage_of)

    def subset(self, kept: Ints) -> Instance:
        """The same problem among the `kept` peers only, by ascending index."""
        assert self.stage_of is not None
        stage_of = self.stage_of[kept]
        return replace(
            self,
            peers=tuple(self.peers[index] for index in kept.tolist()),
            stage_sizes=tuple(np.bincount(stage_of, minlength=self.rules.num_stages).tolist()),
            stage_of=stage_of,
            forward_s=self.forward_s[kept],
            link_s=self.link_s[kept][:, kept],
            slots=self.slots[kept],
        )

    def replicas(self, stage: int) -> Ints:
        """Indices of the peers of a stage; only where the arrangement is fixed."""
        assert self.stage_of is not None
        return np.flatnonzero(self.stage_of == stage)


def make_instance(
    peers: Sequence[PeerId],
    forward_s: ArrayLike,
    link_s: ArrayLike,
    *,
    rules: PathRules,
    microbatches: int,
    slots: int | Sequence[int],
    stage_of: Mapping[PeerId, int] | None = None,
    stage_sizes: Sequence[int] | None = None,
    originator_slots: int | None = None,
    timing: Timing | None = None,
    averaging_factor: float = 0.0,
) -> Instance:
    """Check everything, sort by peer id. Without `stage_of` the planner arranges as many peers as `stage_sizes` say."""
    names = _checked_names(peers)
    rank = np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64)
    forward_N = _checked_s("forward time", forward_s, (len(names),), names)[rank]
    link_NN = _checked_s("link", link_s, (len(names), len(names)), names)[np.ix_(rank, rank)]
    np.fill_diagonal(link_NN, 0.0)
    slots_N = np.broadcast_to(np.asarray(slots, dtype=np.int64), (len(names),))[rank]
    _at_least_1(microbatches=microbatches, slots=int(slots_N.min()), originator_slots=originator_slots or 1)
    # a peer of the most common number of slots can serve all microbatches of one originator: published 6 in 2 x 3
    waves = -(-microbatches // mode(slots_N.tolist()))
    arrangement, sizes = _arrangement(tuple(sorted(names)), rules, stage_of, stage_sizes)
    return Instance(
        peers=tuple(sorted(names)), rules=rules, timing=timing or Timing(), microbatches=microbatches,
        stage_sizes=sizes, stage_of=arrangement, forward_s=forward_N, link_s=link_NN, slots=slots_N,
        originator_slots=originator_slots, waves=waves, averaging_factor=averaging_factor,
    )  # fmt: skip


def _arrangement(
    names: Sequence[PeerId],
    rules: PathRules,
    stage_of: Mapping[PeerId, int] | None,
    stage_sizes: Sequence[int] | None,
) -> tuple[Ints | None, tuple[int, ...]]:
    """[N] Stages, None where they are free, and how many peers each stage has."""
    fixed = None if stage_of is None else _checked_stages(stage_of, names, rules.num_stages)
    if fixed is None:
        sizes = tuple(stage_sizes or ())
    else:
        sizes = tuple(np.bincount(fixed, minlength=rules.num_stages).tolist())
    _check_sizes(sizes, rules, len(names))
    return fixed, sizes


def _us(times_s: Floats) -> Ints:
    return np.rint(times_s * US_PER_S).astype(np.int64)


def _checked_names(peers: Sequence[PeerId]) -> tuple[PeerId, ...]:
    if not 2 <= len(peers) <= PEERS_MAX:
        raise ConfigError(
            f"{len(peers)} peers: a plan needs 2 at least, and takes {PEERS_MAX} at most with a matrix"
        )
    if len(set(peers)) != len(peers):
        raise ConfigError("a peer is named twice: each needs an id of its own")
    return tuple(peers)


def _checked_s(what: str, given_s: ArrayLike, shape: tuple[int, ...], names: Sequence[PeerId]) -> Floats:
    """`given_s` as an array, or a message that names the entry at fault."""
    try:
        times_s = np.asarray(given_s, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the {what} costs are no {' x '.join(map(str, shape))} numbers: {error}"
        ) from error
    if times_s.shape != shape:
        found = " x ".join(map(str, times_s.shape)) or "a single number"
        raise ConfigError(
            f"the {what} costs are {found}, but {len(names)} peers need {' x '.join(map(str, shape))}"
        )
    wrong = np.argwhere(~((times_s >= 0) & (times_s <= COST_MAX_S)))
    if len(wrong):
        where = " to ".join(str(names[index]) for index in wrong[0])
        raise ConfigError(
            f"the {what} of peer {where} is {times_s[tuple(wrong[0])]} s ({len(wrong)} such entries):"
            f" give seconds between 0 and {COST_MAX_S:.0f}"
        )
    return times_s


def _checked_stages(stage_of: Mapping[PeerId, int], names: Sequence[PeerId], num_stages: int) -> Ints:
    if unplaced := sorted(set(names) - set(stage_of)):
        raise ConfigError(
            f"the arrangement leaves out {len(unplaced)} peers, {unplaced[0]} first: place every peer"
        )
    if strangers := sorted(set(stage_of) - set(names)):
        raise ConfigError(f"the arrangement names peer {strangers[0]}, for which there are no costs")
    if wrong := [name for name in names if not 0 <= stage_of[name] < num_stages]:
        raise ConfigError(
            f"peer {wrong[0]} is placed on stage {stage_of[wrong[0]]}, but stages are 0 to {num_stages - 1}"
        )
    return np.array([stage_of[name] for name in names], dtype=np.int64)


def _check_sizes(sizes: Sequence[int], rules: PathRules, num_peers: int) -> None:
    if len(sizes) != rules.num_stages:
        raise ConfigError(
            f"{len(sizes)} stage sizes for {rules.num_stages} stages: say for each how many peers serve it"
        )
    if empty := [stage for stage, size in enumerate(sizes) if size < 1 and stage not in rules.missing]:
        raise ConfigError(f"stage {empty[0]} has no peer: each stage needs 1 at least")
    if sum(sizes) != num_peers:
        raise ConfigError(f"the stages are to have {sum(sizes)} peers together, but there are {num_peers}")


def _at_least_1(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"{name.replace('_', ' ')} is {number}: give 1 at least")
