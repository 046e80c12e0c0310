# pyright: basic
"""msgpack for the table's bytes; in one place since it has no types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from protocols.errors import RemoteProtocolError


def pack(values: Sequence[Any]) -> bytes:
    """One list."""
    data = msgpack.packb(list(values))
    assert data is not None
    return data


def unpack(data: bytes) -> Any:
    """One value, lists as tuples; RemoteProtocolError for bytes that are not exactly one."""
    try:
        return msgpack.unpackb(data, use_list=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RemoteProtocolError("record-bytes", type(error).__name__) from None
