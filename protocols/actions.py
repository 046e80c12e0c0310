"""The peer's vocabulary, second half: what to do. The first half, what happened, is `protocols.events`.

An action that takes time yields exactly one completion event with the same key.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from protocols.costs import Measured
from protocols.messages import Message, TensorPacket, WeightsKind, WorkKey
from protocols.swarm import PeerId, PeerState

if TYPE_CHECKING:
    from protocols.group_plan import PlanProblem
    from protocols.planning import Plan


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


FOLLOWS = 0.0  # weight of a replica that has trained on nothing since it last averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOuter:
    """-> OuterPrepared. Snapshot the fragment whose turn it is; training may go on meanwhile.

    `weight`: of the own outer gradient (`noloco.token_weight`), or FOLLOWS. In the second pair round the new slow
    weights are sent.
    """

    outer_step: int
    pair_round: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOuterStep:
    """-> OuterStepDone. `packet` is the partner's half; None: alone."""

    outer_step: int
    pair_round: int
    packet: TensorPacket | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """-> SnapshotTaken."""

    kind: WeightsKind
    snapshot: str


class RecoverySource(str, Enum):
    """Where a stage's weights come from; the names of the rungs."""

    INITIAL = "initial"  # nobody has trained yet: seeded initial weights, or the own checkpoint
    CATCH_UP = "catch-up"  # a sibling's snapshot
    SHADOW = "shadow"  # the copy that a peer of the stage before has kept
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
    measured: Measured
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
class MakePlan:
    """-> PlanMade. In a thread: `protocols.group_plan.solve`."""

    problem: PlanProblem
    previous: Plan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighStages:
    """-> StagesWeighed. In a thread: `protocols.group_plan.weigh`. By stage: the swarm with me there."""

    problems: tuple[tuple[int, PlanProblem], ...]


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
class OuterFinished:
    """A pair round is over, `waited_s` after its outer step fell due. `apart` and `cosine`: see OuterStepDone."""

    outer_step: int
    with_partner: bool
    apart: float
    cosine: float
    waited_s: float


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
    | MakePlan
    | WeighStages
    | MicrobatchFinished
    | RoundFinished
    | OuterFinished
    | Count
    | Leave
)
