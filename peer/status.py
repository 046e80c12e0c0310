"""What a running peer says about itself: one frozen snapshot, for control plane, metrics, progress and plots.

The daemon makes it; everybody else only reads it. No torch, no hivemind: command lines import this fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocols.swarm import PeerId, PeerInfo, PeerState

EVENTS_MAX = 64  # of a status: the newest lines; older ones are in the log and the flight recorder
VALIDATION_MAX = 2048  # points of a status; a run validates every `rounds.eval_every` rounds

STATE_MEANINGS = {
    PeerState.JOINING: "known to the swarm, has no stage yet",
    PeerState.CATCHING_UP: "fetching the weights of its stage",
    PeerState.SERVING: "takes microbatches",
    PeerState.LEAVING: "finishes what it holds, takes nothing new",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPoint:
    """Mean loss (nats/token) of this originator's share of the validation microbatches at `round`."""

    round: int
    loss: float
    num_microbatches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """A snapshot. Only originators (stage 0) have losses, tokens and validation points."""

    peer: PeerId
    name: str
    run_id: str
    stage: int | None
    state: PeerState
    device: str = "cpu"
    paused: bool = False
    round: int = 0
    total_rounds: int = 0
    outer_step: int = 0
    loss: float | None = None  # nats/token, mean over the own microbatches of the newest finished round
    validation: tuple[ValidationPoint, ...] = ()
    tokens: int = 0  # trained by this originator since its start
    tokens_per_s: float = 0.0
    num_in_flight: int = 0  # microbatches of an originator between start and end
    queue_depth: int = 0  # microbatches a relay holds or lets wait
    counters: Mapping[str, float] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()  # full multiaddrs, the farthest reaching first
    peers: tuple[PeerInfo, ...] = ()  # its view of the swarm, itself included
    uptime_s: float = 0.0
    planned_round_s: float = 0.0  # of an originator: what its group's plan says; 0: no plan
    apart: float = 0.0  # rms distance to averaging partners, as a share of the rms weight
    cosine: float = 0.0  # between what this replica and its partners have done since they averaged last
    outer_wait_s: float = 0.0  # from an outer step's due time until it is applied; training goes on meanwhile
    events: tuple[str, ...] = ()  # newest last

    @property
    def is_bootstrap(self) -> bool:
        """Serves nobody's stage, only introductions."""
        return self.stage is None and self.state is PeerState.SERVING

    def peers_per_stage(self, num_stages: int) -> tuple[int, ...]:
        """Serving replicas of each stage in this peer's view."""
        serving = [info.stage for info in self.peers if info.state is PeerState.SERVING]
        return tuple(serving.count(stage) for stage in range(num_stages))
