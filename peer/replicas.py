"""Which replicas make the model, what of their answers counts, and their mean. Pure; `peer.collect` does the asking.

Invariant: a replica's weights count whole or not at all, and each as much as any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dht.records import PeerRecord
from peer.compute.snapshot import Shapes
from peer.model.stage import FirstStage, MiddleStage
from protocols.download import Download
from protocols.errors import ConfigError, GossamerError
from protocols.messages import WeightsChunk
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, PeerState

AVERAGE, BEST = "average", "best"


class StageMissing(GossamerError):
    """A stage whose weights nobody gives: there is no whole model now."""


class DonorFailed(GossamerError):
    """Another replica must do; the collector's own affair. `again`: this one may give its weights later."""

    def __init__(self, reason: str, *, again: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.again = reason, again


# ---- who is asked --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """`wanted` of the replicas make the stage's weights; those behind them stand in for who fails."""

    stage: int
    replicas: tuple[PeerRecord, ...]
    wanted: int


def rank(record: PeerRecord) -> tuple[int, float, PeerId]:
    """The best first: most rounds, then the lower loss where one is published (by first-stage peers), then by id."""
    return (-record.info.round, math.inf if record.loss is None else record.loss, record.peer)


def choose(records: Iterable[PeerRecord], num_stages: int, take: str) -> tuple[StagePlan, ...]:
    """A plan for each stage. `take` is AVERAGE, BEST, or a peer for its stage with the average elsewhere.

    StageMissing names the stages without a serving replica, ConfigError a peer that is not there.
    """
    serving = sorted((one for one in records if one.info.state is PeerState.SERVING), key=rank)
    named = None if take in (AVERAGE, BEST) else _find(serving, take)
    plans = []
    for stage in range(num_stages):
        replicas = tuple(one for one in serving if one.info.stage == stage)
        if named is not None and named.info.stage == stage:
            replicas = (named,)
        wanted = min(1, len(replicas)) if take == BEST else len(replicas)
        plans.append(StagePlan(stage=stage, replicas=replicas, wanted=wanted))
    missing = [str(plan.stage) for plan in plans if not plan.replicas]
    if missing:
        raise StageMissing(
            f"no live replica of stage {', '.join(missing)} among {len(serving)} serving peers: "
            "try again when somebody serves it, or export from checkpoints"
        )
    return tuple(plans)


def _find(serving: Sequence[PeerRecord], which: str) -> PeerRecord:
    """By name, or by begin or end of the id."""
    found = [
        one
        for one in serving
        if which == one.friendly_name or one.peer.startswith(which) or one.peer.endswith(which)
    ]
    if len(found) != 1:
        there = ", ".join(f"{one.friendly_name} (...{one.peer[-6:]})" for one in found or serving)
        what = "several serving peers are" if found else "no serving peer is"
        raise ConfigError(f"{what} called {which!r}; {'they' if found else 'there'} are: {there or 'none'}")
    return found[0]


# ---- what came -----------------------------------------------------------------------------------


def stage_shapes(spec: RunSpec, stage: int) -> Shapes:
    """Names and shapes of a stage's weights."""
    with torch.device("meta"):
        module = FirstStage(spec) if stage == 0 else MiddleStage(spec, stage)
    return {name: tuple(weight.shape) for name, weight in module.state_dict().items()}


def take_in(download: Download, chunk: WeightsChunk, bytes_max: int) -> bool:
    """Add the chunk that was asked for; False: a late answer to an older question. DonorFailed: no use to go on."""
    first = download.first
    if chunk.stage != download.stage or chunk.kind is not download.kind:
        return False
    if chunk.count == 0 or chunk.packet is None:
        raise DonorFailed("refuses", again=True)
    if not download.expects(chunk):
        return False
    if first is not None and (chunk.count, chunk.sha256) != (first.count, first.sha256):
        raise DonorFailed("contradicts itself")
    if num_bytes(download) + chunk.packet.num_bytes > bytes_max:
        raise DonorFailed("sends too much")
    download.add(chunk)
    return True


def num_bytes(download: Download) -> int:
    return sum(packet.num_bytes for packet in download.packets)


class Mean:
    """Of a stage's replicas, each counting the same: float64 sums, rounded to fp32 once at the end.

    The spread is the replicas' rms distance from the mean as a share of the rms of the mean's weights. With S_k the sum
    of squared distances of the first k from their mean m_k, S_{k+1} = S_k + k/(k+1) |x_{k+1} - m_k|^2, exactly.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sums: dict[str, Tensor] = {}
        self._scatter = 0.0

    def add(self, weights: Mapping[str, Tensor]) -> None:
        if not self.count:
            self._sums = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in weights.items()}
        share = self.count / (self.count + 1)
        for name, total in self._sums.items():
            if self.count:
                away = weights[name] - total / self.count
                self._scatter += share * float((away * away).sum())
            total.add_(weights[name])
        self.count += 1

    def weights(self) -> dict[str, Tensor]:
        return {name: (total / self.count).float() for name, total in self._sums.items()}

    def spread(self) -> float:
        size = sum(float((total / self.count).square().sum()) for total in self._sums.values())
        return math.sqrt(self._scatter / self.count / size) if size else 0.0
