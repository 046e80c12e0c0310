"""Identity files, peer ids and signatures; that the daemon agrees on the id is in tests/live."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.identity import Identity, IdentityLock, friendly_name, is_peer_id, verify
from protocols.errors import ConfigError


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "data" / "identity.key")


def test_identity_survives_a_restart_with_the_same_id(identity):
    """The folder is made on the first start; the second start reads what the first one wrote."""
    again = Identity.load_or_create(identity.path)
    assert again.peer_id == identity.peer_id
    assert verify(identity.peer_id, b"hello", again.sign(b"hello"))


def test_new_file_is_private_and_leaves_no_draft_behind(identity):
    assert stat.S_IMODE(identity.path.stat().st_mode) == 0o600
    assert os.listdir(identity.path.parent) == [identity.path.name]


def test_file_is_what_the_libp2p_daemon_reads(identity):
    """protobuf: field 1 = 1 (Ed25519), field 2 = 64 bytes, the private seed and the public key."""
    content = identity.path.read_bytes()
    assert content[:4] == bytes.fromhex("08011240")
    assert len(content) == 68


def test_peer_id_is_the_multihash_of_the_public_key(identity):
    assert identity.peer_id.startswith("12D3KooW")
    assert is_peer_id(identity.peer_id)


def test_two_identities_differ(tmp_path, identity):
    assert Identity.load_or_create(tmp_path / "other.key").peer_id != identity.peer_id


@given(st.binary(max_size=200), st.integers(min_value=0, max_value=511))
def test_signature_holds_for_its_data_only(alice, data, bit):
    signature = bytearray(alice.sign(data))
    assert verify(alice.peer_id, data, bytes(signature))
    assert not verify(alice.peer_id, data + b"x", bytes(signature))
    signature[bit // 8] ^= 1 << bit % 8
    assert not verify(alice.peer_id, data, bytes(signature))


@given(st.text(max_size=80), st.binary(max_size=70))
def test_verify_never_raises_on_what_a_stranger_sends(peer, signature):
    assert not verify(peer, b"data", signature)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a key",
        bytes.fromhex("08011240") + bytes(63),
        bytes.fromhex("08011240") + bytes(65),
        bytes.fromhex("080012a709") + bytes(63),  # an RSA identity, as hivemind itself writes
    ],
)
def test_foreign_file_is_named_and_the_remedy_told(tmp_path, content):
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"identity\.key is not an Ed25519 identity.*move it away"):
        Identity.load_or_create(path)


def test_file_with_a_foreign_public_half_is_damaged(tmp_path, identity):
    """A bit flipped on the disk must not give the peer an id that it cannot sign for."""
    content = bytearray(identity.path.read_bytes())
    content[-1] ^= 1
    identity.path.write_bytes(content)
    with pytest.raises(ConfigError, match="damaged"):
        Identity.load_or_create(identity.path)


def test_file_that_others_can_read_is_refused_with_the_command_that_mends_it(identity):
    identity.path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Identity.load_or_create(identity.path)


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"file/identity\.key"):
        Identity.load_or_create(tmp_path / "file" / "identity.key")


def test_first_start_that_was_overtaken_takes_the_other_identity(tmp_path, monkeypatch):
    """Two first starts at once: one file, one identity, whoever was faster."""
    path = tmp_path / "identity.key"
    real_link = os.link
    winner: list[Identity] = []

    def overtaken_link(source: str, target: str) -> None:
        monkeypatch.setattr(os, "link", real_link)
        winner.append(Identity.load_or_create(path))
        real_link(source, target)

    monkeypatch.setattr(os, "link", overtaken_link)
    assert Identity.load_or_create(path).peer_id == winner[0].peer_id


def test_same_identity_twice_on_a_machine_is_refused(identity):
    with IdentityLock(identity.path), pytest.raises(ConfigError, match="in use by another peer"):
        IdentityLock(identity.path).acquire()
    with IdentityLock(identity.path):
        pass  # free again


def test_lock_falls_with_its_process(identity):
    """kill -9 of a peer must not lock its owner out."""
    code = (
        "import sys, pathlib; from dht.identity import IdentityLock;"
        "lock = IdentityLock(pathlib.Path(sys.argv[1])); lock.acquire(); print('held', flush=True); sys.stdin.read()"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(identity.path)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="in use"):
            IdentityLock(identity.path).acquire()
        holder.kill()
        holder.wait()
    with IdentityLock(identity.path):
        pass


def test_friendly_name_is_stable_and_speakable(identity):
    name = friendly_name(identity.peer_id)
    assert name == friendly_name(identity.peer_id)
    assert len(name.split("-")) == 3
    assert name.isascii()
