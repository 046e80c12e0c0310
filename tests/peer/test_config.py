"""HostConfig: which of flag, environment, file and default wins, and what a person is told when a value is wrong."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from peer.config import HostConfig, listen_maddrs, read_initial_peers, resolve, write_text
from protocols.errors import ConfigError


def a_file(folder: Path, text: str) -> Path:
    path = folder / "gossamer.yaml"
    path.write_text(text)
    return path


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path):
    file = a_file(tmp_path, "stage: 1\ndevice: cuda\nlog_level: debug\n")
    environ = {"GOSSAMER_STAGE": "2", "GOSSAMER_DEVICE": "mps", "PATH": "/bin"}
    resolved = resolve({"stage": 3}, environ=environ, file=file)
    config = resolved.config
    assert (config.stage, config.device, config.log_level, config.checkpoints_kept) == (3, "mps", "debug", 3)
    assert [resolved.origins[name] for name in ("stage", "device", "log_level", "checkpoints_kept")] == [
        "flag",
        "environment",
        f"file {file}",
        "default",
    ]


def test_the_file_may_be_named_by_the_environment(tmp_path: Path):
    environ = {"GOSSAMER_CONFIG": str(a_file(tmp_path, "device: cpu\n"))}
    assert resolve({}, environ=environ).config.device == "cpu"


@pytest.mark.parametrize(
    "text", ["/ip4/1.2.3.4/tcp/1/p2p/x,@peers.txt", "/ip4/1.2.3.4/tcp/1/p2p/x  @peers.txt\n"]
)
def test_lists_in_the_environment_are_separated_by_commas_or_spaces(text: str):
    config = resolve({}, environ={"GOSSAMER_INITIAL_PEERS": text}).config
    assert config.initial_peers == ("/ip4/1.2.3.4/tcp/1/p2p/x", "@peers.txt")


def test_an_empty_variable_counts_as_absent():
    """Compose files pass `GOSSAMER_X=` for what the person left out."""
    assert resolve({}, environ={"GOSSAMER_PORT": "", "GOSSAMER_STAGE": "auto"}).config == HostConfig()


@pytest.mark.parametrize(
    ("environ", "text", "message"),
    [
        (
            {"GOSSAMER_INITAL_PEERS": "x"},
            "",
            "GOSSAMER_INITAL_PEERS is no option; did you mean initial_peers?",
        ),
        ({}, "devise: cpu", "devise is no option; did you mean device?"),
        ({"GOSSAMER_PORT": "70000"}, "", "port: .* less than or equal to 65535 .port comes from environment"),
        ({}, "stage: first", "stage: .*stage comes from file"),
        ({}, "- a\n- b", "must hold lines"),
        ({}, "a: [", "is not YAML"),
        ({"GOSSAMER_METRICS_ADDR": "9090"}, "", "HOST:PORT"),
        ({"GOSSAMER_PORT": "1", "GOSSAMER_HOST_MADDRS": "/ip4/0.0.0.0/tcp/1"}, "", "give one of them"),
        ({"GOSSAMER_NEW_SWARM": "yes", "GOSSAMER_INITIAL_PEERS": "x"}, "", "drop one of them"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(
    tmp_path: Path, environ: dict[str, str], text: str, message: str
):
    with pytest.raises(ConfigError, match=message):
        resolve({}, environ=environ, file=a_file(tmp_path, text))


def test_a_missing_configuration_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere.yaml cannot be read: No such file"):
        resolve({}, environ={}, file=tmp_path / "nowhere.yaml")


def test_addresses_from_a_file_are_waited_for(tmp_path: Path):
    """A bootstrap peer and those that join through it are started together; the address comes later."""
    file = tmp_path / "bootstrap.addr"
    text = "# public\n/ip4/1.1.1.1/tcp/1/p2p/a\n\n/dns4/b/tcp/2/p2p/b\n"
    writer = threading.Timer(0.3, lambda: write_text(file, text))
    writer.start()
    addresses = read_initial_peers(["/ip4/9.9.9.9/tcp/9/p2p/c", f"@{file}"], wait_s=30)
    writer.join()
    assert addresses == ("/ip4/9.9.9.9/tcp/9/p2p/c", "/ip4/1.1.1.1/tcp/1/p2p/a", "/dns4/b/tcp/2/p2p/b")


def test_an_address_file_that_never_comes_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no.addr holds no address .* does the bootstrap peer run"):
        read_initial_peers([f"@{tmp_path / 'no.addr'}"], wait_s=0.0)


def test_a_taken_default_port_falls_back_but_a_chosen_one_stays():
    """Two peers on one machine just work; a person who chose a port has forwarded it and must be told instead."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("0.0.0.0", 31337))
            holder.listen()
        except OSError:
            pass  # somebody else holds it: as good
        assert listen_maddrs(HostConfig()) == ("/ip4/0.0.0.0/tcp/0",)
        assert listen_maddrs(HostConfig(port=31337)) == ("/ip4/0.0.0.0/tcp/31337",)
    assert listen_maddrs(HostConfig(host_maddrs=("/ip4/10.0.0.1/tcp/5",))) == ("/ip4/10.0.0.1/tcp/5",)


def test_a_failed_write_leaves_nothing(tmp_path: Path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="taken cannot be written"):
        write_text(tmp_path / "taken", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
