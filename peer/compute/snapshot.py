"""A replica's state as a file of named tensors (safetensors) in slices for the wire, and back.

Weights carry their exported names; the rest of the state the names below, as flat fp32 vectors. Invariant: `unpack`
returns exactly the tensors that were asked for, finite and fp32, or None; foreign bytes are never executed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from protocols.messages import TensorPacket
from protocols.run_spec import Codec

CHUNK_BYTES = 4 << 20
HEADER_BYTES_MAX = 4 << 20  # of a file: names, shapes and offsets

SLOW_WEIGHTS = "outer.slow_weights"
OUTER_MOMENTUM = "outer.momentum"
PULL_LIMIT = "outer.pull_limit"
MOMENT = "adam.exp_avg"
SQUARE = "adam.exp_avg_sq"
STEPS = "adam.steps"  # one a part
RAMP = "adam.ramp_steps_left"

Shapes = Mapping[str, tuple[int, ...]]


def pack(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> tuple[tuple[TensorPacket, ...], str]:
    """Slices of the file, and the hash of the whole; `about` is for people who open it."""
    data = save({name: tensor.cpu() for name, tensor in tensors.items()}, metadata=dict(about))
    view = memoryview(data)
    slices = (view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES))
    packets = tuple(TensorPacket(dtype="uint8", shape=(len(s),), codec=Codec.RAW, data=s) for s in slices)
    return packets, hashlib.sha256(data).hexdigest()


def unpack(packets: tuple[TensorPacket, ...], sha256: str, expected: Shapes) -> dict[str, Tensor] | None:
    """The `expected` tensors of another peer's file, which may hold more; None when it is not what it should be."""
    # where only the weights are expected, the whole state may come: four vectors of their size more
    vectors_max = 1 if SLOW_WEIGHTS in expected else 5
    bytes_max = HEADER_BYTES_MAX + vectors_max * 4 * sum(prod(shape) for shape in expected.values())
    if sum(packet.num_bytes for packet in packets) > bytes_max:
        return None
    data = b"".join(packet.data for packet in packets)
    if hashlib.sha256(data).hexdigest() != sha256:
        return None
    try:
        found = load(data)
    except SafetensorError:
        return None
    return select(found, expected)


def select(found: Mapping[str, Tensor], expected: Shapes) -> dict[str, Tensor] | None:
    """The `expected` ones, each fp32 and finite; None when one is missing or unfit."""
    chosen = {name: found[name] for name in expected if name in found}
    fits = chosen.keys() == expected.keys() and all(
        tensor.dtype == torch.float32
        and tuple(tensor.shape) == expected[name]
        and bool(tensor.isfinite().all())
        for name, tensor in chosen.items()
    )
    # Adam takes the root of it
    return chosen if fits and not (SQUARE in chosen and bool((chosen[SQUARE] < 0).any())) else None
