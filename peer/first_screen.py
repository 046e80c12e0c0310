"""What a person sees first: who this peer is, what it does, where it can be reached, and how others join."""

from __future__ import annotations

from peer import __version__
from peer.config import HostConfig
from peer.status import PeerStatus
from protocols.admission import stage_parameters
from protocols.run_spec import PROTOCOL_VERSION, RunSpec
from protocols.shadows import BYTES_PER_WEIGHT as SHADOW_BYTES_PER_WEIGHT
from protocols.shadows import shadowed_stages

BYTES_PER_WEIGHT = 6 * 4  # weight, gradient, two Adam moments, slow weight, outer momentum: all fp32
LOOPBACK = ("/ip4/127.", "/ip6/::1/")


def first_screen(status: PeerStatus, config: HostConfig, spec: RunSpec) -> str:
    stages = f"stages 0 to {spec.num_stages - 1}"
    chosen = (
        f"auto: where the swarm needs one of {stages}"
        if config.stage is None
        else f"{config.stage} of {stages}"
    )
    lines = [
        *_head(status),
        f"  stage      {chosen}",
        f"  device     {status.device}, about {memory_mib(spec, config.stage):.0f} MiB for its stage",
    ]
    if config.metrics_addr:
        lines.append(f"  metrics    http://{config.metrics_addr}/metrics")
    return "\n".join(lines + _addresses(status))


def bootstrap_screen(status: PeerStatus) -> str:
    return "\n".join(
        [*_head(status), "  stage      none: introduces peers to each other", *_addresses(status)]
    )


def _head(status: PeerStatus) -> list[str]:
    return [
        f"Gossamer {__version__}, protocol {PROTOCOL_VERSION}",
        f"  peer       {status.name}  {status.peer}",
        f"  run        {status.run_id or 'any'}",
    ]


def _addresses(status: PeerStatus) -> list[str]:
    if not status.addresses:
        return []
    lines = [
        f"  {'' if position else 'reachable':<10} {_labelled(address)}"
        for position, address in enumerate(status.addresses)
    ]
    run = status.run_id or "RUN_FILE"
    return [
        *lines,
        "  others join with",
        f"    gossamer join --run {run} --initial-peers {status.addresses[0]}",
    ]


def _labelled(address: str) -> str:
    return f"{address}  (this machine only)" if address.startswith(LOOPBACK) else address


def memory_mib(spec: RunSpec, stage: int | None) -> float:
    """Weights with all that is kept for each, the stashes, and shadows; the worst stage when it is not chosen yet."""
    stages = range(spec.num_stages) if stage is None else (stage,)
    weights_bytes = max(stage_parameters(spec, s) * BYTES_PER_WEIGHT + _shadow_bytes(spec, s) for s in stages)
    rows, seq_len, width = spec.boundary_shape
    stash_bytes = spec.rounds.slots * rows * seq_len * width * 4
    return (weights_bytes + stash_bytes) / 2**20


def _shadow_bytes(spec: RunSpec, stage: int) -> int:
    return sum(
        SHADOW_BYTES_PER_WEIGHT * stage_parameters(spec, kept) for kept in shadowed_stages(stage, spec)
    )
