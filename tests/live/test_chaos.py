"""`gossamer up --chaos` on real processes: a peer frozen, one killed, a stage emptied; the run ends by itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from peer.chaos import Rates
from peer.chaos_run import REPORT_FILE, run_chaos
from protocols.run_spec import preset

LIVENESS = dict(heartbeat_s=1.0, record_ttl_s=6.0, view_poll_s=1.0, ping_s=1.0)
ROUNDS = 150
SEED = 760  # freezes and kills within a second, and empties stage 1 after six
RATES = Rates(
    kill_every_s=20.0, empty_every_s=60.0, freeze_every_s=60.0, restart_s=(0.5, 1.0), freeze_s=(1.0, 2.0)
)


@pytest.mark.timeout(240)
def test_a_swarm_answers_chaos_by_itself_and_strangers_are_left_alone(tmp_path: Path):
    spec = preset("pico", "chaos", rounds=dict(total_rounds=ROUNDS, rows=2), liveness=LIVENESS)
    said: list[str] = []
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        try:
            run_chaos(spec, {0: 2, 1: 2, 2: 1}, tmp_path, SEED, rates=RATES, compare=False, say=said.append)
            assert stranger.poll() is None
        finally:
            stranger.send_signal(signal.SIGKILL)
    told = json.loads((tmp_path / REPORT_FILE).read_text())
    blows = [event["blow"] for event in told["events"]]
    assert blows[:3] == ["freeze", "kill", "empty"]
    assert all(event["microbatch_s"] is not None for event in told["events"][:3])
    killed = sum(len(event["victims"]) for event in told["events"] if event["blow"] != "freeze")
    recovered = sum(told["rungs"].get(rung, 0) for rung in ("initial", "catch-up", "shadow", "merge", "copy"))
    assert recovered >= killed >= 2  # each of the dead has a successor that has found weights
    assert told["validation_loss"] is not None
    assert said[-1].endswith(str(tmp_path / REPORT_FILE))
