"""Small swarms for the tests of machines: a spec, views, packets, and a core that is serving."""

from __future__ import annotations

from peer.simulator.compute import boundary_packet
from peer.simulator.swarm import tiny_spec
from protocols.core import PeerCore
from protocols.events import RecoveryDone, Started
from protocols.messages import BoundaryActivation, BoundaryGradient, Hop, Path, WorkKey
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, PeerInfo, PeerState, SwarmView

SPEC = tiny_spec(4)
PACKET = boundary_packet(SPEC)
PATH: Path = (Hop(0, "a1"), Hop(1, "b1"), Hop(2, "c1"), Hop(3, "d1"))


def stage_of(peer: PeerId) -> int:
    """`c2` serves stage 2."""
    return ord(peer[0]) - ord("a")


def info(peer: PeerId, **changes: object) -> PeerInfo:
    fields: dict[str, object] = {"stage": stage_of(peer), "state": PeerState.SERVING, **changes}
    return PeerInfo(peer=peer, **fields)  # type: ignore[arg-type]


def view_of(*peers: PeerId | PeerInfo) -> SwarmView:
    return SwarmView(tuple(info(each) if isinstance(each, str) else each for each in peers))


EVERYBODY = view_of("a1", "b1", "b2", "c1", "c2", "d1", "d2")


def key(counter: int, attempt: int = 1, originator: PeerId = "a1") -> WorkKey:
    return WorkKey(originator, counter, attempt)


def activation(
    work: WorkKey, *, hop: int, path: Path = PATH, round_: int = 0, train: bool = True
) -> BoundaryActivation:
    return BoundaryActivation(key=work, round=round_, path=path, hop=hop, train=train, packet=PACKET)


def gradient(work: WorkKey, *, hop: int) -> BoundaryGradient:
    return BoundaryGradient(key=work, hop=hop, packet=PACKET)


def serving(peer: PeerId, *, spec: RunSpec = SPEC, view: SwarmView = EVERYBODY) -> PeerCore:
    """A core that has got its initial weights, with `view` in front of it."""
    core = PeerCore(peer, spec, stage_of(peer))
    core.handle(Started(view=SwarmView()), 0.0)
    core.handle(RecoveryDone(stage=stage_of(peer), ok=True), 0.0)
    core.outlook.see(view)
    return core
