"""Who a peer is: one Ed25519 key in one file, and the peer id that everybody can derive from it.

A libp2p peer id of an Ed25519 key *contains* the public key, so a signature is checked from the id alone and
no key is ever looked up. The file has libp2p's own form, which the daemon reads too. Invariant: one identity
runs once on a machine (`IdentityLock`); two peers with one id would take turns being it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from filelock import FileLock, Timeout

from protocols.errors import ConfigError
from protocols.swarm import PeerId

# libp2p's protobuf PrivateKey {type: Ed25519, data: 64 bytes}: private seed, then public key
_FILE_HEADER = bytes.fromhex("08011240")
_FILE_BYTES = len(_FILE_HEADER) + 64
# identity multihash (00, length 36) of the protobuf PublicKey {type: Ed25519, data: 32 bytes}
_PEER_ID_HEADER = bytes.fromhex("002408011220")
_PEER_ID_BYTES = len(_PEER_ID_HEADER) + 32
_PEER_ID_CHARS_MAX = 64
_SIGNATURE_BYTES = 64

# 32 of each, so that a byte of the hash picks fairly
_MOODS = (
    "able agile amber bold brave bright brisk calm clever cosmic curious daring eager fair fleet gentle "
    "happy hardy jolly keen kind lively lucky merry noble plucky proud quick quiet sunny swift witty"
)
_COLOURS = (
    "ash azure beige black blue bronze brown copper coral cream crimson ebony gold green grey indigo "
    "ivory jade khaki lilac lime mauve mint olive orange pink plum red ruby silver teal white"
)
_ANIMALS = (
    "ant badger bat bear beaver bee crane crow deer dove eagle falcon finch fox gecko hare "
    "heron ibis jay koala lark lemur lynx mole moth newt otter owl raven robin seal wren"
)
_NAME_WORDS = tuple(tuple(words.split()) for words in (_MOODS, _COLOURS, _ANIMALS))


def friendly_name(peer: PeerId) -> str:
    """A name to say aloud, the same on every machine. For eyes only: two peers may share one."""
    digest = hashlib.sha256(peer.encode()).digest()
    return "-".join(words[byte % len(words)] for byte, words in zip(digest, _NAME_WORDS, strict=False))


def is_peer_id(text: str) -> bool:
    """Whether this is the id of an Ed25519 key, the only kind of peer we know."""
    return _public_key_bytes(text) is not None


def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """Whether the owner of this peer id signed `data`. Never raises, whatever a stranger sent."""
    public_key = _public_key_bytes(peer)
    if public_key is None or len(signature) != _SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _public_key_bytes(peer: str) -> bytes | None:
    if not peer.isascii() or len(peer) > _PEER_ID_CHARS_MAX:
        return None
    try:
        raw = base58.b58decode(peer)
    except ValueError:
        return None
    if len(raw) != _PEER_ID_BYTES or not raw.startswith(_PEER_ID_HEADER):
        return None
    return raw[len(_PEER_ID_HEADER) :]


class Identity:
    """The key pair of this peer. The private half never leaves this object and its file."""

    def __init__(self, path: Path, private_key: Ed25519PrivateKey) -> None:
        self.path = path
        self._private_key = private_key
        public_key = private_key.public_key().public_bytes_raw()
        self.peer_id: PeerId = base58.b58encode(_PEER_ID_HEADER + public_key).decode()

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the identity file, or write a new one (mode 0600, whole or not at all)."""
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                _write_new(path, Ed25519PrivateKey.generate())
            return cls(path, _parse_file(path))
        except OSError as error:
            raise ConfigError(
                f"identity file {path}: {error.strerror or error}; give this peer a folder that it may write to"
            ) from None

    def sign(self, data: bytes) -> bytes:
        return self._private_key.sign(data)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


class IdentityLock:
    """Held while the peer lives; a second peer with the same identity file on this machine is refused.

    The operating system drops the lock with the process, kill -9 included, so none is ever left over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock(f"{path}.lock", mode=0o600)

    def acquire(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock.acquire(timeout=0)  # pyright: ignore[reportUnknownMemberType]
        except Timeout:
            raise ConfigError(
                f"identity {self._path} is in use by another peer on this machine; stop that peer, "
                "or give this one an identity file of its own"
            ) from None
        except OSError as error:
            raise ConfigError(f"identity lock {self._path}.lock: {error.strerror or error}") from None

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> IdentityLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _write_new(path: Path, private_key: Ed25519PrivateKey) -> None:
    content = _FILE_HEADER + private_key.private_bytes_raw() + private_key.public_key().public_bytes_raw()
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another start was faster: its identity is the one
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _parse_file(path: Path) -> Ed25519PrivateKey:
    with path.open("rb") as file:
        content = file.read(_FILE_BYTES + 1)
        mode = os.fstat(file.fileno()).st_mode
    if len(content) != _FILE_BYTES or not content.startswith(_FILE_HEADER):
        raise ConfigError(
            f"identity file {path} is not an Ed25519 identity of Gossamer; restore it from a copy, "
            "or move it away and a new one is made (this peer then has a new id)"
        )
    seed, public_key = content[len(_FILE_HEADER) : -32], content[-32:]
    private_key = Ed25519PrivateKey.from_private_bytes(seed)
    if private_key.public_key().public_bytes_raw() != public_key:
        raise ConfigError(f"identity file {path} is damaged: its two halves do not belong together")
    if mode & 0o077:
        raise ConfigError(f"identity file {path} can be read by other users; run: chmod 600 {path}")
    return private_key
