"""Keys, records and a clock for the tests of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dht.identity import Identity
from dht.records import PeerRecord
from protocols.run_spec import RunSpec, preset
from protocols.swarm import PeerId, PeerInfo, PeerState


@pytest.fixture(scope="session")
def alice(tmp_path_factory) -> Identity:
    return Identity.load_or_create(tmp_path_factory.mktemp("alice") / "identity.key")


@pytest.fixture(scope="session")
def mallory(tmp_path_factory) -> Identity:
    return Identity.load_or_create(tmp_path_factory.mktemp("mallory") / "identity.key")


@pytest.fixture(scope="session")
def spec() -> RunSpec:
    return preset("pico")


@dataclass
class Clock:
    """Unix seconds, set by hand."""

    now: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def a_record() -> Callable[..., PeerRecord]:
    """A serving peer's record; keywords of PeerInfo go to its info."""

    def make(peer: PeerId, **changes: object) -> PeerRecord:
        info = {name: changes.pop(name) for name in list(changes) if name in PeerInfo.__dataclass_fields__}
        info = {"stage": 1, "state": PeerState.SERVING, "started_unix_s": 1_699_999_000.0, **info}
        return PeerRecord(info=PeerInfo(peer=peer, **info), **{"stored_unix_s": 1_700_000_000.0, **changes})

    return make
