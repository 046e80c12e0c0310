"""Metrics as Prometheus scrapes them, and the flight recorder as a person reads it back."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from peer import metrics
from peer.metrics import FlightRecorder, serve_metrics
from peer.status import PeerStatus, ValidationPoint
from protocols.actions import RunForward
from protocols.errors import ConfigError
from protocols.events import DeadlineReached, ForwardDone, ViewChanged
from protocols.messages import TensorPacket, WorkKey
from protocols.run_spec import Codec
from protocols.swarm import PeerInfo, PeerState, SwarmView

SECRET = b"\x11\x22" * 8


def scrape(address: tuple[Any, ...]) -> dict[str, float]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address[0]}:{address[1]}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{s.name}{sorted(s.labels.items()) if s.labels else ''}": s.value for s in samples}


def test_a_scrape_shows_the_status_of_that_moment():
    status = PeerStatus(
        peer="a",
        name="calm-otter",
        run_id="r",
        stage=0,
        state=PeerState.SERVING,
        round=7,
        loss=3.5,
        tokens=900,
        validation=(ValidationPoint(round=5, loss=4.5),),
        counters={"retry": 3},
        peers=(
            PeerInfo(peer="a", stage=0, state=PeerState.SERVING),
            PeerInfo(peer="b", stage=None, state=PeerState.JOINING),
        ),
    )
    server = serve_metrics("127.0.0.1:0", lambda: status)
    try:
        series = scrape(server.server_address)
    finally:
        server.shutdown()
        server.server_close()
    assert series["gossamer_round"] == 7
    assert series["gossamer_validation_loss_nats"] == 4.5
    assert series["gossamer_tokens_total"] == 900
    assert series["gossamer_events_total[('name', 'retry')]"] == 3
    assert series["gossamer_peers[('stage', '0'), ('state', 'serving')]"] == 1
    assert series["gossamer_peers[('stage', 'none'), ('state', 'joining')]"] == 1
    assert series["process_open_fds"] > 0


def test_a_busy_metrics_port_is_named():
    status = PeerStatus(peer="a", name="n", run_id="r", stage=None, state=PeerState.JOINING)
    server = serve_metrics("127.0.0.1:0", lambda: status)
    try:
        port = server.server_address[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .Address already in use.: choose another"):
            serve_metrics(f"127.0.0.1:{port}", lambda: status)
    finally:
        server.shutdown()
        server.server_close()


def a_packet() -> TensorPacket:
    return TensorPacket(dtype="float32", shape=(2, 2), codec=Codec.RAW, data=SECRET)


def test_the_recorder_keeps_the_story_without_tensor_bytes(tmp_path: Path):
    recorder = FlightRecorder(tmp_path / "deep" / "flight.jsonl")
    key = WorkKey("peer-a1", 41, 2)
    recorder.write(ForwardDone(key=key, packet=a_packet(), seconds=0.5), now=1.25)
    recorder.write(RunForward(key=key, packet=None, train=True), now=1.25)
    view = SwarmView((PeerInfo(peer="12D3abcdef", stage=3, state=PeerState.SERVING),))
    recorder.write(ViewChanged(view=view), now=2.0)
    recorder.write(DeadlineReached(), now=3.0)
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "deep" / "flight.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines] == ["ForwardDone", "RunForward", "ViewChanged", "DeadlineReached"]
    assert lines[0]["packet"] == {"dtype": "float32", "shape": [2, 2], "codec": "raw", "bytes": 16}
    assert lines[0]["key"]["counter"] == 41
    assert lines[2]["view"] == {"peers": 1, "serving": [["abcdef", 3]]}


def test_the_recorder_never_outgrows_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A peer runs for months; its disk is the volunteer's."""
    monkeypatch.setattr(metrics, "FLIGHT_FILE_BYTES_MAX", 2000)
    recorder = FlightRecorder(tmp_path / "flight.jsonl")
    for step in range(500):
        recorder.write(RunForward(key=WorkKey("p", step, 1), packet=a_packet(), train=True), now=float(step))
    recorder.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 1 + metrics.FLIGHT_FILES_KEPT
    assert sum(file.stat().st_size for file in files) <= 2000 * len(files)
    assert json.loads(files[0].read_text().splitlines()[-1])["key"]["counter"] == 499
