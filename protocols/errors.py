"""The exceptions of Gossamer.

    GossamerError
    |-- ConfigError           a person's input is wrong: RunSpec, flag, file, address (start-up only)
    `-- ProtocolError
        |-- LocalProtocolError   our own code broke the protocol: a bug
        `-- RemoteProtocolError  another peer sent nonsense: counted by `reason`, its call refused, life goes on

Failures of other peers (dead, slow, silent) are events, never exceptions.
"""

from __future__ import annotations


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
