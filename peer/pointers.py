"""How tools on this machine find running peers: one small JSON file a peer in the runtime folder.

Invariant: a pointer whose socket nobody listens on is stale, whoever left it (a killed peer cannot clean up);
readers drop it on sight. The socket lies beside the pointer unless that path is too long for the kernel.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from protocols.errors import ConfigError
from protocols.swarm import PeerId

SOCKET_PATH_BYTES_MAX = 103  # Linux allows 107, macOS 103
ID_TAIL = 8  # characters of the peer id in file names
POINTER_BYTES_MAX = 4096


def default_runtime_dir() -> Path:
    """The user's folder for sockets: lost at log-out, which suits them."""
    session = os.environ.get("XDG_RUNTIME_DIR")
    return Path(session) / "gossamer" if session else _temporary_folder()


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"gossamer-{os.getuid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """Where a running peer's control plane listens."""

    peer: PeerId
    name: str
    run_id: str
    pid: int
    socket_path: str


def private_folder(folder: Path) -> Path:
    """Make `folder` for this user alone; ConfigError says why it cannot be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"folder {folder} cannot be made ({error.strerror}): choose another --runtime-dir"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"folder {folder} is not writable for you: choose another --runtime-dir")
    if folder == _temporary_folder() and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
        raise ConfigError(f"folder {folder} belongs to somebody else: choose another --runtime-dir")
    return folder


def socket_path_for(runtime_dir: Path, peer: PeerId) -> Path:
    """`<runtime_dir>/<id tail>.sock`, or a short path in the temporary folder when that is too long."""
    path = private_folder(runtime_dir).resolve() / f"{peer[-ID_TAIL:]}.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return path
    path = private_folder(_temporary_folder()) / path.name
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"the path of a Unix socket may have {SOCKET_PATH_BYTES_MAX} bytes and {path} is longer: "
            "choose a shorter --runtime-dir"
        )
    return path


def write_pointer(runtime_dir: Path, pointer: Pointer) -> Path:
    path = runtime_dir / f"{pointer.peer[-ID_TAIL:]}.json"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(asdict(pointer)))
    temporary.replace(path)
    return path


def find_peers(runtime_dir: Path) -> list[Pointer]:
    """Pointers of peers that listen, by peer id; what dead peers left behind is removed."""
    found = []
    for path in sorted(runtime_dir.glob("*.json")):
        pointer = _read(path)
        if pointer is None:
            continue
        if is_listening(pointer.socket_path):
            found.append(pointer)
        else:
            for leftover in (path, Path(pointer.socket_path)):
                leftover.unlink(missing_ok=True)
    return sorted(found, key=lambda pointer: pointer.peer)


def is_listening(socket_path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(socket_path)
        except OSError:
            return False
    return True


def _read(path: Path) -> Pointer | None:
    try:
        with path.open("rb") as file:
            return Pointer(**json.loads(file.read(POINTER_BYTES_MAX)))
    except (OSError, ValueError, TypeError):
        return None  # just removed, or not ours
