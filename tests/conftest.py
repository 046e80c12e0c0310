"""What every test stands on: one torch thread, no network look-ups, throw-away folders, reproducible properties."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch or peer: both read the environment once, and child processes inherit it.
for name in [name for name in os.environ if name.startswith("GOSSAMER_")]:
    del os.environ[name]  # a developer's own swarm must not leak into the tests
SCRATCH = Path(tempfile.mkdtemp(prefix="gs-"))  # short: a Unix socket's path has at most 107 bytes
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    MPLBACKEND="Agg",
    GOSSAMER_DATA_DIR=str(SCRATCH / "data"),
    GOSSAMER_CACHE_DIR=str(SCRATCH / "cache"),
    GOSSAMER_RUNTIME_DIR=str(SCRATCH / "run"),
)

# No deadline: two shared cores make wall time meaningless. Derandomized in CI, so that a red run is red again.
settings.register_profile(
    "local", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        help="write tests/scenarios/*.txt anew; say why in the commit",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in tests/live, and run it last: a broken function should fail before a swarm is started."""
    for item in items:
        if "live" in item.path.relative_to(Path(__file__).parent).parts[:-1]:
            item.add_marker(pytest.mark.live)
    items.sort(key=lambda item: item.get_closest_marker("live") is not None)


def pytest_unconfigure() -> None:
    shutil.rmtree(SCRATCH, ignore_errors=True)
