"""Which device computes: asked for by name, proven by a small product on it."""

from __future__ import annotations

import torch

from protocols.errors import ConfigError

AUTO = "auto"  # the first that works of: a CUDA card, Apple's GPU, the CPU


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`; ConfigError when it is not there or does not work."""
    if name == AUTO:
        return next(device for device in map(torch.device, ("cuda", "mps", "cpu")) if _fault(device) is None)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu, cuda, cuda:N or mps") from None
    fault = _fault(device)
    if fault is not None:
        raise ConfigError(f"device {name!r} cannot be used here: {fault}; use --device cpu or auto")
    return device


def _fault(device: torch.device) -> str | None:
    """Why the device cannot train; None: it can."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA card"
    if device.type == "mps" and not torch.backends.mps.is_available():
        return "torch sees no Apple GPU"
    if device.type not in ("cpu", "cuda", "mps"):
        return f"{device.type} is not supported"
    try:
        sixteen = torch.ones(4, 4, device=device) @ torch.ones(4, 4, device=device)
        return None if float(sixteen.sum()) == 64.0 else "it computes wrongly"
    except RuntimeError as error:
        return str(error).splitlines()[0]
