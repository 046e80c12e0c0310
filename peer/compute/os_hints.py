"""What the compute thread asks of the operating system. Hints: without them all works alike, only slower.

A long time slice. Peers that share cores evict each other's weights and activations at every switch between them: five
training processes on two cores took a fifth less CPU time for the same work at 100 ms than at the default of about
3 ms. Threads that serve the network keep the short slice, and with it the right to be woken first.

Memory kept. A pass allocates the same megabytes as the one before; by default the C library returns them to the kernel
in between, and every page must be zeroed again: 20 of 750 ms a microbatch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SLICE_NS = 100_000_000  # the longest that Linux allows
KEPT_BYTES_MAX = 256 << 20  # freed, and not returned
KEPT_PIECE_BYTES_MAX = (
    32 << 20
)  # larger pieces are mapped and returned each by itself; glibc's own upper limit

_SCHED_SETATTR = {
    "x86_64": 314,
    "aarch64": 274,
}  # system calls; the C library has no wrapper before glibc 2.41
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, slice, deadline, period
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def ask_for_long_slice() -> bool:
    """For the calling thread. False: no Linux 6.12 or later, another policy, or refused; then nothing has changed."""
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, SLICE_NS, 0, 0)
    return ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0


def keep_freed_memory() -> bool:
    """For the whole process. False: the C library is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    kept = library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)
    return bool(kept and library.mallopt(_M_MMAP_THRESHOLD, KEPT_PIECE_BYTES_MAX))
