"""Top-k with two bits a value: the bytes, their check, and what the sender keeps back (SparseLoCo, arXiv 2508.15706).

Of every chunk of 4,096 elements the 64 largest travel (of a shorter last one, one in 64 and at least one): a 12-bit
place in the chunk, and two bits that say sign and one of two levels. A chunk's levels are the mean magnitudes of its
kept elements below and above their mean, so a level is right on average. Order of the bytes:

    levels    bf16 low, high a chunk
    places    12 bits each, ascending within a chunk; two in three bytes, low bits first
    values    2 bits each, four in a byte, low bits first: bit 0 the sign, bit 1 the high level

0.227 bit an element: 14 x 64 / 4,096 = 0.219, and 32 bits of levels a chunk.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 4096
SHARE = 64  # one element in so many is kept
KEPT = CHUNK // SHARE
FEEDBACK_DECAY = 0.95


def topk_bytes(numel: int) -> int:
    num_kept = _num_kept(numel)
    return 4 * _num_chunks(numel) + math.ceil(3 * num_kept / 2) + math.ceil(num_kept / 4)


def _num_chunks(numel: int) -> int:
    return math.ceil(numel / CHUNK)


def _num_kept(numel: int) -> int:
    full, rest = divmod(numel, CHUNK)
    return full * KEPT + math.ceil(rest / SHARE)


def encode_topk(flat: Tensor, largest: float) -> Tensor:
    """uint8 bytes of a finite fp32 vector; no level exceeds `largest`, a bf16."""
    full = flat.numel() // CHUNK * CHUNK
    levels, places, values = zip(
        _keep(flat[:full].view(-1, CHUNK), KEPT), _keep(flat[full:].view(1, -1), _num_kept(flat.numel() - full)),
        strict=True,
    )  # fmt: skip
    return torch.cat([
        torch.cat(levels).clamp_(max=largest).to(torch.bfloat16).view(-1).view(torch.uint8),
        _pack_places(torch.cat([part.flatten() for part in places])),
        _pack_values(torch.cat([part.flatten() for part in values])),
    ])  # fmt: skip


def _keep(chunks: Tensor, num_kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [chunks, 2] fp32, places and values [chunks, num_kept] int32, of [chunks, width]."""
    if not chunks.numel():
        nothing = torch.zeros(0, dtype=torch.int32, device=chunks.device)
        return chunks.new_zeros(0, 2), nothing, nothing
    places = chunks.abs().topk(num_kept, dim=1, sorted=False).indices.sort(dim=1).values
    kept = chunks.gather(1, places)
    size = kept.abs()
    is_high = size > size.mean(1, keepdim=True)
    low = _mean_where(size, ~is_high)
    high = torch.where(is_high.any(1, keepdim=True), _mean_where(size, is_high), low)
    values = (kept < 0).int() | is_high.int() << 1
    return torch.cat([low, high], 1), places.int(), values


def _mean_where(size: Tensor, chosen: Tensor) -> Tensor:
    """Row by row; each element is divided first, as a sum of the largest numbers would overflow."""
    count = chosen.sum(1, keepdim=True).clamp_(min=1)
    return torch.where(chosen, size / count, 0.0).sum(1, keepdim=True)


def _pack_places(places: Tensor) -> Tensor:
    even, odd = F.pad(places, (0, len(places) % 2)).view(-1, 2).unbind(1)
    triples = torch.stack([even & 255, even >> 8 | (odd & 15) << 4, odd >> 4], 1).to(torch.uint8).flatten()
    return triples[: math.ceil(3 * len(places) / 2)]


def _pack_values(values: Tensor) -> Tensor:
    quads = F.pad(values, (0, -len(values) % 4)).view(-1, 4)
    return (quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6).to(torch.uint8)


def is_topk(data: bytes | bytearray | memoryview, numel: int, largest: float) -> bool:
    """Whether these `topk_bytes(numel)` decode to finite numbers up to `largest`, in the one form that we send."""
    if not numel:
        return True
    num_chunks, num_kept = _num_chunks(numel), _num_kept(numel)
    levels = _levels(data, num_chunks)
    if not (levels.min() >= 0 and levels.max() <= largest):  # a NaN fails both
        return False
    places, _, padding = _unpack(data, num_chunks, num_kept)
    chunk = np.arange(num_kept) // KEPT
    ascending = bool((np.diff(places)[np.diff(chunk) == 0] > 0).all())
    return ascending and bool((chunk * CHUNK + places).max() < numel) and not padding


def decode_topk(data: bytes | bytearray | memoryview, numel: int) -> Tensor:
    """The fp32 vector; nothing of what `is_topk` refuses reaches beyond it."""
    flat = torch.zeros(numel)
    if numel:
        num_chunks, num_kept = _num_chunks(numel), _num_kept(numel)
        places, values, _ = _unpack(data, num_chunks, num_kept)
        chunk = np.arange(num_kept) // KEPT
        size = _levels(data, num_chunks)[2 * chunk + (values >> 1)]
        flat.numpy()[np.minimum(chunk * CHUNK + places, numel - 1)] = np.where(values & 1, -size, size)
    return flat


def _levels(data: bytes | bytearray | memoryview, num_chunks: int) -> NDArray[np.float32]:
    """Low and high in turn, [2 chunks]; a bf16 is the upper half of a float32."""
    halves = np.frombuffer(data, np.uint16, 2 * num_chunks).astype(np.uint32)
    return np.frombuffer((halves << 16).tobytes(), np.float32)


def _unpack(
    data: bytes | bytearray | memoryview, num_chunks: int, num_kept: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
    """Places and values [num_kept]; and whether any bit is set behind the last ones."""
    at, num_bytes = 4 * num_chunks, math.ceil(3 * num_kept / 2)
    triples = np.zeros((math.ceil(num_kept / 2), 3), np.int64)
    triples.ravel()[:num_bytes] = np.frombuffer(data, np.uint8, num_bytes, at)
    first, middle, last = triples[:, 0], triples[:, 1], triples[:, 2]
    places = np.stack([first | (middle & 15) << 8, middle >> 4 | last << 4], 1).ravel()
    packed = np.frombuffer(data, np.uint8, offset=at + num_bytes).astype(np.int64)
    values = (packed[:, None] >> np.array([0, 2, 4, 6]) & 3).ravel()
    padding = bool(places[num_kept:].any() or values[num_kept:].any())
    return places[:num_kept], values[:num_kept], padding


class ErrorFeedback:
    """What a sender has kept back: added to what it sends next. Its own state; another stage starts without."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.kept_back = torch.zeros(size, device=device)

    def add_to(self, values: Tensor) -> Tensor:
        """What is to be sent, `values` and what was kept back before, which has faded by one step."""
        return values + FEEDBACK_DECAY * self.kept_back

    def keep(self, wanted: Tensor, sent: Tensor) -> None:
        """`sent`: as the partner decodes it."""
        self.kept_back = wanted - sent

    def miss(self, steps: int) -> None:
        """After an outage of so many outer steps: older news is worth less."""
        self.kept_back.mul_(FEEDBACK_DECAY**steps)
