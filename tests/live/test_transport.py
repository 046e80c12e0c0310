"""The transport over real libp2p daemons on loopback: honest peers, hostile peers, dead peers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest
from hivemind.p2p import P2P, PeerID

import peer.inbound
import peer.quota
import peer.transport
from peer.framing import PREFIX, FrameKind, pack_frame
from peer.outbound import GREETING, Lane
from peer.quota import REFUSALS_MAX
from peer.transport import MessageRefused, PeerUnreachable, Transport
from protocols.messages import (
    BoundaryActivation,
    Hop,
    Message,
    OuterExchange,
    RoundPlan,
    TensorPacket,
    Undeliverable,
    WorkKey,
)
from protocols.run_spec import PROTOCOL_VERSION, Codec, preset
from protocols.wire import encode, run_tag
from tests.peer.wires import chunk

NANO = preset("nano")
SPEC = NANO.model_copy(  # wide enough for an exchange of 8 MiB
    update={"model": NANO.model.model_copy(update={"vocab_size": 16384})}
)
SETTINGS = {"nat_port_map": False, "auto_nat": False, "startup_timeout": 60}
STREAM = f"{SPEC.run_id}/frames"
SOON_S = 5.0  # a kill is noticed in 0.2 s on an idle machine


@dataclass
class Talker:
    """A transport and all that it told us."""

    p2p: P2P
    transport: Transport = None  # type: ignore[assignment]
    heard: list[tuple[str, Message]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lost_one: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def peer_id(self) -> str:
        return self.p2p.peer_id.to_base58()

    def on_lost(self, peer_id: str) -> None:
        self.lost.append(peer_id)
        self.lost_one.set()

    def count(self, name: str, value: float) -> None:
        self.counts[name] += value

    async def begin(self) -> None:
        self.transport = await Transport.start(
            self.p2p,
            SPEC,
            on_message=lambda sender, message: self.heard.append((sender, message)),
            on_unreachable=self.on_lost,
            count=self.count,
        )


@asynccontextmanager
async def talkers(count: int) -> AsyncIterator[list[Talker]]:
    first = await P2P.create(**SETTINGS)
    known = await first.get_visible_maddrs()
    others = [await P2P.create(initial_peers=known, **SETTINGS) for _ in range(count - 1)]
    started = [Talker(p2p) for p2p in (first, *others)]
    try:
        for talker in started:
            await talker.begin()
        yield started
    finally:
        for talker in started:
            await talker.transport.close()
            await talker.p2p.shutdown()


def activation(sender: str, receiver: str, counter: int = 1) -> BoundaryActivation:
    numbers = np.random.default_rng(counter).integers(0, 127 << 7, np.prod(SPEC.boundary_shape), np.uint16)
    return BoundaryActivation(
        key=WorkKey(sender, counter, 1),
        round=1,
        path=(Hop(0, sender), Hop(1, receiver)),
        hop=1,
        train=True,
        packet=TensorPacket(
            dtype="float32", shape=SPEC.boundary_shape, codec=Codec.BF16, data=numbers.tobytes()
        ),
    )


def exchange(num_bytes: int, fill: float = 0.5) -> OuterExchange:
    numbers = np.full(num_bytes // 4, fill, np.float32)
    packet = TensorPacket(dtype="float32", shape=numbers.shape, codec=Codec.RAW, data=numbers.tobytes())
    return OuterExchange(stage=1, outer_step=1, pair_round=0, schema="s", packet=packet)


def test_tensors_of_all_sizes_arrive_as_they_were_sent():
    """From nothing to 8 MiB, on both lanes at once; a large one is checked in a thread."""

    async def story() -> None:
        async with talkers(2) as (one, two):
            sent = [
                chunk(0),
                chunk(1),
                activation(one.peer_id, two.peer_id),
                exchange(8 << 20),
                chunk(4 << 20),
            ]
            await asyncio.gather(*(one.transport.send(two.peer_id, message) for message in sent))
            assert Counter(type(m).__name__ for _, m in two.heard) == Counter(type(m).__name__ for m in sent)
            assert all(sender == one.peer_id and message in sent for sender, message in two.heard)
            assert await two.transport.ping(one.peer_id, SOON_S) > 0
            assert two.transport.link(one.peer_id).round_trip_s.value > 0
            with pytest.raises(MessageRefused, match="non-finite"):
                await one.transport.send(two.peer_id, exchange(8 << 20, fill=float("nan")))
            await one.transport.send(two.peer_id, exchange(4 << 20))
            assert one.transport.access().upload_bytes_per_s > 0
            assert two.transport.access().download_bytes_per_s > 0

    asyncio.run(story())


def test_messages_of_a_lane_arrive_in_the_order_of_the_calls():
    """A RoundPlan must not be overtaken by the activations that it announces, not even while dialling."""

    async def story() -> None:
        async with talkers(2) as (one, two):
            plans = [RoundPlan(round=number, keys=()) for number in range(200)]
            await asyncio.gather(*(one.transport.send(two.peer_id, plan) for plan in plans))
            assert [message for _, message in two.heard] == plans

    asyncio.run(story())


def test_a_flood_of_messages_is_slowed_and_none_is_lost(monkeypatch: pytest.MonkeyPatch):
    """More messages than its rate and burst allow: the sender waits, nobody is refused."""
    monkeypatch.setattr(peer.transport, "TOKENS_PER_S", 20.0)

    async def story() -> None:
        async with talkers(2) as (one, two):
            plans = [RoundPlan(round=number, keys=()) for number in range(200)]
            await asyncio.gather(*(one.transport.send(two.peer_id, plan) for plan in plans))
            assert [message for _, message in two.heard] == plans
            assert two.counts["slowed-seconds"] > 0

    asyncio.run(story())


def test_nonsense_is_refused_with_its_reason_and_then_ignored():
    """One bad message costs its sender that message; twenty in a minute cost it a minute; the third peer sees
    nothing of it."""

    async def story() -> None:
        async with talkers(3) as (honest, liar, victim):
            lie = Undeliverable(key=WorkKey("somebody", 1, 1), unreachable="nobody")
            with pytest.raises(MessageRefused) as refused:
                await liar.transport.send(victim.peer_id, lie)
            assert refused.value.reason == "wrong-receiver"
            await liar.transport.send(victim.peer_id, RoundPlan(round=1, keys=()))
            for _ in range(REFUSALS_MAX - 1):
                with pytest.raises(MessageRefused):
                    await liar.transport.send(victim.peer_id, lie)
            with pytest.raises((MessageRefused, PeerUnreachable)):
                await liar.transport.send(victim.peer_id, RoundPlan(round=2, keys=()))
            await honest.transport.send(victim.peer_id, RoundPlan(round=3, keys=()))
            assert [(s, m.round) for s, m in victim.heard] == [(liar.peer_id, 1), (honest.peer_id, 3)]
            assert victim.counts["refused.wrong-receiver"] == REFUSALS_MAX
            assert victim.lost == honest.lost == []  # the liar may find the stream cut before it reads why

    asyncio.run(story())


def hello(lane: Lane, tag: bytes = run_tag(SPEC.run_id)) -> bytes:
    return pack_frame(FrameKind.HELLO, lane=lane, header=GREETING.pack(PROTOCOL_VERSION, tag))


async def raw_stream(hostile: P2P, victim: Talker) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    _, reader, writer = await hostile.call_binary_stream_handler(PeerID.from_base58(victim.peer_id), STREAM)
    return reader, writer


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Kind and header of the next frame."""
    prefix = PREFIX.unpack(await asyncio.wait_for(reader.readexactly(PREFIX.size), SOON_S))
    return prefix[1], await reader.readexactly(prefix[4])


def test_hostile_streams_hurt_nobody_else(monkeypatch: pytest.MonkeyPatch):
    """Garbage, a wrong greeting, an announced exabyte, and half messages that never end; an honest peer goes on."""
    monkeypatch.setattr(peer.inbound, "TRICKLE_S", 1.0)

    async def story() -> None:
        async with talkers(2) as (honest, victim):
            hostile = await P2P.create(initial_peers=await victim.p2p.get_visible_maddrs(), **SETTINGS)
            writers = []
            try:
                cases = [
                    (b"GET / HTTP/1.1\r\n" * 10, b"bad-magic"),
                    (hello(Lane.DATA, b"x" * 16), b"other-run"),
                    (
                        pack_frame(FrameKind.HELLO, lane=9, header=hello(Lane.DATA)[PREFIX.size :]),
                        b"bad-lane",
                    ),
                ]
                for said, reason in cases:
                    reader, writer = await raw_stream(hostile, victim)
                    writers.append(writer)
                    writer.write(said)
                    assert await answer(reader) == (FrameKind.CLOSE, reason)

                reader, writer = await raw_stream(hostile, victim)
                writers.append(writer)
                writer.write(hello(Lane.BULK))
                assert (await answer(reader))[0] == FrameKind.WELCOME
                writer.write(pack_frame(FrameKind.MESSAGE, header=b"?", tensor_bytes=1 << 60))
                assert await answer(reader) == (FrameKind.CLOSE, b"tensor-too-long")

                reader, writer = await raw_stream(hostile, victim)  # stops in the middle of a tensor
                writers.append(writer)
                writer.write(hello(Lane.DATA))
                assert (await answer(reader))[0] == FrameKind.WELCOME
                header, data = encode(
                    activation(hostile.peer_id.to_base58(), victim.peer_id), run_id=SPEC.run_id
                )
                frame = pack_frame(FrameKind.MESSAGE, sequence=1, header=header, tensor_bytes=len(data))
                writer.write(frame + bytes(data[:1000]))

                for number in range(20):
                    await honest.transport.send(
                        victim.peer_id, activation(honest.peer_id, victim.peer_id, number)
                    )
                assert {sender for sender, _ in victim.heard} == {honest.peer_id}
                assert len(victim.heard) == 20
                assert await honest.transport.ping(victim.peer_id, SOON_S) < SOON_S
                assert await answer(reader) == (FrameKind.CLOSE, b"too-slow")
                assert victim.lost == []
            finally:
                for writer in writers:
                    writer.close()
                await hostile.shutdown()

    asyncio.run(story())


def test_goodbye_is_not_a_death():
    """A peer that leaves hangs up on purpose: nobody has to suspect it, and sending to it fails at once."""

    async def story() -> None:
        async with talkers(2) as (one, two):
            await one.transport.send(two.peer_id, RoundPlan(round=1, keys=()))
            await two.transport.send(one.peer_id, RoundPlan(round=1, keys=()))
            await two.transport.close()
            with pytest.raises(PeerUnreachable):
                await one.transport.send(two.peer_id, RoundPlan(round=2, keys=()))
            assert one.lost == two.lost == []
            with pytest.raises(PeerUnreachable):
                await two.transport.send(one.peer_id, RoundPlan(round=2, keys=()))

    asyncio.run(story())


def test_file_descriptors_do_not_grow_with_messages_or_failed_dials(monkeypatch: pytest.MonkeyPatch):
    """Weeks of training, and peers that come and go: one stream a lane, none left behind by a failed dial."""
    monkeypatch.setattr(peer.quota, "BACKOFF_FIRST_S", peer.quota.BACKOFF_MAX_S)

    async def story() -> None:
        async with talkers(2) as (one, two):
            gone = await P2P.create(**SETTINGS)
            gone_id = gone.peer_id.to_base58()
            await gone.shutdown()
            process = psutil.Process()
            await one.transport.send(two.peer_id, RoundPlan(round=0, keys=()))
            before = process.num_fds()
            for number in range(200):
                await one.transport.send(two.peer_id, RoundPlan(round=number, keys=()))
            for _ in range(3):
                with pytest.raises(PeerUnreachable) as failed:
                    await one.transport.send(gone_id, RoundPlan(round=1, keys=()))
                assert failed.value.is_gone
            assert one.counts["dial-failed"] == 1  # the others were not tried: it is too soon
            for _ in range(20):
                with pytest.raises(PeerUnreachable):
                    await one.transport._open_stream(gone_id)
            await asyncio.sleep(0)  # closed connections are closed in the loop's next turn
            assert process.num_fds() <= before + 1

    asyncio.run(story())


VICTIM = """
import asyncio, sys
from hivemind.p2p import P2P
from peer.transport import Transport
from protocols.run_spec import RunSpec

async def main():
    spec = RunSpec.from_json(sys.argv[1])
    p2p = await P2P.create(initial_peers=sys.argv[2:], nat_port_map=False, auto_nat=False, startup_timeout=60)
    await Transport.start(
        p2p, spec, on_message=lambda s, m: None, on_unreachable=lambda p: None, count=lambda n, v: None)
    print(p2p.peer_id.to_base58(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def victim_process(knows: Talker) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        VICTIM,
        SPEC.to_json(),
        *map(str, await knows.p2p.get_visible_maddrs()),
    ]
    root = Path(__file__).parents[2]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=root)
    try:
        assert process.stdout is not None
        peer_id = (await process.stdout.readline()).decode().strip()
        assert peer_id
        yield peer_id, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_a_frozen_peer_fails_pings_and_a_killed_one_is_noticed_at_once():
    """SIGSTOP: no stream breaks, only our own ping tells. SIGKILL: every send fails, and the loss is told once."""

    async def story() -> None:
        async with talkers(1) as (one,), victim_process(one) as (peer_id, process):
            await one.transport.send(peer_id, activation(one.peer_id, peer_id))
            await one.transport.ping(peer_id, 30.0)
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(PeerUnreachable, match="ping-timeout"):
                await one.transport.ping(peer_id, 0.5)
            in_flight = asyncio.ensure_future(one.transport.send(peer_id, activation(one.peer_id, peer_id)))
            await asyncio.sleep(0.1)  # under way
            assert not in_flight.done()
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(PeerUnreachable):
                await asyncio.wait_for(in_flight, SOON_S)
            await asyncio.wait_for(one.lost_one.wait(), SOON_S)
            with pytest.raises(PeerUnreachable):
                await asyncio.wait_for(one.transport.send(peer_id, RoundPlan(round=1, keys=())), SOON_S)
            assert one.lost == [peer_id]

    asyncio.run(story())


def test_the_death_of_an_idle_peer_is_noticed_with_nothing_under_way():
    """Nobody is sending: the streams that stand open break, and that is enough."""

    async def story() -> None:
        async with talkers(1) as (one,), victim_process(one) as (peer_id, process):
            await one.transport.ping(peer_id, 30.0)
            process.kill()
            await asyncio.wait_for(one.lost_one.wait(), SOON_S)
            assert one.lost == [peer_id]

    asyncio.run(story())
