"""The lab's arithmetic and commands, and the table of cities; namespaces themselves need root."""

from __future__ import annotations

from statistics import mean

import pytest

from benchmarks.lab import QUEUE_BYTES_MAX, Link, Wires, address, all_pairs, set_up_commands, target_of
from benchmarks.live_paths import MEAN_HOP_S, city_links, live_spec, makespan_s, rounds_of

SLOW = Link(latency_s=0.1, bytes_per_s=1000.0)


def a_packet(target: int) -> bytes:
    return bytes([0x45, *[0] * 15, 10, 77, 0, target + 1]) + b"payload"


def test_a_packet_takes_its_time_and_then_the_latency() -> None:
    """500 bytes at 1,000 a second, then 0.1 s of way."""
    wires = Wires(all_pairs(2, SLOW))
    wires.put(0, 1, b"x" * 500, now=10.0)
    assert wires.next_s() == pytest.approx(10.6)
    assert wires.due(10.5) == []
    assert wires.due(10.7) == [(1, b"x" * 500)]


def test_packets_of_one_link_queue_and_those_of_another_do_not() -> None:
    """Two for host 1 share a link; host 2's goes its own way, and overtakes."""
    wires = Wires(all_pairs(3, SLOW))
    for target in (1, 1, 2):
        wires.put(0, target, b"x" * 500, now=0.0)
    assert [target for target, _ in wires.due(0.7)] == [1, 2]
    assert wires.next_s() == pytest.approx(1.1)


def test_a_full_queue_drops_what_comes() -> None:
    """A sender without manners must not fill the machine's memory."""
    wires = Wires(all_pairs(2, SLOW))
    packet = b"x" * (1 << 20)
    for _ in range(2 * QUEUE_BYTES_MAX // len(packet)):
        wires.put(0, 1, packet, now=0.0)
    assert len(wires.due(1e9)) == QUEUE_BYTES_MAX // len(packet) + 1


def test_only_packets_to_hosts_are_carried() -> None:
    """IPv6 announces itself on every device, and some send to everybody."""
    assert target_of(a_packet(3)) == 3
    assert target_of(b"\x60" + bytes(60)) is None
    assert target_of(bytes([0x45, *[0] * 15, 224, 0, 0, 1])) is None
    assert target_of(b"\x45") is None


def test_a_host_gets_its_address_inside_its_namespace_only() -> None:
    """No command names a namespace or another device: each runs where the host is."""
    commands = set_up_commands(4)
    assert address(4) == "10.77.0.5"
    assert ["ip", "addr", "add", "10.77.0.5/24", "dev", "wan0"] in commands

    assert {word for command in commands for word in command} & {"netns", "-n", "eth0"} == set()


def test_links_are_the_tables_costs_scaled_to_the_mean() -> None:
    """Twelve cities, symmetric; a neighbour in Europe stays some 25 times as near as Australia is."""
    cities, links = city_links()
    number = {city: index for index, city in enumerate(cities)}
    latency_s = {pair: link.latency_s for pair, link in links.items()}
    assert len(cities) == 12
    assert len(links) == 12 * 11
    assert mean(latency_s.values()) == pytest.approx(MEAN_HOP_S)
    assert all(latency_s[one, other] == latency_s[other, one] for one, other in links)
    near, far = latency_s[number["NL"], number["London"]], latency_s[number["NL"], number["Australia"]]
    assert 20 < far / near < 30


def test_specs_differ_in_the_path_rules_only() -> None:
    """What is compared must be the same run but for what is measured."""
    full, skip = live_spec(6), live_spec(4)
    assert full.model_copy(update={"paths": skip.paths}) == skip
    assert (skip.path_stages, full.path_stages, full.num_stages) == (4, 6, 6)


def test_rounds_are_read_while_one_plan_is_in_use() -> None:
    """Rounds before the watch began, and after a later plan came, are not of the plan that is judged."""
    ends = [{"now": at, "what": "RoundFinished", "round": at} for at in (1, 3, 6, 8, 12)]
    made = [
        {"now": 2.0, "what": "Count", "name": "plan-made", "detail": "12 peers, 2.500 s a round"},
        {"now": 9.0, "what": "Count", "name": "plan-made", "detail": "11 peers, 9.000 s a round"},
    ]
    finished = {"now": 6, "what": "MicrobatchFinished", "round": 2, "train": True, "loss": 4.0}
    rounds = rounds_of([*ends, *made, finished], since_s=2.5)
    assert rounds.seconds == (3, 2)
    assert rounds.predicted_s == 2.5
    assert rounds.losses == {2: 4.0}
    assert makespan_s("12 peers, 0.125 s a round") == 0.125
