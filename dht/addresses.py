"""Addresses as people type them: libp2p multiaddrs, read and judged before any daemon sees them.

We listen and dial over TCP, plain or as a web socket. UDP is refused: this libp2p daemon's QUIC loses the end
of a stream. A fault is a ConfigError that names the address and shows a right one.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from dht.identity import is_peer_id
from dht.records import MADDR_CHARS_MAX
from protocols.errors import ConfigError
from protocols.swarm import PeerId

_NAME = re.compile(r"(?=.{1,253}\Z)(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?\.?)+")
_IP_VERSIONS = {"ip4": 4, "ip6": 6}
_NAME_KINDS = ("dns", "dns4", "dns6")
_EXAMPLE = "/ip4/203.0.113.5/tcp/31337"


@dataclass(frozen=True, slots=True)
class Maddr:
    """`/ip4/HOST/tcp/PORT[/ws][/p2p/PEER]`, or such an address of a relay plus `/p2p-circuit/p2p/PEER`."""

    text: str
    kind: str
    host: str
    port: int
    peer: PeerId | None = None  # whom one reaches there in the end
    relayed: bool = False


def parse_maddr(text: str, *, where: str) -> Maddr:
    """`where` names the flag or field in the error."""
    try:
        return _parse(text)
    except ValueError as error:
        raise ConfigError(
            f"{where}: {text[:200]!r} is not an address: {error}; write it like {_EXAMPLE}"
        ) from None


def parse_host_maddr(text: str) -> Maddr:
    """Where to listen: a numeric address of this machine (0.0.0.0: all), port 0: any free one."""
    maddr = parse_maddr(text, where="host_maddrs")
    if maddr.peer is not None or maddr.kind not in _IP_VERSIONS:
        raise ConfigError(f"host_maddrs: {text!r}: listen on a numeric address, like /ip4/0.0.0.0/tcp/31337")
    return maddr


def parse_announce_maddr(text: str) -> Maddr:
    """What to tell others: an address from outside, with its port."""
    maddr = parse_maddr(text, where="announce_maddrs")
    if maddr.peer is not None or maddr.port == 0 or _is_wildcard(maddr):
        raise ConfigError(
            f"announce_maddrs: {text!r}: give the address and port at which others reach you, like {_EXAMPLE}"
        )
    return maddr


def parse_initial_peer(text: str) -> Maddr:
    """Whom to call first: an address that ends in the peer id one expects there."""
    maddr = parse_maddr(text, where="initial_peers")
    if maddr.peer is None:
        raise ConfigError(
            f"initial_peers: {text!r} must end in /p2p/<peer id>, as the other peer prints it at start"
        )
    if maddr.port == 0 or _is_wildcard(maddr):
        raise ConfigError(f"initial_peers: {text!r} is where a peer listens, not where one can call it")
    return maddr


def public_first(maddrs: Iterable[str]) -> tuple[str, ...]:
    """Own addresses for others to use: public ones first, the local network's next, loopback last, no
    wildcards."""
    known: dict[str, int] = {}
    for text in maddrs:
        try:
            maddr = _parse(text)
        except ValueError:  # the daemon may know forms that we do not dial
            continue
        if not _is_wildcard(maddr) and len(text) <= MADDR_CHARS_MAX:
            known[text] = _distance(maddr)
    return tuple(sorted(known, key=known.__getitem__))


def _parse(text: str) -> Maddr:
    if not text.startswith("/") or not text.isascii() or text.endswith("/"):
        raise ValueError("it starts with /ip4/, /ip6/ or /dns/ and has no / at its end")
    parts = text[1:].split("/")
    if len(parts) < 4:
        raise ValueError("it names a host, /tcp/ and a port")
    (kind, host, transport, port), rest = parts[:4], parts[4:]
    _check_host(kind, host)
    if transport != "tcp":
        raise ValueError("after the host comes /tcp/PORT (other transports are not used)")
    if not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ValueError("the port is a number from 0 to 65535")
    if rest[:1] == ["ws"]:
        rest = rest[1:]
    peer, relayed = _parse_peer(rest)
    return Maddr(text, kind, host, int(port), peer, relayed)


def _check_host(kind: str, host: str) -> None:
    if kind in _IP_VERSIONS:
        if "%" in host or ipaddress.ip_address(host).version != _IP_VERSIONS[kind]:
            raise ValueError(f"{host!r} does not belong after /{kind}/")
    elif kind not in _NAME_KINDS:
        raise ValueError("it starts with /ip4/, /ip6/ or /dns/")
    elif not _NAME.fullmatch(host):
        raise ValueError(f"{host!r} is not a host name")


def _parse_peer(parts: list[str]) -> tuple[PeerId | None, bool]:
    match parts:
        case []:
            return None, False
        case ["p2p", peer]:
            relayed = False
        case ["p2p", relay, "p2p-circuit", "p2p", peer]:
            relayed = True
            _check_peer(relay)
        case _:
            raise ValueError(
                "after the port only /ws, /p2p/<peer id> and /p2p-circuit/p2p/<peer id> may follow"
            )
    _check_peer(peer)
    return peer, relayed


def _check_peer(text: str) -> None:
    if not is_peer_id(text):
        raise ValueError(f"{text[:80]!r} is not a peer id (12D3Koo...)")


def _is_wildcard(maddr: Maddr) -> bool:
    return maddr.kind in _IP_VERSIONS and ipaddress.ip_address(maddr.host).is_unspecified


def _distance(maddr: Maddr) -> int:
    if maddr.kind in _NAME_KINDS:
        return 0
    address = ipaddress.ip_address(maddr.host)
    if address.is_loopback:
        return 3
    if address.is_global:
        return 1 if maddr.relayed else 0
    return 2
