"""HostConfig: what concerns this machine only; what all peers must agree on is `protocols.run_spec.RunSpec`.

Each value comes from the first that has it: flag, environment (`GOSSAMER_<FIELD>`), file (YAML), default; and
`Resolved.origins` remembers which. A misspelt field is refused wherever it stands, never silently ignored.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import platformdirs
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from peer.pointers import default_runtime_dir
from protocols.errors import ConfigError, describe_errors

ENV_PREFIX = "GOSSAMER_"
ENV_CONFIG = "GOSSAMER_CONFIG"  # names the file itself, hence not a field
DEFAULT_PORT = 31337
ADDRESS_FILE_WAIT_S = 60.0
ADDRESS_FILE_POLL_S = 0.2
CONFIG_BYTES_MAX = 1 << 20
LIST_FIELDS = ("initial_peers", "host_maddrs", "announce_maddrs")


class HostConfig(BaseModel):
    """Options of one peer. The field's description is also its help text on the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str | None = Field(
        default=None, description="the run: its file, or the id of one that the swarm knows"
    )
    initial_peers: tuple[str, ...] = Field(
        default=(), description="addresses of peers to join through; @FILE: one a line, waited for up to 60 s"
    )
    new_swarm: bool = Field(default=False, description="start a swarm: be its first peer, join nobody")
    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="TCP port; 0: any free one  [31337, or any if that is taken]",
    )
    host_maddrs: tuple[str, ...] = Field(
        default=(), description="addresses to listen on, instead of all interfaces at --port"
    )
    announce_maddrs: tuple[str, ...] = Field(
        default=(), description="addresses to tell others, where they differ (port forwarding, containers)"
    )
    use_relay: bool = Field(default=True, description="reach peers, and be reached, through relays")
    auto_nat: bool = Field(default=True, description="find out whether others can reach this machine")
    startup_timeout_s: float = Field(default=60.0, gt=0, le=600, description="longest wait for the network")
    stage: int | None = Field(
        default=None, ge=0, description="stage to serve; auto: where the swarm needs one"
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:N or mps")
    threads: int = Field(
        default=0, ge=0, le=1024, description="threads that torch computes with; 0: its choice"
    )
    data_dir: Path = Field(
        default_factory=lambda: Path(platformdirs.user_data_dir("gossamer")),
        description="identity and checkpoints",
    )
    identity_path: Path | None = Field(
        default=None, description="the peer's key, made on first use  [DATA_DIR/identity.key]"
    )
    runtime_dir: Path = Field(
        default_factory=default_runtime_dir, description="control sockets, found there by `gossamer status`"
    )
    cache_dir: Path = Field(
        default_factory=lambda: Path(platformdirs.user_cache_dir("gossamer")), description="tokenized texts"
    )
    checkpoint_every: int = Field(default=50, ge=0, description="rounds between checkpoints; 0: none")
    checkpoints_kept: int = Field(default=3, ge=1, le=1000, description="newest checkpoints to keep")
    resume: bool = Field(
        default=True, description="go on from the newest checkpoint of this run, if there is one"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level shown"
    )
    log_format: Literal["human", "json"] = Field(default="human", description="human or json")
    metrics_addr: str | None = Field(
        default=None, description="HOST:PORT for Prometheus, such as 127.0.0.1:9090  [off]"
    )
    flight_recorder: bool = Field(
        default=False, description="write events and actions to DATA_DIR/flight.jsonl"
    )

    @field_validator("stage", mode="before")
    @classmethod
    def _auto_stage(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "auto" and not value.isdecimal():
            raise ValueError(f"{value!r} is neither the number of a stage nor auto")
        return None if value == "auto" else value

    @field_validator(*LIST_FIELDS, mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Environment variables hold lists as text, separated by commas or spaces."""
        return tuple(part for part in re.split(r"[,\s]+", value) if part) if isinstance(value, str) else value

    @field_validator("metrics_addr")
    @classmethod
    def _host_and_port(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r".+:\d{1,5}", value):
            raise ValueError(f"{value!r} is not HOST:PORT, such as 127.0.0.1:9090")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> HostConfig:
        if self.host_maddrs and self.port is not None:
            raise ValueError("port and host_maddrs both say where to listen: give one of them")
        if self.new_swarm and self.initial_peers:
            raise ValueError("new_swarm joins nobody, yet initial_peers are given: drop one of them")
        return self

    @property
    def identity_file(self) -> Path:
        return self.identity_path or self.data_dir / "identity.key"

    @property
    def checkpoint_dir(self) -> Path:
        return self.data_dir / "checkpoints"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A valid HostConfig, and for each field where its value came from."""

    config: HostConfig
    origins: Mapping[str, str]


def resolve(
    flags: Mapping[str, Any], *, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> Resolved:
    """`flags` holds only what was given. `file` also comes from GOSSAMER_CONFIG."""
    environ = os.environ if environ is None else environ
    file = file or (Path(environ[ENV_CONFIG]) if environ.get(ENV_CONFIG) else None)
    from_env = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and name != ENV_CONFIG and value != ""
    }
    _refuse_unknown(from_env, lambda field: f"environment variable {ENV_PREFIX}{field.upper()}")
    from_file = _read_file(file) if file else {}
    _refuse_unknown(from_file, lambda field: f"{file}: {field}")
    values: dict[str, Any] = {}
    origins = dict.fromkeys(HostConfig.model_fields, "default")
    for layer, origin in ((from_file, f"file {file}"), (from_env, "environment"), (flags, "flag")):
        for name, value in layer.items():
            values[name], origins[name] = value, origin
    try:
        return Resolved(config=HostConfig.model_validate(values), origins=origins)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from None


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    fields = {str(fault["loc"][0]) for fault in error.errors() if fault["loc"]}
    given = ", ".join(f"{name} comes from {origins[name]}" for name in sorted(fields) if name in origins)
    return describe_errors(error) + (f" ({given})" if given else "")


def _refuse_unknown(names: Iterable[str], describe: Any) -> None:
    for name in names:
        if name not in HostConfig.model_fields:
            close = difflib.get_close_matches(name, HostConfig.model_fields, n=1)
            hint = f"did you mean {close[0]}?" if close else "`gossamer config show` lists all options"
            raise ConfigError(f"{describe(name)} is no option; {hint}")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            content = yaml.safe_load(file.read(CONFIG_BYTES_MAX))
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"configuration file {path} must hold lines of `option: value`")
    return {str(name): value for name, value in content.items()}


def read_initial_peers(values: Iterable[str], *, wait_s: float = ADDRESS_FILE_WAIT_S) -> tuple[str, ...]:
    """Addresses, with each @FILE replaced by its lines. Blocks while such a file does not exist yet.

    A bootstrap peer learns its address only when it runs; others are started at the same time and wait here.
    """
    addresses: list[str] = []
    deadline_s = time.monotonic() + wait_s
    for value in values:
        addresses += _read_addresses(Path(value[1:]), deadline_s) if value.startswith("@") else [value]
    return tuple(dict.fromkeys(addresses))


def _read_addresses(path: Path, deadline_s: float) -> list[str]:
    while True:
        try:
            lines = [line.strip() for line in path.read_text().splitlines()]
        except FileNotFoundError:
            lines = []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"initial peers: {path} cannot be read ({error})") from None
        addresses = [line for line in lines if line and not line.startswith("#")]
        if addresses:
            return addresses
        if time.monotonic() >= deadline_s:
            raise ConfigError(
                f"initial peers: {path} holds no address after {ADDRESS_FILE_WAIT_S:.0f} s; "
                "does the bootstrap peer run, with --write-address to that file?"
            )
        time.sleep(ADDRESS_FILE_POLL_S)


def listen_maddrs(config: HostConfig) -> tuple[str, ...]:
    """Where to listen. Without a chosen port: 31337, or any free one when that is taken."""
    if config.host_maddrs:
        return config.host_maddrs
    port = config.port
    if port is None:
        port = DEFAULT_PORT if is_port_free(DEFAULT_PORT) else 0
    return (f"/ip4/0.0.0.0/tcp/{port}",)


def is_port_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def write_text(path: Path, text: str) -> None:
    """All or nothing: a reader never sees half of it, and a full disk leaves what was there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
