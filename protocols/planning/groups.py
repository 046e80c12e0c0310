"""Large swarms are planned in groups of neighbours, each with its share of every stage.

Everybody computes the same cut from the same table: peers sorted by id, each with coordinates and an access delay, so
that nobody needs a delay for every pair. The cut halves the swarm along its widest axis, stage by stage at the same
share, until groups are small; a group thus has all stages, and the model still mixes, because averaging crosses groups.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (numpy's stubs leave the types of reductions, .T and .copy() open)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from protocols.errors import ConfigError
from protocols.planning.instance import Floats, Instance, Ints, PathRules, Timing, make_instance
from protocols.planning.paths import find_paths
from protocols.planning.plan import Plan
from protocols.swarm import PeerId

GROUP_PEERS_MAX = 64
LANDMARKS = 4  # peers whose distances serve as coordinates where there are only links


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Crowd:
    """N peers in any order, whose links are estimated: the distance of their coordinates plus both access delays."""

    peers: tuple[PeerId, ...]
    stage_of: Mapping[PeerId, int]
    forward_s: ArrayLike  # [N]
    coordinates_s: ArrayLike  # [N, D], D small
    access_s: ArrayLike  # [N], of a transfer of one activation
    slots: int | Sequence[int]
    rules: PathRules
    microbatches: int
    timing: Timing
    originator_slots: int | None = None


def plan_in_groups(instance: Instance, *, seed: int = 0) -> tuple[Plan, ...]:
    """A plan for each group of an arranged instance; the groups in the order of their first peer's id."""
    assert instance.stage_of is not None
    coordinates_ND = landmark_coordinates(instance.link_s)
    groups = cut(instance.stage_of, coordinates_ND, num_stages=instance.rules.num_stages)
    return tuple(find_paths(instance.subset(group), seed=seed, brief=True) for group in groups)


def plan_crowd(crowd: Crowd, *, seed: int = 0) -> tuple[Plan, ...]:
    """The same for a swarm that is too large for a matrix."""
    rank = np.array(sorted(range(len(crowd.peers)), key=crowd.peers.__getitem__), dtype=np.int64)
    peers = [crowd.peers[index] for index in rank.tolist()]
    stage_of_N = np.array([crowd.stage_of[peer] for peer in peers], dtype=np.int64)
    coordinates_ND = np.asarray(crowd.coordinates_s, dtype=np.float64)[rank]
    groups = cut(stage_of_N, coordinates_ND, num_stages=crowd.rules.num_stages)
    return tuple(find_paths(_instance(crowd, rank[group]), seed=seed, brief=True) for group in groups)


def cut(stage_of_N: Ints, coordinates_ND: Floats, *, num_stages: int) -> list[Ints]:
    """Groups of at most GROUP_PEERS_MAX, unless a stage has too few replicas to give each group one."""
    replicas = np.bincount(stage_of_N, minlength=num_stages)
    if not replicas.all():
        raise ConfigError(f"stage {int(np.argmin(replicas))} has no peer: each stage needs 1 at least")
    everybody = np.arange(len(stage_of_N))
    for num_groups in range(-(-len(stage_of_N) // GROUP_PEERS_MAX), int(replicas.min()) + 1):
        groups = _halved(everybody, num_groups, stage_of_N, coordinates_ND)
        if max(map(len, groups)) <= GROUP_PEERS_MAX:
            break
    else:
        groups = _halved(everybody, int(replicas.min()), stage_of_N, coordinates_ND)
    return sorted(groups, key=lambda group: int(group[0]))


def _halved(members: Ints, num_groups: int, stage_of_N: Ints, coordinates_ND: Floats) -> list[Ints]:
    if num_groups == 1:
        return [members]
    here_MD = coordinates_ND[members]
    axis = int(np.argmax(here_MD.max(axis=0) - here_MD.min(axis=0)))
    along = members[
        np.argsort(here_MD[:, axis], kind="stable")
    ]  # of those that are level, the lower id first
    left_groups = num_groups // 2
    left = np.zeros(len(stage_of_N), dtype=np.bool_)
    for stage in np.unique(stage_of_N[members]).tolist():
        replicas = along[stage_of_N[along] == stage]
        left[replicas[: _share(len(replicas), left_groups, num_groups)]] = True
    return [
        *_halved(members[left[members]], left_groups, stage_of_N, coordinates_ND),
        *_halved(members[~left[members]], num_groups - left_groups, stage_of_N, coordinates_ND),
    ]


def _share(replicas: int, left_groups: int, num_groups: int) -> int:
    """Of a stage's replicas, how many go left: in proportion, with one at least for each group on either side."""
    share = (2 * replicas * left_groups + num_groups) // (2 * num_groups)
    return min(max(share, left_groups), replicas - (num_groups - left_groups))


def _instance(crowd: Crowd, members: Ints) -> Instance:
    peers = [crowd.peers[index] for index in members.tolist()]
    coordinates_MD = np.asarray(crowd.coordinates_s, dtype=np.float64)[members]
    access_M = np.asarray(crowd.access_s, dtype=np.float64)[members]
    squares_MM = np.zeros((len(members), len(members)))
    for axis_M in coordinates_MD.T:
        squares_MM += (axis_M[:, None] - axis_M) ** 2
    slots = (
        crowd.slots if isinstance(crowd.slots, int) else [crowd.slots[index] for index in members.tolist()]
    )
    return make_instance(
        peers,
        np.asarray(crowd.forward_s, dtype=np.float64)[members],
        np.sqrt(squares_MM) + access_M[:, None] + access_M,
        rules=crowd.rules,
        microbatches=crowd.microbatches,
        slots=slots,
        stage_of={peer: crowd.stage_of[peer] for peer in peers},
        originator_slots=crowd.originator_slots,
        timing=crowd.timing,
    )


def landmark_coordinates(link_NN: Floats) -> Floats:
    """[N, LANDMARKS] Distances to a few peers that lie far apart; for those who have a matrix of links."""
    landmarks = [0]
    nearest_N = link_NN[0] + link_NN[:, 0]
    while len(landmarks) < LANDMARKS:
        landmarks.append(int(np.argmax(nearest_N)))
        nearest_N = np.minimum(nearest_N, link_NN[landmarks[-1]] + link_NN[:, landmarks[-1]])
    return np.stack([link_NN[landmark] + link_NN[:, landmark] for landmark in landmarks], axis=1) / 2
