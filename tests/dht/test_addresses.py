"""Multiaddrs that people type: which are taken, and what is said about the others."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.addresses import (
    parse_announce_maddr,
    parse_host_maddr,
    parse_initial_peer,
    parse_maddr,
    public_first,
)
from protocols.errors import ConfigError

PEER = "12D3KooWAWuzJhrhKyMJCwc464MSn7J9yaBBuM1p9vH4jRZaf9Re"
RELAY = "12D3KooWE9e9mQ99dkjR6C8PyQirzUGaj7iDb4Kuxgepu7qxjkoA"


def test_plain_address_is_read_into_its_parts():
    maddr = parse_initial_peer(f"/ip4/203.0.113.5/tcp/31337/p2p/{PEER}")
    assert (maddr.kind, maddr.host, maddr.port, maddr.peer, maddr.relayed) == (
        "ip4",
        "203.0.113.5",
        31337,
        PEER,
        False,
    )


@pytest.mark.parametrize(
    "text",
    [
        f"/ip6/2001:db8::1/tcp/31337/p2p/{PEER}",
        f"/dns/bootstrap/tcp/31337/p2p/{PEER}",  # a service name in docker compose
        f"/dns4/run.example.org/tcp/443/ws/p2p/{PEER}",
        f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}",
    ],
)
def test_forms_that_we_dial_are_taken(text):
    assert parse_initial_peer(text).peer == PEER


def test_address_through_a_relay_names_the_peer_behind_it():
    maddr = parse_initial_peer(f"/ip4/203.0.113.5/tcp/1/p2p/{RELAY}/p2p-circuit/p2p/{PEER}")
    assert maddr.relayed
    assert maddr.peer == PEER


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "starts with"),
        ("203.0.113.5:31337", "starts with"),
        ("/ip4/203.0.113.5", "a host, /tcp/ and a port"),
        ("/ip4/203.0.113.5/tcp/31337/", "no / at its end"),
        ("/ip4/300.0.113.5/tcp/31337", "300.0.113.5"),
        ("/ip4/::1/tcp/31337", "does not belong after /ip4/"),
        ("/ip6/fe80::1%eth0/tcp/31337", "does not belong after /ip6/"),
        ("/dns/a b/tcp/31337", "not a host name"),
        ("/onion/abc/tcp/31337", "/ip4/, /ip6/ or /dns/"),
        ("/ip4/203.0.113.5/udp/31337/quic-v1", "/tcp/PORT"),
        ("/ip4/203.0.113.5/tcp/70000", "0 to 65535"),
        ("/ip4/203.0.113.5/tcp/http", "0 to 65535"),
        ("/ip4/203.0.113.5/tcp/1/p2p/QmNotOurs", "not a peer id"),
        (f"/ip4/203.0.113.5/tcp/1/p2p/{PEER}/x", "may follow"),
        (f"/ip4/203.0.113.5/tcp/1,/ip4/1.2.3.4/tcp/1/p2p/{PEER}", "0 to 65535"),
    ],
)
def test_bad_address_is_quoted_with_its_fault_and_a_right_one(text, told):
    """The daemon would take some of these apart at the comma, or die of them with a Go traceback."""
    with pytest.raises(ConfigError) as caught:
        parse_maddr(text, where="--initial_peers")
    message = str(caught.value)
    assert told in message
    assert message.startswith("--initial_peers")
    assert "/ip4/203.0.113.5/tcp/31337" in message


@given(st.text(max_size=120))
def test_any_text_is_an_address_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert parse_maddr(text, where="x").text == text


def test_one_listens_on_numeric_addresses_without_a_peer_id():
    assert parse_host_maddr("/ip4/0.0.0.0/tcp/0").port == 0
    for text in ("/dns/host/tcp/1", f"/ip4/0.0.0.0/tcp/1/p2p/{PEER}"):
        with pytest.raises(ConfigError, match="numeric address"):
            parse_host_maddr(text)


@pytest.mark.parametrize("text", ["/ip4/203.0.113.5/tcp/0", "/ip4/0.0.0.0/tcp/1", "/ip6/::/tcp/1"])
def test_what_is_announced_can_be_called(text):
    with pytest.raises(ConfigError, match="others reach you"):
        parse_announce_maddr(text)


def test_initial_peer_without_its_id_or_with_a_listening_address_is_refused():
    with pytest.raises(ConfigError, match="must end in /p2p/"):
        parse_initial_peer("/ip4/203.0.113.5/tcp/31337")
    with pytest.raises(ConfigError, match="where a peer listens"):
        parse_initial_peer(f"/ip4/0.0.0.0/tcp/31337/p2p/{PEER}")


def test_own_addresses_come_public_first_and_loopback_last_without_wildcards():
    found = public_first(
        [
            "/ip4/127.0.0.1/tcp/1",
            "/ip4/0.0.0.0/tcp/1",
            "/ip4/192.168.1.7/tcp/1",
            "/ip4/8.8.8.8/tcp/1",
            "/ip4/8.8.8.8/udp/1/quic-v1",
            "/ip6/::1/tcp/1",
            "/ip6/::/tcp/1",
        ]
    )
    assert found == (
        "/ip4/8.8.8.8/tcp/1",
        "/ip4/192.168.1.7/tcp/1",
        "/ip4/127.0.0.1/tcp/1",
        "/ip6/::1/tcp/1",
    )
