"""A simulated swarm: PeerCores, links, a table and compute under one clock; every event checked, nothing by chance.

Invariants after each event: those of the core. At the end: every microbatch that a living originator fetched is
finished exactly once with a loss, no relay holds anything, no stash is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from peer.simulator.clock import Clock
from peer.simulator.compute import CostCompute
from peer.simulator.member import Member
from peer.simulator.network import SMALL_BYTES, LinkSettings, Network
from peer.simulator.report import Books, Chronicle, InvariantBroken, Report, Tell
from peer.simulator.table import Sides, Table
from protocols.actions import Action, MicrobatchFinished
from protocols.errors import ConfigError
from protocols.events import (
    Event,
    LeaveRequested,
    MessageReceived,
    PauseRequested,
    ResumeRequested,
    SendFailed,
)
from protocols.messages import Message, TensorPacket
from protocols.run_spec import ModelSpec, RunSpec
from protocols.swarm import PeerId

STAGES_MAX = 26  # peers are named by the letter of their stage
SETTLE_S = 1.0
SECONDS_MAX = 1_800.0
Pack = Callable[[Message, PeerId, PeerId], Message]


def tiny_spec(num_stages: int, **changes: object) -> RunSpec:
    """A RunSpec whose tensors are as small as the rules allow; `changes` are top-level fields.

    Paths are chosen singly unless asked for: planning takes longer than all else that such a swarm does.
    """
    model = ModelSpec(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=num_stages - 1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8,
    )  # fmt: skip
    rounds = {"rows": 1, "seq_len": 4, "total_rounds": 100_000, "eval_every": 0}
    fields = {"name": "simulated", "num_stages": num_stages, "model": model, **changes}
    fields["rounds"] = {**rounds, **changes.get("rounds", {})}  # type: ignore[dict-item]
    fields["paths"] = {"planned": False, **changes.get("paths", {})}  # type: ignore[dict-item]
    return RunSpec.model_validate(fields)


class Watcher(Protocol):
    """Looks on from outside: sees what no peer can see."""

    def happened(self, now: float, member: Member, actions: Sequence[Action]) -> None:
        """A member has handled an event."""

    def befell(self, now: float, member: Member) -> None:
        """A member has died, left, been stopped or resumed."""

    def split(self, now: float, sides: Sides | None) -> None:
        """The swarm is split, or (None) whole again."""


class Simulation:
    """Build it, say what shall happen and when, `run` it once."""

    def __init__(
        self,
        spec: RunSpec,
        layout: Mapping[int, int],
        seed: int,
        *,
        encode: bool = True,
        check: bool = True,
        tell: Tell = Tell.NOTHING,
        links: LinkSettings | None = None,
        make_compute: type[CostCompute] = CostCompute,
        reading_s: float = 0.0,
        watcher: Watcher | None = None,
    ) -> None:
        """`reading_s`: views of the table are no older; many peers then share one. `watcher` sees what is true."""
        if max(layout) >= STAGES_MAX:
            raise ConfigError(f"a simulated swarm has at most {STAGES_MAX} stages")
        self.spec = spec
        self.seed = seed
        self.make_compute = make_compute
        self.clock = Clock()
        links = links or LinkSettings()
        self.table = Table(self.clock, spec, seed, loss_share=links.loss_share, reading_s=reading_s)
        self.network = Network(self.clock, seed, links, deliver=self._deliver, fail=self._on_send_failed)
        self.books = Books()
        self.chronicle = Chronicle(tell)
        self.members: dict[PeerId, Member] = {}
        self._num_joined: dict[str, int] = {}
        self._check = check
        self._watcher = watcher
        self._is_closing = False
        self._pack = _packer(spec) if encode else None
        for stage, replicas in sorted(layout.items()):
            for _ in range(replicas):
                self._add(stage).start()

    # ---- what shall happen ----

    def kill(self, who: PeerId | int, at: float) -> None:
        """SIGKILL to a peer, or to every replica that a stage has by then."""
        self.clock.at(at, self._each, who, self._kill)

    def stop(self, who: PeerId, at: float) -> None:
        """SIGSTOP."""
        self.clock.at(at, self._each, who, self._stop)

    def resume(self, who: PeerId, at: float) -> None:
        """SIGCONT."""
        self.clock.at(at, self._each, who, self._resume)

    def join(self, stage: int | None, at: float) -> None:
        self.clock.at(at, self._join, stage)

    def leave(self, who: PeerId, at: float) -> None:
        self.clock.at(at, self._ask, who, "leaves", LeaveRequested())

    def pause(self, who: PeerId, at: float) -> None:
        """As from the control plane: begins no round."""
        self.clock.at(at, self._ask, who, "is paused", PauseRequested())

    def go_on(self, who: PeerId, at: float) -> None:
        self.clock.at(at, self._ask, who, "goes on", ResumeRequested())

    def cut(self, one: PeerId, other: PeerId, at: float, heal_at: float) -> None:
        self.clock.at(at, self._cut, one, other)
        self.clock.at(heal_at, self._heal, one, other)

    def split(self, sides: Sides, at: float, heal_at: float) -> None:
        """Links and table are cut in two: `sides` says who is where."""
        self.clock.at(at, self._split, sides)
        self.clock.at(heal_at, self._split, None)

    def slow(self, who: PeerId, factor: float, at: float) -> None:
        self.clock.at(at, self._slow, who, factor)

    # ---- running ----

    def go_on_until(self, until_s: float) -> Report:
        """Without an end: what is open stays open, so `leaked` says nothing yet."""
        self._go(lambda: False, until_s)
        return self._report()

    def run(self, *, until_microbatches: int | None = None, until_s: float = SECONDS_MAX) -> Report:
        """Go on until so many are trained (or until then), let the originators finish, look for leaks."""
        wanted = math.inf if until_microbatches is None else until_microbatches
        self._go(lambda: self.books.finished >= wanted, until_s)
        self._is_closing = True
        for member in self._living():
            member.post(PauseRequested())
        rest_s = self.spec.liveness.lease_s * self.spec.rounds.attempts_max
        self._go(self._is_quiet, self.clock.now + rest_s)
        self._go(lambda: False, self.clock.now + SETTLE_S)
        return self._report()

    def _go(self, is_over: Callable[[], bool], until_s: float) -> None:
        clock = self.clock
        while not is_over() and (next_s := clock.next_s()) is not None and next_s <= until_s:
            clock.step()

    def _is_quiet(self) -> bool:
        return not any(self._num_held(member) for member in self._living())

    def _num_held(self, member: Member) -> int:
        relay = member.core.relay
        open_here = self.books.open_of(member.peer)
        return relay.num_stashes + relay.num_waiting + len(open_here) + len(member.compute.stashes)

    def _living(self) -> Sequence[Member]:
        return [member for member in self.members.values() if member.is_alive and not member.is_stopped]

    def _num_stray(self, member: Member) -> int:
        """Stashes of nothing that is still open here."""
        open_here = self.books.open_of(member.peer)
        mine = [key for key in member.compute.stashes if key.originator == member.peer]
        return len(member.compute.stashes) - sum(key.counter in open_here for key in mine)

    def _report(self) -> Report:
        living = self._living()
        relays = [member.core.relay for member in living]
        open_now = sum(len(self.books.open_of(member.peer)) for member in self.members.values())
        open_here = sum(len(self.books.open_of(member.peer)) for member in living)
        held = sum(member.num_held for member in living)
        return Report(
            seed=self.seed,
            finished=self.books.finished,
            lost=self.books.given_up + open_here - held,
            leaked=sum(relay.num_stashes + relay.num_waiting for relay in relays)
            + sum(self._num_stray(member) for member in living),
            held=held,
            orphaned=open_now - open_here,
            skipped=self.books.skipped,
            events=self.chronicle.events,
            seconds=self.clock.now,
            rounds=max((member.core.ledger.round for member in living), default=0),
            digest=self.chronicle.digest,
            counters=dict(self.chronicle.counters),
            story=tuple(self.chronicle.story),
        )

    # ---- what the members do ----

    def saw(self, member: Member, event: Event, actions: Sequence[Action]) -> None:
        now = self.clock.now
        self.chronicle.happened(now, member.peer, event)
        self.chronicle.decided(now, member.peer, actions)
        if self._watcher is not None:
            self._watcher.happened(now, member, actions)
        if self._check:
            try:
                member.core.check_invariants(0.0 if member.is_late else now)
            except AssertionError as error:
                raise InvariantBroken(
                    f"seed {self.seed} at {now:.3f} s: {member.peer}, after {event!r}: {error}"
                ) from error

    def transmit(self, sender: PeerId, to: PeerId, message: Message) -> None:
        packet: TensorPacket | None = getattr(message, "packet", None)
        num_bytes = SMALL_BYTES + (packet.num_bytes if packet is not None else 0)
        if self._pack is not None:
            message = self._pack(message, sender, to)
        self.network.send(sender, to, message, num_bytes)

    def finished(self, action: MicrobatchFinished) -> None:
        self.books.over(action, self.spec.num_stages - self.spec.path_stages)

    def left(self, member: Member) -> None:
        self.chronicle.weather(self.clock.now, f"{member.peer} is gone")
        self._end(member)

    def _deliver(self, to: PeerId, sender: PeerId, message: Message) -> None:
        self.members[to].post(MessageReceived(sender=sender, message=message))

    def _on_send_failed(self, sender: PeerId, to: PeerId, message: Message | None) -> None:
        self.members[sender].post(SendFailed(peer=to, message=message))

    # ---- weather ----

    def _add(self, stage: int | None) -> Member:
        letter = "j" if stage is None else chr(ord("a") + stage)
        self._num_joined[letter] = self._num_joined.get(letter, 0) + 1
        member = Member(self, f"{letter}{self._num_joined[letter]}", stage)
        self.members[member.peer] = member
        return member

    def _each(self, who: PeerId | int, do: Callable[[Member], None]) -> None:
        for member in list(self.members.values()):
            if member.is_alive and who in (member.peer, member.core.stage):
                do(member)

    def _kill(self, member: Member) -> None:
        self.chronicle.weather(self.clock.now, f"kill {member.peer}")
        self._end(member)

    def _end(self, member: Member) -> None:
        member.die()
        self.network.kill(member.peer)
        self._befell(member)

    def _stop(self, member: Member) -> None:
        self.chronicle.weather(self.clock.now, f"stop {member.peer}")
        member.is_stopped = True
        self.network.stop(member.peer)
        self._befell(member)

    def _resume(self, member: Member) -> None:
        self.chronicle.weather(self.clock.now, f"resume {member.peer}")
        member.resume()
        self.network.resume(member.peer)
        self._befell(member)

    def _befell(self, member: Member) -> None:
        if self._watcher is not None:
            self._watcher.befell(self.clock.now, member)

    def _split(self, sides: Sides | None) -> None:
        self.chronicle.weather(
            self.clock.now, "the swarm is whole again" if sides is None else "the swarm is split"
        )
        self.network.split(sides)
        if sides is None:
            self.table.heal()
        else:
            self.table.split(sides)
        if self._watcher is not None:
            self._watcher.split(self.clock.now, sides)

    def _join(self, stage: int | None) -> None:
        if self._is_closing:
            return
        member = self._add(stage)
        self.chronicle.weather(self.clock.now, f"{member.peer} joins")
        member.start()

    def _ask(self, who: PeerId, does: str, request: Event) -> None:
        self.chronicle.weather(self.clock.now, f"{who} {does}")
        self.members[who].post(request)

    def _cut(self, one: PeerId, other: PeerId) -> None:
        self.chronicle.weather(self.clock.now, f"cut {one} from {other}")
        self.network.cut(one, other)

    def _heal(self, one: PeerId, other: PeerId) -> None:
        self.chronicle.weather(self.clock.now, f"heal {one} and {other}")
        self.network.heal(one, other)

    def _slow(self, who: PeerId, factor: float) -> None:
        self.chronicle.weather(self.clock.now, f"{who} is {factor:g} x slower")
        self.members[who].compute.slowness = factor


def _packer(spec: RunSpec) -> Pack:
    """Each message through its bytes and the receiver's checks; imports torch, which finiteness is checked with."""
    from protocols.admission import WireLimits, admit
    from protocols.wire import encode

    limits = WireLimits.of(spec)
    run_id = limits.run_id

    def pack(message: Message, sender: PeerId, receiver: PeerId) -> Message:
        header, data = encode(message, run_id=run_id)
        return admit(header, data, sender=sender, me=receiver, limits=limits)

    return pack
