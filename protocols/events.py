"""The peer's vocabulary, first half: what happened. `core.handle(event, now)` answers with `protocols.actions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from protocols.messages import Message, TensorPacket, WeightsKind, WorkKey
from protocols.swarm import PeerId, SwarmView

if TYPE_CHECKING:
    from protocols.group_plan import PlanProblem
    from protocols.planning import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The driver is up: address known, table joined, `view` read once."""

    view: SwarmView
    resumed_round: int | None = None  # weights came from this machine's checkpoint, at that round
    resumed_outer_step: int = 0
    resumed_counter: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReady:
    """FetchBatch done: the compute side holds tokens and targets under the key."""

    key: WorkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """A checked message; `sender` is proven by the channel."""

    sender: PeerId
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """`peer` did not take `message`; None: nothing was under way, but the peer is gone."""

    peer: PeerId
    message: Message | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardDone:
    key: WorkKey
    packet: TensorPacket
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDone:
    """Mean loss of the microbatch in nats a token; `packet` is the boundary gradient, None after validation."""

    key: WorkKey
    loss: float
    packet: TensorPacket | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardDone:
    """`packet` is the gradient for the hop before; None on the first stage."""

    key: WorkKey
    packet: TensorPacket | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeFailed:
    """The job of this key raised (malformed tensor, out of memory); the worker lives on."""

    key: WorkKey | None
    job: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerStepDone:
    """The weights have now seen `round` rounds; `grad_norm` is before clipping, 0 when there was no gradient."""

    round: int
    grad_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterPrepared:
    """The half to send for `outer_step`, taken from a snapshot of the weights."""

    outer_step: int
    pair_round: int
    packet: TensorPacket
    schema: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStepDone:
    """`with_partner` False: there was none, or its half failed a gate (finite, shape) and was not applied.

    `apart`: rms difference of the two halves as a share of the rms weight, an estimate of the replicas' spread;
    `cosine`: of what both have done since they were averaged last, as far as the halves tell. Both 0 alone.
    """

    outer_step: int
    with_partner: bool
    apart: float = 0.0
    cosine: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    kind: WeightsKind
    snapshot: str
    sha256: str
    outer_step: int
    packets: tuple[TensorPacket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDone:
    """The stage's weights are in place. `ok` False: hash or schema did not fit; nothing was changed."""

    stage: int
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewChanged:
    """Fresh from the table; sent at each poll, changed or not (a confirmation counts polls)."""

    view: SwarmView


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimsRead:
    """Everybody's unexpired claims on an empty stage: (peer, seconds since it was claimed)."""

    stage: int
    claims: tuple[tuple[PeerId, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PingDone:
    """Outcome of a direct call. `is_gone`: nobody listens at its address; else it may be slow, frozen or cut off."""

    peer: PeerId
    ok: bool
    seconds: float
    is_gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessMeasured:
    """How fast anything went out of this peer lately, and came in."""

    upload_bytes_per_s: float
    download_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMade:
    """`plan` None: there is none, for this `reason`."""

    problem: PlanProblem
    plan: Plan | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesWeighed:
    """Planned seconds a microbatch, by the stage that this peer would serve; infinite where there is no plan."""

    seconds: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """`next_deadline()` has passed."""


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """Finish what is under way, start nothing new."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    pass


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """Finish what you hold and go."""


Event: TypeAlias = (
    Started
    | BatchReady
    | MessageReceived
    | SendFailed
    | ForwardDone
    | LossDone
    | BackwardDone
    | ComputeFailed
    | InnerStepDone
    | OuterPrepared
    | OuterStepDone
    | SnapshotTaken
    | RecoveryDone
    | ViewChanged
    | ClaimsRead
    | PingDone
    | AccessMeasured
    | PlanMade
    | StagesWeighed
    | DeadlineReached
    | PauseRequested
    | ResumeRequested
    | LeaveRequested
)
