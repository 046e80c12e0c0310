"""Numbers for operators: Prometheus series, and a flight recorder of events and actions.

The series are computed from the peer's status at each scrape, so nothing is counted twice and nothing can disagree
with `gossamer status`. The recorder writes what the core was told and what it decided; with it a bug can be replayed.
No peer id is a label: a swarm's churn would grow the series without bound.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from http.server import HTTPServer
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from peer import __version__
from peer.status import PeerStatus
from protocols.errors import ConfigError
from protocols.messages import TensorPacket
from protocols.swarm import PeerState, SwarmView

RECORD_BYTES_MAX = 4096  # a longer line is cut: the recorder never grows by one wild message
FLIGHT_FILE_BYTES_MAX = 16 << 20
FLIGHT_FILES_KEPT = 2

_GAUGES: dict[str, tuple[str, Callable[[PeerStatus], float | None]]] = {
    "gossamer_round": ("Rounds that the weights have seen", lambda s: s.round),
    "gossamer_outer_step": ("Outer steps taken", lambda s: s.outer_step),
    "gossamer_loss_nats": ("Training loss of the newest round, nats a token", lambda s: s.loss),
    "gossamer_validation_loss_nats": (
        "Newest validation loss, nats a token",
        lambda s: s.validation[-1].loss if s.validation else None,
    ),
    "gossamer_tokens_per_second": ("Tokens trained a second", lambda s: s.tokens_per_s),
    "gossamer_microbatches_in_flight": ("Own microbatches on their way", lambda s: s.num_in_flight),
    "gossamer_queue_depth": ("Microbatches that this relay holds or lets wait", lambda s: s.queue_depth),
    "gossamer_planned_round_seconds": (
        "What the group's plan says of a round; 0: no plan",
        lambda s: s.planned_round_s,
    ),
    "gossamer_replicas_apart_ratio": (
        "Rms distance to averaging partners, of the rms weight",
        lambda s: s.apart,
    ),
    "gossamer_partner_cosine": (
        "Cosine of own and partners' moves since they averaged last",
        lambda s: s.cosine,
    ),
    "gossamer_outer_wait_seconds": (
        "From an outer step's due time until it is applied",
        lambda s: s.outer_wait_s,
    ),
    "gossamer_uptime_seconds": ("Seconds since the start", lambda s: s.uptime_s),
    "gossamer_paused": ("1 while paused", lambda s: float(s.paused)),
}


class StatusCollector(Collector):
    """Turns a status into series when Prometheus asks."""

    def __init__(self, read_status: Callable[[], PeerStatus]) -> None:
        self._read_status = read_status

    def collect(self) -> Iterator[Metric]:
        status = self._read_status()
        build = {"version": __version__, "run": status.run_id, "name": status.name, "device": status.device}
        yield InfoMetricFamily("gossamer_peer", "This peer", value=build)
        for name, (text, read) in _GAUGES.items():
            value = read(status)
            if value is not None:
                yield GaugeMetricFamily(name, text, value=value)
        yield CounterMetricFamily("gossamer_tokens", "Tokens trained by this originator", value=status.tokens)
        counters = CounterMetricFamily("gossamer_events", "What happened, by name", labels=["name"])
        for name, value in sorted(status.counters.items()):
            counters.add_metric([name], value)
        yield counters
        yield _peers_by_stage(status)


def _peers_by_stage(status: PeerStatus) -> Metric:
    numbers: dict[tuple[str, str], int] = {}
    for info in status.peers:
        key = ("none" if info.stage is None else str(info.stage), info.state.value)
        numbers[key] = numbers.get(key, 0) + 1
    family = GaugeMetricFamily("gossamer_peers", "Peers in this peer's view", labels=["stage", "state"])
    for key, number in sorted(numbers.items()):
        family.add_metric(list(key), number)
    return family


def serve_metrics(address: str, read_status: Callable[[], PeerStatus]) -> HTTPServer:
    """Serve `/metrics` at HOST:PORT from a thread; `read_status` is called there. Call `shutdown` on the result."""
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    registry.register(StatusCollector(read_status))
    ProcessCollector(registry=registry)
    try:
        server, _ = start_http_server(int(port), addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served at {address} ({error.strerror}): choose another"
        ) from None
    return server


# ---- flight recorder ------------------------------------------------------------------------------------------------


class FlightRecorder:
    """JSON lines of events and actions, without a byte of any tensor; bounded by rotation."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = RotatingFileHandler(
            path, maxBytes=FLIGHT_FILE_BYTES_MAX, backupCount=FLIGHT_FILES_KEPT, encoding="utf-8"
        )

    def write(self, what: object, now: float) -> None:
        """`what` is an event or an action; `now` is the core's clock."""
        line = json.dumps({"now": round(now, 6), "what": type(what).__name__, **_plain_fields(what)})
        if len(line) > RECORD_BYTES_MAX:
            line = json.dumps({"now": round(now, 6), "what": type(what).__name__, "cut": len(line)})
        self._handler.emit(logging.LogRecord("flight", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        self._handler.close()


def _plain_fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, TensorPacket):
        return {
            "dtype": value.dtype,
            "shape": value.shape,
            "codec": value.codec.value,
            "bytes": value.num_bytes,
        }
    if isinstance(value, SwarmView):  # comes with each poll: who serves what is enough
        serving = [info for info in value.peers if info.state is PeerState.SERVING]
        return {"peers": len(value.peers), "serving": [[info.peer[-6:], info.stage] for info in serving]}
    if is_dataclass(value):
        return {"is": type(value).__name__, **_plain_fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return str(value)
