"""From message to machine, and from a message that could not be sent to whoever must know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.actions import Action, CallPeer, Count
from protocols.messages import (
    BoundaryActivation,
    BoundaryGradient,
    Message,
    OuterAccept,
    OuterExchange,
    OuterOffer,
    Release,
    RoundPlan,
    Undeliverable,
    WeightsChunk,
    WeightsKind,
    WeightsRequest,
)
from protocols.recovery import RecoveryState
from protocols.swarm import PeerId

if TYPE_CHECKING:
    from protocols.core import PeerCore


def on_message(core: PeerCore, sender: PeerId, message: Message, now: float) -> list[Action]:
    """A checked message. Whoever speaks is alive."""
    core.outlook.trust(sender)
    match message:
        case BoundaryActivation():
            return _on_activation(core, message, now)
        case BoundaryGradient():
            if message.key.originator == core.me:
                return (
                    core.originator.on_gradient(sender, message, now) if core.originator is not None else []
                )
            return core.relay.on_gradient(sender, message, now)
        case RoundPlan():
            over = core.ledger.announce(sender, message.round, message.keys)
            return core.relay.on_release(tuple(over))
        case Release():
            return core.relay.on_release(message.keys)
        case Undeliverable():
            return _on_undeliverable(core, sender, message, now)
        case WeightsRequest():
            if message.kind is WeightsKind.SHADOW:
                return [core.shadows.on_request(sender, message)]
            return core.donor.on_request(sender, message, now)
        case WeightsChunk():
            if core.recovery.state is RecoveryState.SERVING:
                return core.shadows.on_chunk(sender, message, now)
            return core.recovery.on_chunk(sender, message, core.outlook, now)
        case OuterOffer() | OuterExchange() | OuterAccept():
            return _on_outer(core, sender, message, now)


def _on_activation(core: PeerCore, message: BoundaryActivation, now: float) -> list[Action]:
    if message.key.originator == core.me:
        return core.originator.on_activation(message) if core.originator is not None else []
    is_serving = core.recovery.state in (RecoveryState.SERVING, RecoveryState.LEAVING)
    if not is_serving or message.path[message.hop].stage != core.stage:
        return core.relay.refuse(message.key)  # the path was planned from an old record of ours
    return core.relay.on_activation(message, now)


def _on_undeliverable(core: PeerCore, sender: PeerId, message: Undeliverable, now: float) -> list[Action]:
    """A relay's word is enough to go another way, not to suspect: that takes a call of our own."""
    if core.originator is None or message.key.originator != core.me:
        return []
    if not core.originator.is_on_path(message):
        return []  # of an attempt that is over, or a stranger's slander
    missed = sender if message.unreachable == core.me else message.unreachable  # one of us two is cut off
    core.outlook.avoid(missed)
    actions = core.originator.on_undeliverable(message, core.visible, now)
    return actions if missed == sender else [*actions, CallPeer(peer=missed)]


def _on_outer(
    core: PeerCore, sender: PeerId, message: OuterOffer | OuterExchange | OuterAccept, now: float
) -> list[Action]:
    if core.outer is None:
        return []
    match message:
        case OuterOffer():
            return core.outer.on_offer(sender, message, core.visible, now)
        case OuterExchange():
            return core.outer.on_exchange(sender, message, core.visible, now)
        case OuterAccept():
            return core.outer.on_accept(sender, message, core.visible, now)


def on_send_failed(core: PeerCore, peer: PeerId, message: Message | None, now: float) -> list[Action]:
    """`peer` is out of reach: that concerns everything that runs through it, not only this message."""
    actions = core.suspect(peer, now)
    if isinstance(message, BoundaryActivation | BoundaryGradient) and message.key.originator != core.me:
        return [*actions, *core.relay.on_undelivered(message.key, peer)]
    if isinstance(message, RoundPlan) and core.originator is not None:
        core.originator.on_plan_lost(peer)
    if isinstance(message, Undeliverable):
        return [*actions, Count(name="originator-unreachable", detail=str(message.key))]
    return actions
