"""NoLoCo's conversation: when to average, with whom, and what to do when the partner does not answer.

    TRAINING -H inner steps-> OFFERED -offer of the partner-> PREPARING -half ready-> EXCHANGING
    EXCHANGING -his half and his accept-> APPLYING -> TRAINING, or OFFERED to the partner of the second pair round
    OFFERED, the partner declines or is lost -> OFFERED to the reserve, the replica that has no partner this time
    no partner, decline, deadline, lost partner, next outer step due -> APPLYING alone -> TRAINING

Commit both or neither: a half is applied only after both sides have said that they hold the other's. Training goes on
meanwhile (the snapshot is averaged, later progress is kept). Never blocks: everything has a deadline. Views may differ:
the offers, which both sides must have made, are the proof that both mean each other. NoLoCo section 3.2.
"""

from __future__ import annotations

from enum import Enum

from protocols.actions import (
    FOLLOWS,
    Action,
    Count,
    OuterFinished,
    PrepareOuter,
    RunOuterStep,
    Send,
)
from protocols.costs import transfer_s
from protocols.events import OuterPrepared, OuterStepDone
from protocols.messages import OuterAccept, OuterExchange, OuterOffer
from protocols.pairing import partners
from protocols.run_spec import RunSpec
from protocols.swarm import PeerId, PeerInfo, SwarmView
from protocols.timers import Timers

OFFERS_MAX = 64  # remembered offers of partners that are ahead of us
SLOW_FACTOR = 3.0  # a half may take so much longer than the measured rates say
UNEQUAL_MAX = 4.0  # one partner's microbatches count at most so many times the other's, whatever is claimed


class OuterState(Enum):
    TRAINING = "training"
    OFFERED = "offered"
    PREPARING = "preparing"
    EXCHANGING = "exchanging"
    APPLYING = "applying"


_TALKING = (OuterState.OFFERED, OuterState.PREPARING, OuterState.EXCHANGING)


class OuterSync:
    """One conversation at a time. Invariant: while it talks it has a deadline; EXCHANGING has a partner and a half."""

    def __init__(self, me: PeerId, spec: RunSpec, stage: int, outer_step: int = 0) -> None:
        self._me = me
        self._spec = spec
        self._stage = stage
        self.state = OuterState.TRAINING
        self._step = (outer_step, 0)  # outer step and pair round of the last or current conversation
        self._partner: PeerInfo | None = None
        self._reserve: PeerInfo | None = None  # whom to turn to when the partner fails
        self._half: OuterExchange | None = None
        self._partner_half: OuterExchange | None = None
        self._acknowledged = self._accepted = False
        self._leads = (
            False  # the partner has trained on nothing: it takes our weights, and we take none of its
        )
        self._offers: dict[PeerId, OuterOffer] = {}
        self._timers: Timers[str] = Timers()
        self._pending: int | None = None  # an outer step that fell due while the last one was under way
        self._microbatches = 0  # trained since the start
        self._averaged_at: dict[int, int] = {}  # how many of them when a fragment was averaged last
        self._due_s = 0.0

    @property
    def outer_step(self) -> int:
        return self._step[0]

    def next_deadline(self) -> float | None:
        return self._timers.next()

    # ---- due ----

    def on_inner_step(self, round_: int, microbatches: int, view: SwarmView, now: float) -> list[Action]:
        """`round_` inner steps are done, the last one on so many microbatches: is an outer step due?"""
        self._microbatches += microbatches
        if round_ % self._spec.outer.inner_steps:
            return []
        outer_step = round_ // self._spec.outer.inner_steps
        if self.state is OuterState.TRAINING:
            self._due_s = now
            return self._begin((outer_step, 0), view, now)
        self._pending = outer_step
        return self._end("next outer step is due", view, now) if self.state in _TALKING else []

    def _begin(self, step: tuple[int, int], view: SwarmView, now: float) -> list[Action]:
        self._step = step
        self._partner = self._reserve = self._half = self._partner_half = None
        self._acknowledged = self._accepted = False
        oldest = step[0] - 1 - self._spec.outer.spread_max  # who is further behind sleeps, or is paused
        replicas = {
            info.peer: info
            for info in view.replicas(self._stage)
            if info.outer_step >= oldest or info.peer == self._me
        }
        outer = self._spec.outer
        pairs = partners(
            {*replicas, self._me}, outer_step=step[0], stage=self._stage, fragment=outer.fragment(step[0]),
            pair_round=step[1], rounds=outer.rounds, seed=self._spec.seed, schedule=outer.schedule,
        )  # fmt: skip
        spare = [peer for peer in replicas if peer not in pairs and peer != self._me]
        self._reserve = replicas[spare[0]] if spare and not step[1] else None
        if self._me in pairs:
            return [*self._offer_to(replicas[pairs[self._me]], now), *self._decline_others()]
        if not pairs or step[1]:  # alone in the stage, or without a second round this time
            return [*self._end("", view, now), *self._decline_others()]
        self.state = OuterState.OFFERED  # the reserve: somebody's partner may fail
        self._timers.set("partner", now + self._spec.liveness.exchange_s)
        return self._meet(view, now)

    def _offer_to(self, partner: PeerInfo, now: float) -> list[Action]:
        self.state = OuterState.OFFERED
        self._partner, self._partner_half = partner, None
        self._timers.set("partner", now + self._spec.liveness.exchange_s)
        outer_step, pair_round = self._step
        offer = OuterOffer(
            stage=self._stage, outer_step=outer_step, pair_round=pair_round, microbatches=self._trained()
        )
        return [Send(to=partner.peer, message=offer), *self._prepare()]

    def _trained(self) -> int:
        """Microbatches behind what is to be averaged."""
        return self._microbatches - self._averaged_at.get(self._spec.outer.fragment(self.outer_step), 0)

    # ---- offers ----

    def on_offer(self, sender: PeerId, offer: OuterOffer, view: SwarmView, now: float) -> list[Action]:
        step = (offer.outer_step, offer.pair_round)
        if offer.stage != self._stage or step < self._step or self._is_taken(sender, step):
            return [self._decline(sender, offer)]
        if sender in self._offers or len(self._offers) < OFFERS_MAX:
            self._offers[sender] = offer
        return self._meet(view, now)

    def _is_taken(self, sender: PeerId, step: tuple[int, int]) -> bool:
        """At the current step: is it over already, or spoken for?"""
        if step != self._step:
            return False
        if self.state not in _TALKING:
            return True
        return self._partner is not None and sender != self._partner.peer

    def _decline(self, peer: PeerId, to: OuterOffer | OuterExchange) -> Send:
        refusal = OuterAccept(stage=to.stage, outer_step=to.outer_step, pair_round=to.pair_round, ok=False)
        return Send(to=peer, message=refusal)

    def _decline_others(self) -> list[Action]:
        """Whoever took us for its partner has another view: it shall not wait for us."""
        mine = self._partner.peer if self._partner is not None else None
        others = {peer: offer for peer, offer in self._offers.items() if peer != mine and self._is_now(offer)}
        for peer in others:
            del self._offers[peer]
        return [self._decline(peer, offer) for peer, offer in others.items()]

    def _is_now(self, message: OuterOffer | OuterExchange | OuterAccept) -> bool:
        return (message.outer_step, message.pair_round) == self._step and message.stage == self._stage

    def _meet(self, view: SwarmView, now: float) -> list[Action]:
        """The partner's offer may have come; the reserve takes the first that comes."""
        for peer, offer in list(self._offers.items()):
            if (offer.outer_step, offer.pair_round) < self._step:
                del self._offers[peer]  # of a step that is over
        if self.state is OuterState.OFFERED and self._partner is None:
            asking = [view.get(peer) for peer, offer in self._offers.items() if self._is_now(offer)]
            first = next((info for info in asking if info is not None), None)
            return [] if first is None else [*self._offer_to(first, now), *self._decline_others()]
        return self._prepare()

    def _prepare(self) -> list[Action]:
        """Both have offered the same step: make the half."""
        offer = self._offers.get(self._partner.peer) if self._partner is not None else None
        if self.state is not OuterState.OFFERED or offer is None or not self._is_now(offer):
            return []
        self.state = OuterState.PREPARING
        outer_step, pair_round = self._step
        own, other = self._trained(), offer.microbatches
        self._leads = pair_round == 0 and other == 0 < own
        weight = FOLLOWS if pair_round == 0 and own == 0 < other else _weight(own, other)
        return [PrepareOuter(outer_step=outer_step, pair_round=pair_round, weight=weight)]

    # ---- halves ----

    def on_prepared(self, event: OuterPrepared, view: SwarmView, now: float) -> list[Action]:
        if self.state is not OuterState.PREPARING or (event.outer_step, event.pair_round) != self._step:
            return []
        assert self._partner is not None, "PREPARING without a partner"
        self.state = OuterState.EXCHANGING
        self._half = OuterExchange(
            stage=self._stage, outer_step=event.outer_step, pair_round=event.pair_round,
            schema=event.schema, packet=event.packet,
        )  # fmt: skip
        me = view.get(self._me)
        both_s = transfer_s(me, self._partner, event.packet.num_bytes) if me is not None else 0.0
        self._timers.set("partner", now + self._spec.liveness.exchange_s + SLOW_FACTOR * both_s)
        return [Send(to=self._partner.peer, message=self._half), *self._acknowledge(view, now)]

    def on_exchange(
        self, sender: PeerId, message: OuterExchange, view: SwarmView, now: float
    ) -> list[Action]:
        """His half. It may come before his offer was seen (other lane), but never from a stranger."""
        if not self._is_partner(sender) or not self._is_now(message):
            return [self._decline(sender, message)]
        self._partner_half = message
        return self._acknowledge(view, now)

    def _acknowledge(self, view: SwarmView, now: float) -> list[Action]:
        """Say that his half is here, once there is an own one to hold it against."""
        own, his = self._half, self._partner_half
        if self.state is not OuterState.EXCHANGING or own is None or his is None or self._acknowledged:
            return []
        assert self._partner is not None, "EXCHANGING without a partner"
        same_form = (his.packet.shape, his.packet.codec) == (own.packet.shape, own.packet.codec)
        if his.schema != own.schema or not same_form:
            what = "half of another shape" if his.schema == own.schema else "half of another schema"
            alone = self._end(f"{self._partner.peer[-6:]} sent a {what}", view, now)
            return [self._decline(self._partner.peer, his), *alone]
        self._acknowledged = True
        held = OuterAccept(stage=self._stage, outer_step=his.outer_step, pair_round=his.pair_round, ok=True)
        return [Send(to=self._partner.peer, message=held), *self._commit()]

    def on_accept(self, sender: PeerId, message: OuterAccept, view: SwarmView, now: float) -> list[Action]:
        if not self._is_partner(sender) or not self._is_now(message):
            return []
        if not message.ok:
            return self._give_up(f"{sender[-6:]} declined", view, now)
        self._accepted = True
        return self._commit()

    def _is_partner(self, sender: PeerId) -> bool:
        return self.state in _TALKING and self._partner is not None and sender == self._partner.peer

    def _commit(self) -> list[Action]:
        if not (self._accepted and self._acknowledged) or self._partner_half is None:
            return []
        return self._apply(None if self._leads else self._partner_half)

    # ---- the end of a conversation ----

    def _give_up(self, why: str, view: SwarmView, now: float) -> list[Action]:
        """The partner fails: the reserve, if nothing has been exchanged yet; else alone."""
        reserve, self._reserve = self._reserve, None
        if self.state is OuterState.OFFERED and self._partner is not None and reserve is not None:
            self._offers.pop(self._partner.peer, None)
            second = Count(name="outer-second-choice", detail=f"{reserve.peer[-6:]}: {why}")
            return [second, *self._offer_to(reserve, now)]
        return self._end(why, view, now)

    def _end(self, why_alone: str, view: SwarmView, now: float) -> list[Action]:
        """Without a partner: alone, or in the second pair round not at all."""
        alone = [Count(name="outer-step-alone", detail=why_alone, notable=True)] if why_alone else []
        if self._step[1] == 0:
            return [*alone, *self._apply(None)]
        self._timers.clear("partner")
        return [*alone, *self._next(view, now)]

    def _apply(self, half: OuterExchange | None) -> list[Action]:
        self.state = OuterState.APPLYING
        self._timers.clear("partner")
        if self._partner is not None:
            self._offers.pop(self._partner.peer, None)
        outer_step, pair_round = self._step
        self._averaged_at[self._spec.outer.fragment(outer_step)] = self._microbatches
        packet = half.packet if half is not None else None
        return [RunOuterStep(outer_step=outer_step, pair_round=pair_round, packet=packet)]

    def on_done(self, event: OuterStepDone, view: SwarmView, now: float) -> list[Action]:
        """Applied; another pair round or step may follow."""
        if self.state is not OuterState.APPLYING:
            return []
        told = OuterFinished(
            outer_step=event.outer_step, with_partner=event.with_partner, apart=event.apart,
            cosine=event.cosine, waited_s=now - self._due_s,
        )  # fmt: skip
        return [told, *self._next(view, now)]

    def _next(self, view: SwarmView, now: float) -> list[Action]:
        self.state = OuterState.TRAINING
        pending, self._pending = self._pending, None
        if pending is not None:
            self._due_s = now
            return self._begin((pending, 0), view, now)
        outer_step, pair_round = self._step
        if pair_round + 1 < self._spec.outer.rounds:
            return self._begin((outer_step, pair_round + 1), view, now)
        return []

    def on_peer_lost(self, peer: PeerId, view: SwarmView, now: float) -> list[Action]:
        self._offers.pop(peer, None)
        if self._reserve is not None and self._reserve.peer == peer:
            self._reserve = None
        return self._give_up(f"partner {peer[-6:]} lost", view, now) if self._is_partner(peer) else []

    def on_deadline(self, view: SwarmView, now: float) -> list[Action]:
        if not self._timers.pop_due(now):
            return []
        if self._partner is None:
            return self._end("", view, now)  # nobody needed the reserve
        return self._give_up(f"partner {self._partner.peer[-6:]} silent", view, now)

    def on_failed(self, view: SwarmView, now: float) -> list[Action]:
        """Our own compute could not prepare or apply: skip this outer step."""
        if self.state not in (OuterState.PREPARING, OuterState.APPLYING):
            return []
        self._timers.clear("partner")
        return self._next(view, now)

    def check_invariants(self) -> None:
        talking = self.state in _TALKING
        assert talking == ("partner" in self._timers), "a conversation without a deadline, or the reverse"
        exchanging = self.state is OuterState.EXCHANGING
        assert not exchanging or (self._partner and self._half), "an exchange with nobody"


def _weight(own: int, other: int) -> float:
    """Of the own outer gradient: 2 w_i / (w_i + w_j), the same ratio on both sides. `noloco.token_weight`."""
    if not own or not other:
        return 1.0
    return 2 / (1 + min(max(other / own, 1 / UNEQUAL_MAX), UNEQUAL_MAX))
