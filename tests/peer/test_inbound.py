"""What a sender may do on its lane, and what becomes of the rest."""

from __future__ import annotations

import asyncio

import pytest

from peer.framing import FrameKind, pack_frame
from peer.inbound import THREAD_BYTES, TRICKLE_S
from peer.outbound import Lane
from peer.quota import Budget
from protocols.messages import OuterOffer, RoundPlan
from tests.peer.wires import LIMITS, Receiver, Told, chunk


async def begun(told: Told, budget: Budget | None = None, **where: object) -> Receiver:
    receiver = Receiver(told, budget or Budget(64 << 20), **where)  # type: ignore[arg-type]
    await receiver.begin()
    return receiver


async def some_turns() -> None:
    """Enough for bytes that lie in a socket to be read."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, THREAD_BYTES, THREAD_BYTES + 1])
def test_a_message_is_delivered_then_acknowledged(num_bytes):
    """Also one so large that its check runs in a thread."""

    async def story() -> None:
        told = Told()
        receiver = await begun(told)
        receiver.say(chunk(num_bytes), sequence=9)
        assert await receiver.answer() == (FrameKind.ACK, 9, b"")
        assert told.heard == [("a1", chunk(num_bytes))]
        receiver.lane.close("leaving")
        receiver.writer.close()

    asyncio.run(story())


def test_a_ping_is_answered():
    async def story() -> None:
        receiver = await begun(Told(), lane=Lane.PING)
        receiver.writer.write(pack_frame(FrameKind.PING, sequence=3))
        assert await receiver.answer() == (FrameKind.PONG, 3, b"")
        receiver.lane.close("leaving")
        receiver.writer.close()

    asyncio.run(story())


def test_a_message_on_the_wrong_lane_is_refused_and_its_tensor_skipped():
    """Boundary tensors must not wait behind whole stages because a sender mixes them."""

    async def story() -> None:
        told = Told()
        receiver = await begun(told, lane=Lane.DATA)
        receiver.say(chunk(100_000), sequence=1)
        assert await receiver.answer() == (FrameKind.REFUSED, 1, b"wrong-lane")
        receiver.say(OuterOffer(stage=1, outer_step=1, pair_round=0, microbatches=1), sequence=2)
        assert (await receiver.answer())[:2] == (FrameKind.ACK, 2)
        assert len(told.heard) == 1
        receiver.lane.close("leaving")
        receiver.writer.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (pack_frame(FrameKind.MESSAGE, tensor_bytes=LIMITS.tensor_bytes_max + 1), b"tensor-too-long"),
        (pack_frame(FrameKind.MESSAGE, tensor_bytes=(1 << 64) - 1), b"tensor-too-long"),
        (pack_frame(FrameKind.ACK), b"unexpected-frame"),
        (pack_frame(FrameKind.PING, tensor_bytes=1), b"unexpected-frame"),
        (b"x" * 64, b"bad-magic"),
    ],
)
def test_a_broken_frame_ends_the_lane_with_its_reason(frame, reason):
    """The stream cannot be trusted any more; the peer is not reported as lost, it is there and misbehaves."""

    async def story() -> None:
        told = Told()
        receiver = await begun(told)
        receiver.writer.write(frame)
        assert await receiver.answer() == (FrameKind.CLOSE, 0, reason)
        await receiver.lane.closed
        assert told.broken == []
        assert told.counts[f"refused.{reason.decode()}"] == 1
        receiver.writer.close()

    asyncio.run(story())


def test_who_waits_for_room_is_served_when_another_hangs_up():
    """A first peer announces a tensor, sends half and dies; a second waits for the room, and gets it."""

    async def story() -> None:
        told, budget = Told(), Budget(150_000)
        slow = await begun(told, budget, sender="a1")
        slow.say(chunk(100_000), upto=50_000)
        await slow.writer.drain()
        while budget.take(100_000):  # until the slow one's frame has come
            budget.give_back(100_000)
            await asyncio.sleep(0)
        other = await begun(told, budget, sender="a2")
        other.say(chunk(100_000, fill=9), sequence=5)
        await some_turns()
        assert told.heard == []
        slow.writer.close()
        assert await other.answer() == (FrameKind.ACK, 5, b"")
        assert told.heard == [("a2", chunk(100_000, fill=9))]
        assert told.broken == [("a1", "connection-closed")]
        assert budget.take(150_000), "all room was given back"
        other.lane.close("leaving")
        other.writer.close()

    asyncio.run(story())


def test_who_hangs_up_while_waiting_for_room_takes_none():
    async def story() -> None:
        told, budget = Told(), Budget(100_000)
        assert budget.take(100_000)
        receiver = await begun(told, budget)
        receiver.say(chunk(50_000))
        await some_turns()
        receiver.lane.close("leaving")
        budget.give_back(100_000)
        assert budget.take(100_000)
        receiver.writer.close()

    asyncio.run(story())


def test_a_trickle_is_cut_off_and_a_pause_between_messages_is_not():
    """Half a message that does not go on holds memory; a peer that has nothing to say holds none."""

    async def story() -> None:
        told = Told()
        receiver = await begun(told)
        now = asyncio.get_running_loop().time()
        receiver.lane.check(now)
        receiver.lane.check(now + 100 * TRICKLE_S)
        assert not receiver.lane.closed.done()
        receiver.say(chunk(100_000), upto=10)
        await some_turns()
        receiver.lane.check(now + 101 * TRICKLE_S)
        receiver.lane.check(now + 103 * TRICKLE_S)
        assert await receiver.answer() == (FrameKind.CLOSE, 0, b"too-slow")
        assert told.counts["refused.too-slow"] == 1
        receiver.writer.close()

    asyncio.run(story())


def test_a_sender_that_reads_no_answers_is_hung_up_on():
    """Answers that nobody takes must not pile up here."""

    async def story() -> None:
        told = Told()
        receiver = await begun(told, lane=Lane.DATA)
        receiver.lane._stream.pause_writing()  # as the socket does when its other end does not read
        for sequence in range(1100):
            receiver.say(RoundPlan(round=1, keys=()), sequence=sequence)
        await asyncio.wait_for(receiver.lane.closed, 20)
        assert told.counts["refused.answers-unread"] == 1
        receiver.writer.close()

    asyncio.run(story())
