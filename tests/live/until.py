"""Waiting for a live swarm: as long as it takes, within a limit."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.05)
