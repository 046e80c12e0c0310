"""A wide area network inside this machine: a network namespace for each host, and links that take their time.

A host's only way out is a TUN device. One thread of this process carries the packets from device to device, and gives
each pair of hosts its latency and its rate; so what runs in a host speaks real TCP over real, slow links, and the
kernel needs no shaping of its own. Namespaces and devices have no names outside this process: they are file
descriptors of it, and however it ends nothing is left. Nothing is put into the machine's own network. Root, Linux.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import permutations
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
TUN_FILE = "/dev/net/tun"
DEVICE = "wan0"
SUBNET = "10.77.0"
HOSTS_MAX = 250
PACKET_BYTES_MAX = 9000  # large packets are few: the carrier must not become the load
QUEUE_BYTES_MAX = 4 << 20  # that wait for one link; beyond, packets are dropped as a full router would


@dataclass(frozen=True, slots=True)
class Link:
    """One way between two hosts."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: int) -> float:
        """From the first byte's departure to the last one's arrival."""
        return self.latency_s + num_bytes / self.bytes_per_s


def why_not() -> str:
    """What keeps a lab from running here; empty: nothing does."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces can be made by root only"
    if shutil.which("ip") is None:
        return "the command `ip` (iproute2) is not installed"
    try:
        os.close(os.open(TUN_FILE, os.O_RDWR))
        os.close(_in_thread(_new_namespace))
    except OSError as error:
        return f"no network namespace with a TUN device can be made: {error}"
    return ""


def all_pairs(num_hosts: int, link: Link) -> dict[tuple[int, int], Link]:
    """The same link between each two hosts."""
    return dict.fromkeys(permutations(range(num_hosts), 2), link)


def address(host: int) -> str:
    return f"{SUBNET}.{host + 1}"


def set_up_commands(host: int) -> list[list[str]]:
    """Run inside the host's namespace, where the device is already."""
    return [
        ["ip", "link", "set", "lo", "up"],
        ["ip", "addr", "add", f"{address(host)}/24", "dev", DEVICE],
        ["ip", "link", "set", DEVICE, "mtu", str(PACKET_BYTES_MAX), "up"],
    ]


class Lab:
    """Use as a context: hosts 0, 1, ... and `links` between each two of them, by (from, to)."""

    def __init__(self, num_hosts: int, links: Mapping[tuple[int, int], Link]) -> None:
        assert 0 < num_hosts <= HOSTS_MAX
        self._num_hosts = num_hosts
        self._wires = Wires(links)
        self._namespaces: list[int] = []
        self._devices: list[int] = []
        self._stop = os.eventfd(0, os.EFD_NONBLOCK)
        self._carrier = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Lab:
        for host in range(self._num_hosts):
            namespace, device = _in_thread(partial(_new_host, host))
            self._namespaces.append(namespace)
            self._devices.append(device)
        self._carrier.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.eventfd_write(self._stop, 1)
        self._carrier.join()
        for fd in (*self._devices, *self._namespaces, self._stop):
            os.close(fd)

    def shape(self, links: Mapping[tuple[int, int], Link]) -> None:
        """Other links from now on; what is under way arrives as it was sent."""
        self._wires.links = dict(links)

    def door(self, hosts: Mapping[str, int]) -> Callable[[str], None]:
        """For `LocalSwarm(enter=...)`: puts the process of the peer with that label into its host."""
        places = {label: f"/proc/{os.getpid()}/fd/{self._namespaces[host]}" for label, host in hosts.items()}
        return partial(enter, places)

    # ---- the carrier's thread ----

    def _carry(self) -> None:
        poller = select.epoll()
        for fd in (*self._devices, self._stop):
            poller.register(fd, select.EPOLLIN)
        host_of = {fd: host for host, fd in enumerate(self._devices)}
        while True:
            wait_s = self._wires.next_s() - time.monotonic()
            for fd, _ in poller.poll(max(wait_s, 0.0) if wait_s < 1.0 else 1.0):
                if fd == self._stop:
                    poller.close()
                    return
                self._take_from(host_of[fd], fd)
            for host, packet in self._wires.due(time.monotonic()):
                with suppress(OSError):  # the host's own queue is full: as lost as on any network
                    os.write(self._devices[host], packet)

    def _take_from(self, host: int, device: int) -> None:
        with suppress(BlockingIOError):
            while True:
                packet = os.read(device, PACKET_BYTES_MAX + 64)
                target = target_of(packet)
                if target is not None and target < self._num_hosts:
                    self._wires.put(host, target, packet, time.monotonic())


class Wires:
    """Packets under way. A link sends one after the other, at its rate; each arrives a latency later."""

    def __init__(self, links: Mapping[tuple[int, int], Link]) -> None:
        self.links = dict(links)
        self._free_at_s: dict[tuple[int, int], float] = {}
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._num_sent = 0

    def put(self, source: int, target: int, packet: bytes, now: float) -> None:
        link = self.links[source, target]
        begin_s = max(now, self._free_at_s.get((source, target), 0.0))
        if (begin_s - now) * link.bytes_per_s > QUEUE_BYTES_MAX:
            return
        sent_s = begin_s + len(packet) / link.bytes_per_s
        self._free_at_s[source, target] = sent_s
        self._num_sent += 1
        heappush(self._under_way, (sent_s + link.latency_s, self._num_sent, target, packet))

    def next_s(self) -> float:
        return self._under_way[0][0] if self._under_way else float("inf")

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Those that have arrived, with their host."""
        arrived: list[tuple[int, bytes]] = []
        while self._under_way and self._under_way[0][0] <= now:
            _, _, target, packet = heappop(self._under_way)
            arrived.append((target, packet))
        return arrived


def target_of(packet: bytes) -> int | None:
    """The host that an IPv4 packet goes to; None for anything else."""
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return None
    *net, last = packet[16:20]
    return last - 1 if ".".join(map(str, net)) == SUBNET and last > 0 else None


# ---- namespaces --------------------------------------------------------------------------------------------------


def enter(places: Mapping[str, str], label: str) -> None:
    """Move this thread, and whatever it starts, into the host of `label`."""
    namespace = os.open(places[label], os.O_RDONLY)
    _libc("setns", namespace, CLONE_NEWNET)
    os.close(namespace)


def _new_host(host: int) -> tuple[int, int]:
    """A namespace with its device. In a thread of its own, which then is inside."""
    namespace = _new_namespace()
    device = os.open(TUN_FILE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    for command in set_up_commands(host):
        subprocess.run(command, check=True, capture_output=True)
    # a microbatch comes once a round: its connection must not start slowly each time
    Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
    return namespace, device


def _new_namespace() -> int:
    _libc("unshare", CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _libc(name: str, *arguments: int) -> None:
    """os.setns and os.unshare exist from Python 3.12 on."""
    function: Any = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _in_thread(function: Callable[[], Any]) -> Any:
    """Its namespace is a thread's own: a thread that is thrown away spares the process's."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:  # handed on below
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
