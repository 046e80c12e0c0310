"""The peer's vocabulary: what happened (events, in) and what to do (actions, out).

An action that takes time yields exactly one completion event with the same key. `core.handle(event, now)` is the
only place where the two meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from protocols.messages import Message, TensorPacket, WeightsKind, WorkKey
from protocols.swarm import PeerId, PeerState, SwarmView

# ---- events ---------------------------------------------------------------------------------------------------------


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
    packet: TensorPacket
    schema: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStepDone:
    """`ok` False: the partner's half failed a gate (finite, shape, norm) and was not applied; we stepped alone."""

    outer_step: int
    with_partner: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    kind: WeightsKind
    snapshot: str
    sha256: str
    round: int
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
    | DeadlineReached
    | PauseRequested
    | ResumeRequested
    | LeaveRequested
)

# ---- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Failure comes back as SendFailed; success says nothing."""

    to: PeerId
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchBatch:
    """-> BatchReady. Sample drawn from (seed, round, originator, counter); validation by counter alone."""

    key: WorkKey
    round: int
    train: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForward:
    """-> ForwardDone. `packet` None on the first stage: the worker has the tokens."""

    key: WorkKey
    packet: TensorPacket | None
    train: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLoss:
    """-> LossDone."""

    key: WorkKey
    packet: TensorPacket
    train: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBackward:
    """-> BackwardDone."""

    key: WorkKey
    packet: TensorPacket


@dataclass(frozen=True, slots=True, kw_only=True)
class DropStash:
    """Forget what is kept for the key; on the first stage that is the microbatch with all its attempts."""

    key: WorkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInnerStep:
    """-> InnerStepDone(round). Divide by the rows of the own backward passes, clip, AdamW, zero."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOuter:
    """-> OuterPrepared. Snapshot the weights; training may go on meanwhile."""

    outer_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOuterStep:
    """-> OuterStepDone. `packet` is the partner's half; None: alone."""

    outer_step: int
    packet: TensorPacket | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """-> SnapshotTaken."""

    kind: WeightsKind
    snapshot: str


class RecoverySource(str, Enum):
    """Where a stage's weights come from; the names of the rungs."""

    INITIAL = "initial"  # nobody has trained yet: seeded initial weights
    CATCH_UP = "catch-up"  # a sibling's snapshot
    MERGE = "merge"  # CheckFree mix of both neighbours
    COPY = "copy"  # the one neighbour there is


@dataclass(frozen=True, slots=True, kw_only=True)
class DonorState:
    """A donor's snapshot, whole and in order."""

    donor: PeerId
    stage: int
    round: int
    outer_step: int
    sha256: str
    grad_norm: float
    packets: tuple[TensorPacket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecovery:
    """-> RecoveryDone. Build the weights of `stage` from the donors' states; all or nothing."""

    stage: int
    source: RecoverySource
    donors: tuple[DonorState, ...]
    round: int
    outer_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Store the own record, now and at each heartbeat, until changed."""

    stage: int | None
    state: PeerState
    round: int
    outer_step: int
    forward_s: float
    grad_norm: float
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PutClaim:
    """Claim an empty stage in the table."""

    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadClaims:
    """-> ClaimsRead."""

    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPeer:
    """-> PingDone."""

    peer: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchFinished:
    """For progress, plots and the ledger. `loss` None: given up."""

    key: WorkKey
    round: int
    train: bool
    loss: float | None
    skipped: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFinished:
    """The own replica has taken its step."""

    round: int
    grad_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """One more of `name`; `detail` goes to the flight recorder, `notable` also to the log."""

    name: str
    detail: str = ""
    notable: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing is held any more (or the time is up): withdraw the record and stop."""


Action: TypeAlias = (
    Send
    | FetchBatch
    | RunForward
    | RunLoss
    | RunBackward
    | DropStash
    | RunInnerStep
    | PrepareOuter
    | RunOuterStep
    | TakeSnapshot
    | RunRecovery
    | Announce
    | PutClaim
    | ReadClaims
    | CallPeer
    | MicrobatchFinished
    | RoundFinished
    | Count
    | Leave
)
