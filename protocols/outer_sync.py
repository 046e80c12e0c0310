"""NoLoCo's conversation: when to average, with whom, and what to do when the partner does not answer.

    TRAINING -H inner steps-> PREPARING -half ready-> OFFERED -offer of the partner-> EXCHANGING
    EXCHANGING -his half and his accept-> APPLYING -> TRAINING
    no partner, decline, deadline, lost partner, next outer step due -> APPLYING alone -> TRAINING

Commit both or neither: a half is applied only after both sides have said that they hold the other's. Training goes on
meanwhile (the snapshot is averaged, later progress is kept). Never blocks: everything has a deadline. NoLoCo section
3.2.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from enum import Enum

from protocols.actions import (
    Action,
    Count,
    PrepareOuter,
    RunOuterStep,
    Send,
)
from protocols.events import OuterPrepared
from protocols.messages import OuterAccept, OuterExchange, OuterOffer, TensorPacket
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, SwarmView
from protocols.timers import Timers

OFFERS_MAX = 64  # remembered offers of partners that are ahead of us


class OuterState(Enum):
    TRAINING = "training"
    PREPARING = "preparing"
    OFFERED = "offered"
    EXCHANGING = "exchanging"
    APPLYING = "applying"


def partner(replicas: Iterable[PeerId], outer_step: int, stage: int, seed: int, me: PeerId) -> PeerId | None:
    """The replica that `me` averages with at `outer_step`; None when it sits out.

    Every replica computes this alone and must agree: sort first, one shuffle seeded by (seed, stage, outer_step),
    neighbours pair up. An odd one out sits out. NoLoCo, section 3.2.
    """
    ordered = sorted(set(replicas) | {me})
    digest = hashlib.sha256(f"{seed}/{stage}/{outer_step}".encode()).digest()
    random.Random(digest).shuffle(ordered)
    mine = ordered.index(me) ^ 1
    return ordered[mine] if mine < len(ordered) else None


class OuterSync:
    """One conversation at a time. Invariant: OFFERED and EXCHANGING have a partner, a half and a deadline."""

    def __init__(self, me: PeerId, spec: RunSpec, stage: int) -> None:
        self._me = me
        self._spec = spec
        self._stage = stage
        self.state = OuterState.TRAINING
        self.outer_step = 0  # of the last or current conversation
        self._partner: PeerId | None = None
        self._half: TensorPacket | None = None
        self._partner_half: TensorPacket | None = None
        self._schema = ""
        self._accepted = False
        self._offers: dict[PeerId, OuterOffer] = {}
        self._timers: Timers[str] = Timers()
        self._pending: int | None = None  # an outer step that fell due while the last one was being applied

    def next_deadline(self) -> float | None:
        return self._timers.next()

    def on_inner_step(self, round_: int) -> list[Action]:
        """`round_` inner steps are done: is an outer step due?"""
        if round_ % self._spec.outer.inner_steps:
            return []
        outer_step = round_ // self._spec.outer.inner_steps
        if self.state is OuterState.TRAINING:
            return self._prepare(outer_step)
        self._pending = outer_step
        if self.state in (OuterState.OFFERED, OuterState.EXCHANGING):
            return self._apply(None, "next outer step is due")
        return []

    def _prepare(self, outer_step: int) -> list[Action]:
        self.outer_step = outer_step
        self.state = OuterState.PREPARING
        self._partner = self._half = self._partner_half = None
        self._accepted = False
        return [PrepareOuter(outer_step=outer_step)]

    def on_prepared(self, event: OuterPrepared, view: SwarmView, now: float) -> list[Action]:
        if self.state is not OuterState.PREPARING or event.outer_step != self.outer_step:
            return []
        self._half = event.packet
        self._schema = event.schema
        oldest = (
            self.outer_step - 1 - self._spec.outer.spread_max
        )  # who is further behind sleeps, or is paused
        replicas = [info.peer for info in view.replicas(self._stage) if info.outer_step >= oldest]
        self._partner = partner(replicas, self.outer_step, self._stage, self._spec.seed, self._me)
        if self._partner is None:
            alone = self._apply(None, "no partner this time" if len(replicas) > 1 else "")
            return [*alone, *self._decline_others()]
        self.state = OuterState.OFFERED
        self._timers.set("partner", now + self._spec.liveness.exchange_s)
        offer = OuterOffer(stage=self._stage, outer_step=self.outer_step, schema=self._schema)
        return [Send(to=self._partner, message=offer), *self._meet(), *self._decline_others()]

    def on_offer(self, sender: PeerId, offer: OuterOffer) -> list[Action]:
        same_stage = offer.stage == self._stage
        if not same_stage or offer.outer_step < self.outer_step or self._is_taken(sender, offer.outer_step):
            return [self._decline(sender, offer)]
        if sender in self._offers or len(self._offers) < OFFERS_MAX:
            self._offers[sender] = offer
        return self._meet()

    def _is_taken(self, sender: PeerId, outer_step: int) -> bool:
        """At the current step: is it over already, or spoken for?"""
        if outer_step != self.outer_step or self.state is OuterState.PREPARING:
            return False
        return self.state in (OuterState.TRAINING, OuterState.APPLYING) or sender != self._partner

    def _decline(self, sender: PeerId, offer: OuterOffer) -> Send:
        return Send(to=sender, message=OuterAccept(stage=offer.stage, outer_step=offer.outer_step, ok=False))

    def _decline_others(self) -> list[Action]:
        """Whoever took us for its partner has another view: it shall not wait for us."""
        others = {
            peer: offer
            for peer, offer in self._offers.items()
            if peer != self._partner and offer.outer_step == self.outer_step
        }
        for peer in others:
            del self._offers[peer]
        return [self._decline(peer, offer) for peer, offer in others.items()]

    def _meet(self) -> list[Action]:
        """Both have offered the same step: send the half. Offers for a step that is over are dropped here."""
        for peer in [p for p, offer in self._offers.items() if offer.outer_step < self.outer_step]:
            del self._offers[peer]
        offer = self._offers.get(self._partner) if self._partner is not None else None
        if self.state is not OuterState.OFFERED or offer is None or offer.outer_step != self.outer_step:
            return []
        assert self._partner is not None, "OFFERED without a partner"
        assert self._half is not None, "OFFERED without a half"
        if offer.schema != self._schema:
            return self._apply(None, f"{self._partner[-6:]} has another schema")
        self.state = OuterState.EXCHANGING
        half = OuterExchange(stage=self._stage, outer_step=self.outer_step, packet=self._half)
        return [Send(to=self._partner, message=half)]

    def on_exchange(self, sender: PeerId, message: OuterExchange) -> list[Action]:
        """His half. It may come before his offer was seen to match (other lane), but never from a stranger."""
        if not self._is_current(sender, message.stage, message.outer_step) or self._half is None:
            return [
                Send(
                    to=sender,
                    message=OuterAccept(stage=message.stage, outer_step=message.outer_step, ok=False),
                )
            ]
        if message.packet.shape != self._half.shape or message.packet.codec != self._half.codec:
            refuse = OuterAccept(stage=self._stage, outer_step=self.outer_step, ok=False)
            alone = self._apply(None, f"{sender[-6:]} sent a half of another shape")
            return [Send(to=sender, message=refuse), *alone]
        self._partner_half = message.packet
        accept = OuterAccept(stage=self._stage, outer_step=self.outer_step, ok=True)
        return [Send(to=sender, message=accept), *self._commit()]

    def on_accept(self, sender: PeerId, message: OuterAccept) -> list[Action]:
        if not self._is_current(sender, message.stage, message.outer_step):
            return []
        if not message.ok:
            return self._apply(None, f"{sender[-6:]} declined")
        self._accepted = True
        return self._commit()

    def _is_current(self, sender: PeerId, stage: int, outer_step: int) -> bool:
        talking = self.state in (OuterState.OFFERED, OuterState.EXCHANGING)
        return talking and sender == self._partner and stage == self._stage and outer_step == self.outer_step

    def _commit(self) -> list[Action]:
        both = self.state is OuterState.EXCHANGING and self._accepted and self._partner_half is not None
        return self._apply(self._partner_half, "") if both else []

    def _apply(self, packet: TensorPacket | None, why_alone: str) -> list[Action]:
        self.state = OuterState.APPLYING
        self._timers.clear("partner")
        self._offers.pop(self._partner or "", None)
        run = RunOuterStep(outer_step=self.outer_step, packet=packet)
        alone = [Count(name="outer-step-alone", detail=why_alone, notable=True)] if why_alone else []
        return [*alone, run]

    def on_done(self) -> list[Action]:
        """Applied; another step may have fallen due meanwhile."""
        self.state = OuterState.TRAINING
        self._partner = self._half = self._partner_half = None
        pending, self._pending = self._pending, None
        return [] if pending is None else self._prepare(pending)

    def on_peer_lost(self, peer: PeerId) -> list[Action]:
        self._offers.pop(peer, None)
        if peer == self._partner and self.state in (OuterState.OFFERED, OuterState.EXCHANGING):
            return self._apply(None, f"partner {peer[-6:]} lost")
        return []

    def on_deadline(self, now: float) -> list[Action]:
        if not self._timers.pop_due(now):
            return []
        return self._apply(None, f"partner {(self._partner or '')[-6:]} silent")

    def on_failed(self) -> list[Action]:
        """Our own compute could not prepare or apply: skip this outer step."""
        if self.state in (OuterState.PREPARING, OuterState.APPLYING):
            return self.on_done()
        return []

    def check_invariants(self) -> None:
        talking = self.state in (OuterState.OFFERED, OuterState.EXCHANGING)
        assert talking == ("partner" in self._timers), "a conversation without a deadline, or the reverse"
        assert not talking or (self._partner is not None and self._half is not None), (
            "a conversation with nobody"
        )
