"""Signals, as a terminal or a service manager sends them, to a real process that never finishes leaving."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from peer.host import EXIT_INTERRUPTED

STUBBORN = """
import asyncio
from peer.host import install_signals

async def main():
    install_signals(lambda: print("asked to leave", flush=True))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def stubborn() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_forces(stubborn: subprocess.Popen[str], which: signal.Signals):
    assert stubborn.stdout is not None
    stubborn.send_signal(which)
    assert stubborn.stdout.readline() == "asked to leave\n"
    assert stubborn.poll() is None
    stubborn.send_signal(which)
    assert stubborn.wait(timeout=30) == EXIT_INTERRUPTED


def test_sigusr1_shows_where_the_process_is_and_lets_it_live(stubborn: subprocess.Popen[str]):
    """The first question about a peer that seems to hang."""
    assert stubborn.stderr is not None
    assert stubborn.stdout is not None
    stubborn.send_signal(signal.SIGUSR1)
    assert "most recent call first" in stubborn.stderr.readline()
    stubborn.send_signal(signal.SIGINT)
    assert stubborn.stdout.readline() == "asked to leave\n"
    assert stubborn.poll() is None
