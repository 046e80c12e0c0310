"""Why an address does not work, in words for the person who typed it. Plain sockets, no libp2p."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress

from dht.addresses import Maddr
from protocols.errors import ConfigError

_DIAL_S = 2.0


def check_port_free(maddr: Maddr) -> None:
    """ConfigError when we cannot listen there; the daemon would say so deep in its log, or not at all."""
    family = socket.AF_INET6 if maddr.kind == "ip6" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((maddr.host, maddr.port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {maddr.text}: {_listen_fault(error, maddr)}") from None


def _listen_fault(error: OSError, maddr: Maddr) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"port {maddr.port} is in use by another program; choose another port, or 0 for any free one"
            )
        case errno.EADDRNOTAVAIL:
            return f"{maddr.host} is not an address of this machine; 0.0.0.0 listens on all of its addresses"
        case errno.EACCES:
            return f"port {maddr.port} needs administrator rights; choose one above 1023"
        case _:
            return error.strerror or str(error)


async def describe_dial(maddr: Maddr) -> str:
    """What a plain TCP connection to this address meets."""
    if maddr.relayed:
        return "not reached through its relay"
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(maddr.host, maddr.port), _DIAL_S)
    except asyncio.TimeoutError:
        return "silent (machine off, wrong address, or a firewall that drops packets)"
    except ConnectionRefusedError:
        return "connection refused (nothing listens at this port)"
    except socket.gaierror:
        return f"the name {maddr.host!r} is unknown here"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return f"something listens there, but it does not answer as peer {maddr.peer}"
