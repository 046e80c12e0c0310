"""Each way in which a send can end."""

from __future__ import annotations

import asyncio

import pytest

from peer.framing import PREFIX, FrameKind
from peer.outbound import LEAVING, STALL_S, MessageRefused, PeerUnreachable
from tests.peer.wires import Sender


async def welcomed() -> tuple[Sender, asyncio.Future[None]]:
    """A lane that has just opened, its first frame (a ping) on the way."""
    sender = Sender()
    first = sender.lane.send(FrameKind.PING)
    await sender.hello()
    sender.answer(FrameKind.WELCOME)
    await sender.reader.readexactly(PREFIX.size)
    return sender, first


def test_an_answer_ends_the_send_that_it_names():
    """Two are under way; the second is answered first, the first is refused."""

    async def story() -> None:
        sender, first = await welcomed()
        second = sender.lane.send(FrameKind.PING)
        sender.answer(FrameKind.PONG, sequence=2)
        await second
        assert not first.done()
        sender.answer(FrameKind.REFUSED, sequence=1, header=b"wrong-shape")
        with pytest.raises(MessageRefused) as refused:
            await first
        assert refused.value.reason == "wrong-shape"
        sender.lane.close(LEAVING)
        sender.writer.close()

    asyncio.run(story())


def test_a_foreign_text_never_becomes_a_label():
    """A refusal's reason goes into counters and logs: anything but a short word is replaced."""

    async def story() -> None:
        sender, first = await welcomed()
        sender.answer(FrameKind.REFUSED, sequence=1, header=b"<script>\n")
        with pytest.raises(MessageRefused) as refused:
            await first
        assert refused.value.reason == "unspecified"
        sender.lane.close(LEAVING)
        sender.writer.close()

    asyncio.run(story())


def test_a_receiver_that_answers_nothing_is_given_up():
    """Its python is frozen while its daemon lives: nothing breaks, so the lack of progress must tell."""

    async def story() -> None:
        sender, first = await welcomed()
        now = asyncio.get_running_loop().time()
        sender.lane.check(now)
        sender.lane.check(now + STALL_S / 2)
        assert not first.done()
        sender.lane.check(now + 3 * STALL_S)
        with pytest.raises(PeerUnreachable, match="stalled"):
            await first
        assert sender.told.broken == [("b1", "stalled")]
        assert sender.lane.is_idle
        sender.writer.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("kind", "sequence"), [(FrameKind.ACK, 99), (FrameKind.MESSAGE, 1), (FrameKind.HELLO, 1)]
)
def test_an_answer_to_nothing_breaks_the_lane(kind, sequence):
    """A receiver that makes answers up is not to be believed in the others either."""

    async def story() -> None:
        sender, first = await welcomed()
        sender.answer(kind, sequence=sequence)
        with pytest.raises(PeerUnreachable):
            await first
        assert len(sender.told.broken) == 1
        sender.writer.close()

    asyncio.run(story())


def test_all_that_is_under_way_fails_when_the_stream_breaks():
    """The peer was killed: three sends fail, the loss is told once, the next send dials again."""

    async def story() -> None:
        sender, first = await welcomed()
        others = [sender.lane.send(FrameKind.PING) for _ in range(2)]
        sender.writer.close()
        results = await asyncio.gather(first, *others, return_exceptions=True)
        assert all(isinstance(result, PeerUnreachable) for result in results)
        assert len(sender.told.broken) == 1
        sender.dialled.clear()
        again = sender.lane.send(FrameKind.PING)
        await sender.hello()
        sender.answer(FrameKind.WELCOME)
        sender.answer(FrameKind.PONG, sequence=4)
        await again
        assert sender.num_dials == 2
        sender.lane.close(LEAVING)
        sender.writer.close()

    asyncio.run(story())


@pytest.mark.parametrize(("reason", "error"), [(b"ignored", MessageRefused), (b"leaving", PeerUnreachable)])
def test_a_refused_greeting_is_not_tried_again_at_once(reason, error):
    """The other end ignores us, or goes: the sends that wait for the dial fail, and the next waits its turn."""

    async def story() -> None:
        sender = Sender()
        waiting = [sender.lane.send(FrameKind.PING) for _ in range(3)]
        await sender.hello()
        sender.answer(FrameKind.CLOSE, header=reason)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [error] * 3
        assert sender.backoff.wait_s(asyncio.get_running_loop().time() - 0.1) > 0
        assert sender.told.broken == []
        sender.writer.close()

    asyncio.run(story())


def test_a_connection_lost_while_greeting_is_a_failed_dial():
    async def story() -> None:
        sender = Sender()
        waiting = sender.lane.send(FrameKind.PING)
        await sender.hello()
        sender.writer.close()
        with pytest.raises(PeerUnreachable):
            await waiting
        assert sender.told.counts["dial-failed"] == 1
        assert sender.lane.is_idle

    asyncio.run(story())


def test_a_caller_that_gives_up_disturbs_nobody():
    """A send is cancelled in the middle: its frame still leaves whole, its answer is taken, the next is served."""

    async def story() -> None:
        sender, first = await welcomed()
        first.cancel()
        second = sender.lane.send(FrameKind.PING)
        sender.answer(FrameKind.PONG, sequence=1)
        sender.answer(FrameKind.PONG, sequence=2)
        await second
        assert sender.told.broken == []
        sender.lane.close(LEAVING)
        sender.writer.close()

    asyncio.run(story())
