"""CPU time of a process tree."""

from __future__ import annotations

import subprocess
import sys
from subprocess import PIPE

import psutil
import pytest

from benchmarks.cpu import kill_tree, process_cpu_s, tree_cpu_s

BURN_S = 0.4
TICKS_S = 0.05  # the kernel counts in hundredths, user and system apart
BURN = f"""
import time
while time.process_time() < {BURN_S}: pass
"""
PARENT = f"""
import subprocess, sys
def say(word):
    print(word, flush=True)
    sys.stdin.readline()
child = subprocess.Popen([sys.executable, "-c", '''{BURN}
print("burnt", flush=True)
input()'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
say("child has burnt")
child.communicate("go")
say("child is gone")
"""


def test_no_work_hides_in_children_living_or_gone() -> None:
    """A daemon burns CPU, then ends: its time must stay in the sum, once."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=PIPE, stdout=PIPE, text=True) as parent:
        assert parent.stdin
        assert parent.stdout
        root = psutil.Process(parent.pid)
        assert parent.stdout.readline() == "child has burnt\n"
        alive_s, own_s = tree_cpu_s(root), process_cpu_s(root)
        below_s = tree_cpu_s(root, include_self=False)
        parent.stdin.write("go\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "child is gone\n"
        gone_s = tree_cpu_s(root)
        parent.stdin.write("go\n")
    assert own_s < alive_s
    assert below_s == pytest.approx(alive_s - own_s)
    assert below_s >= BURN_S - TICKS_S
    assert alive_s - TICKS_S <= gone_s < alive_s + BURN_S


def test_kill_tree_leaves_the_root_alone() -> None:
    """A baseline's forked helpers are ended after its sample; the measuring process goes on."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=PIPE, stdout=PIPE, text=True) as parent:
        assert parent.stdout
        parent.stdout.readline()
        (child,) = psutil.Process(parent.pid).children()
        kill_tree(psutil.Process(parent.pid))
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert parent.poll() is None
        parent.kill()
