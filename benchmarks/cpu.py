"""CPU seconds of a process with all its descendants: the one clock of these benchmarks.

Wall time on shared cores measures the neighbours; CPU time measures the work, and over a whole process tree no work
can hide in a daemon. The kernel adds a child's time to its parent's `children_*` once it is reaped, so the sum over the
living is monotonic as long as every parent waits for its children.
"""

from __future__ import annotations

from contextlib import suppress

import psutil


def process_cpu_s(process: psutil.Process) -> float:
    """Own time and that of its children that have already been reaped; 0 for one that has just gone."""
    try:
        times = process.cpu_times()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def tree_cpu_s(process: psutil.Process, *, include_self: bool = True) -> float:
    """Seconds of `process` and all below it."""
    members = process.children(recursive=True)
    if include_self:
        members.append(process)
    return sum(process_cpu_s(member) for member in members)


def kill_tree(process: psutil.Process) -> None:
    """End everything below `process`; what a baseline's library leaves behind must not disturb the next sample."""
    members = process.children(recursive=True)
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(members, timeout=10)
