"""Why an address does not work, in words. Plain sockets on loopback."""

from __future__ import annotations

import asyncio
import socket

import pytest

from dht.addresses import parse_host_maddr, parse_initial_peer
from dht.reachability import check_port_free, describe_dial
from protocols.errors import ConfigError


@pytest.fixture
def listener():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def test_busy_port_is_told_with_the_way_out(listener):
    """libp2p would bind beside the other one and take half of its connections."""
    with pytest.raises(ConfigError, match=rf"port {listener} is in use.*choose another port"):
        check_port_free(parse_host_maddr(f"/ip4/127.0.0.1/tcp/{listener}"))


def test_port_busy_on_one_address_is_busy_for_all_addresses(listener):
    with pytest.raises(ConfigError, match="in use"):
        check_port_free(parse_host_maddr(f"/ip4/0.0.0.0/tcp/{listener}"))


def test_free_ports_pass():
    check_port_free(parse_host_maddr("/ip4/127.0.0.1/tcp/0"))


def test_address_of_another_machine_is_told():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is not an address of this machine"):
        check_port_free(parse_host_maddr("/ip4/192.0.2.1/tcp/0"))


def describe(alice, address):
    return asyncio.run(describe_dial(parse_initial_peer(f"{address}/p2p/{alice.peer_id}")))


def test_listener_that_is_no_peer_is_told_from_a_closed_port(alice, listener):
    assert "does not answer as peer" in describe(alice, f"/ip4/127.0.0.1/tcp/{listener}")


def test_closed_port_refuses(alice):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, not listening: nobody else can take it meanwhile
        assert "connection refused" in describe(alice, f"/ip4/127.0.0.1/tcp/{sock.getsockname()[1]}")


def test_full_backlog_is_silence(alice, monkeypatch):
    """As a firewall that drops packets: no answer at all."""
    monkeypatch.setattr("dht.reachability._DIAL_S", 0.05)
    with socket.socket() as deaf, socket.socket() as first, socket.socket() as second:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        assert "silent" in describe(alice, f"/ip4/127.0.0.1/tcp/{deaf.getsockname()[1]}")


def test_unknown_name_is_told(alice, monkeypatch):
    def resolve(*_args, **_kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert "'no-such-host' is unknown here" in describe(alice, "/dns/no-such-host/tcp/1")
