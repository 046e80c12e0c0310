"""Numbers that follow from names: drawn once and for all, alike on every machine, without state."""

from __future__ import annotations

import hashlib

NUMBERS = 1 << 32


def number_of(text: str) -> int:
    """From 0 up to NUMBERS, evenly spread over texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def share_of(text: str) -> float:
    """The same, from 0 up to 1."""
    return number_of(text) / NUMBERS
