"""The hints take effect where the system has them, and change nothing else."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading

import pytest

from peer.compute import os_hints

linux = pytest.mark.skipif(
    platform.system() != "Linux", reason="only Linux has time slices that a thread may choose"
)


def _slice_ns() -> int:
    """Of the calling thread, read back from the kernel."""
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]  # sched_getattr
    buffer = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(number, 0, buffer, len(buffer), 0) == 0
    return struct.unpack_from("=IIQiIQQQ", buffer.raw)[5]


@linux
def test_the_thread_that_asks_gets_the_long_slice_and_the_others_keep_theirs() -> None:
    """The event loop must stay quick to wake beside a computing thread."""
    before = _slice_ns()
    seen: list[tuple[bool, int, int]] = []

    def ask() -> None:
        seen.append((os_hints.ask_for_long_slice(), _slice_ns(), os.getpriority(os.PRIO_PROCESS, 0)))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    granted, slice_ns, nice = seen[0]
    if not granted:
        pytest.skip("this kernel grants no slices")
    if before == 0:
        pytest.skip("this kernel does not tell the slice")
    assert slice_ns == os_hints.SLICE_NS
    assert _slice_ns() == before
    assert nice == os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory on demand")
def test_glibc_accepts_how_much_to_keep() -> None:
    assert os_hints.keep_freed_memory()
