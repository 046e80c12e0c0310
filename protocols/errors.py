"""The exceptions of Gossamer.

    GossamerError
    |-- ConfigError           a person's input is wrong: RunSpec, flag, file, address (start-up only)
    `-- ProtocolError
        |-- LocalProtocolError   our own code broke the protocol: a bug
        `-- RemoteProtocolError  another peer sent nonsense: counted by `reason`, its call refused, life goes on

Failures of other peers (dead, slow, silent) are events, never exceptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class GossamerError(Exception):
    """Root of all our exceptions."""


class ConfigError(GossamerError, ValueError):
    """A person can mend it; the message says what is wrong, where, and what to do."""


class ProtocolError(GossamerError):
    """Somebody broke the protocol."""


class LocalProtocolError(ProtocolError):
    """We did: a bug."""


class RemoteProtocolError(ProtocolError):
    """They did. `reason` is a short constant word, fit for a counter's label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def describe_errors(error: ValidationError) -> str:
    """One line for all faults: `field.path: what is wrong; ...`."""
    parts: list[str] = []
    for fault in error.errors(include_url=False):
        place = ".".join(str(part) for part in fault["loc"])
        text = fault["msg"].removeprefix("Value error, ")
        parts.append(f"{place}: {text}" if place else text)
    return "; ".join(parts)
