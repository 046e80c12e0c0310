"""The manners of simulated links."""

from __future__ import annotations

from peer.simulator.clock import Clock
from peer.simulator.network import LinkSettings, Network
from protocols.messages import Release
from tests.protocols.builders import key


class Wires:
    """A network that writes down what it does."""

    def __init__(self, **settings: float) -> None:
        self.clock = Clock()
        self.log: list[tuple] = []
        self.network = Network(
            self.clock,
            1,
            LinkSettings(**settings),
            deliver=lambda to, sender, message: self.log.append(("delivered", to, sender, message)),
            fail=lambda sender, to, message: self.log.append(("failed", sender, to, message)),
        )

    def run(self, until_s: float = 1e9) -> list[tuple]:
        while (next_s := self.clock.next_s()) is not None and next_s <= until_s:
            self.clock.step()
        return self.log


def release(counter: int) -> Release:
    return Release(keys=(key(counter),))


def test_messages_of_one_sender_arrive_in_order():
    wires = Wires(jitter_share=0.9)
    for counter in range(20):
        wires.network.send("a1", "b1", release(counter), 100)
    assert [entry[3] for entry in wires.run()] == [release(counter) for counter in range(20)]


def test_a_kill_is_seen_by_all_who_had_a_session():
    """And by nobody else: a stranger learns it from the table."""
    wires = Wires()
    wires.network.send("a1", "b1", release(0), 100)
    wires.run()
    wires.log.clear()
    wires.network.kill("b1")
    assert wires.run() == [("failed", "a1", "b1", None)]


def test_what_is_on_its_way_to_a_dead_peer_fails():
    wires = Wires()
    wires.network.send("a1", "b1", release(0), 100)
    wires.network.kill("b1")
    assert ("failed", "a1", "b1", release(0)) in wires.run()
    wires.network.send("a1", "b1", release(1), 100)
    assert wires.run()[-1] == ("failed", "a1", "b1", release(1))


def test_what_a_dying_peer_had_not_sent_yet_is_gone():
    wires = Wires(bytes_per_s=100.0)
    wires.network.send("a1", "b1", release(0), 1000)
    wires.clock.at(1.0, wires.network.kill, "a1")
    assert [entry[0] for entry in wires.run()] == ["failed"]  # b1's session broke; nothing was delivered


def test_a_stopped_peer_gets_it_late_and_the_sender_has_given_up():
    """SIGSTOP: the kernel takes the bytes, nobody acknowledges them."""
    wires = Wires(ack_s=5.0)
    wires.network.stop("b1")
    wires.network.send("a1", "b1", release(0), 100)
    assert wires.run() == [("failed", "a1", "b1", release(0))]
    wires.network.resume("b1")
    assert wires.run()[-1] == ("delivered", "b1", "a1", release(0))


def test_a_cut_concerns_two_peers_until_it_heals():
    wires = Wires()
    wires.network.cut("a1", "b1")
    wires.network.send("a1", "b1", release(0), 100)
    wires.network.send("a1", "c1", release(1), 100)
    assert sorted(entry[:3] for entry in wires.run()) == [("delivered", "c1", "a1"), ("failed", "a1", "b1")]
    wires.network.heal("b1", "a1")
    wires.network.send("a1", "b1", release(2), 100)
    assert wires.run()[-1] == ("delivered", "b1", "a1", release(2))


def test_of_lost_sends_some_have_arrived_all_the_same():
    """Only the ack was lost: the sender believes the contrary of the truth."""
    wires = Wires(loss_share=0.99)
    for counter in range(200):
        wires.network.send("a1", "b1", release(counter), 100)
    outcomes = [entry[0] for entry in wires.run()]
    assert outcomes.count("failed") > 180
    assert 50 < outcomes.count("delivered") < 150


def test_bytes_take_time():
    wires = Wires(bytes_per_s=1000.0, latency_s=0.01)
    wires.network.send("a1", "b1", release(0), 5000)
    wires.run()
    assert 5.0 < wires.clock.now < 5.1


def by_letter(peer: str) -> int:
    """a on one side, all others on the other."""
    return 0 if peer[0] == "a" else 1


def test_a_split_swarm_talks_only_on_each_side():
    wires = Wires()
    wires.network.split(by_letter)
    wires.network.send("a1", "b1", release(0), 100)
    wires.network.send("b1", "c1", release(1), 100)
    assert sorted(entry[:3] for entry in wires.run()) == [("delivered", "c1", "b1"), ("failed", "a1", "b1")]
    wires.network.split(None)
    wires.network.send("a1", "b1", release(2), 100)
    assert wires.run()[-1] == ("delivered", "b1", "a1", release(2))


def test_a_death_beyond_the_split_looks_like_silence():
    """No session breaks, and a call is not refused: from here the peer may as well live."""
    wires = Wires()
    wires.network.send("a1", "b1", release(0), 100)
    wires.network.send("c1", "b1", release(1), 100)
    wires.run()
    wires.log.clear()
    wires.network.split(by_letter)
    wires.network.kill("b1")
    assert wires.run() == [("failed", "c1", "b1", None)]
    assert wires.network.is_refused("c1", "b1")
    assert not wires.network.is_refused("a1", "b1")
