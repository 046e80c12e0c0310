"""torch tensors <-> TensorPacket. Sizes, bounds and what is refused.

Invariant: what `encode` lets out, `check_packet` lets in, and decoding what `check_packet` let in is finite.

    codec   bytes of n elements       largest error of a finite element x
    raw     width n                   0
    bf16    2 n                       |x| / 256, at least 1e-40
    int8    n + 4 a block             absmax of its block / 254, at least 6e-39; + 1e-6 absmax of rounding
    int4    n / 2 + 4 a block         absmax of its block / 14, at least 6e-39; + 1e-6 absmax of rounding
    topk    as `protocols.topk_codec` absmax of its chunk: most elements are left out

A block is a row (the last axis), cut where it is longer than BLOCKS says. All scales come first (fp32), then all
elements; of int4 two in a byte, low bits first, each + 8. A tensor whose own dtype is 16 bits wide adds that dtype's
rounding to these errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.messages import TensorPacket
from protocols.run_spec import Codec
from protocols.topk_codec import decode_topk, encode_topk, is_topk, topk_bytes

# Long enough that the scales are few (0.4 % and 3 % of the bytes), short enough that an outlier spoils little
BLOCKS = {Codec.INT8: 1024, Codec.INT4: 256}
_STEPS = {Codec.INT8: 127, Codec.INT4: 7}  # from zero to the scale's largest
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,  # bytes of a file: raw only, nothing to check
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SCALE_MIN = torch.finfo(torch.float32).tiny  # an absmax among the denormals would give a scale of 0

# Magnitudes are compared as integers: a float's bits without the sign grow with |x|; Inf and NaN are the largest.
_BITS_MAX = {  # the largest finite magnitude, by dtype as it travels
    "float32": (np.int32, np.uint32, 0x7F7F_FFFF),
    "bfloat16": (np.int16, np.uint16, 0x7F7F),
    "float16": (np.int16, np.uint16, 0x7BFF),
}
_BF16_MAX = {  # the largest bf16 that is still finite in the decoded dtype, and its bits
    "float32": (torch.finfo(torch.bfloat16).max, 0x7F7F),
    "bfloat16": (torch.finfo(torch.bfloat16).max, 0x7F7F),
    "float16": (65280.0, 0x477F),
}


def encoded_bytes(shape: Sequence[int], dtype: str, codec: Codec) -> int:
    """Length of a packet's data; RemoteProtocolError for a dtype we do not speak."""
    if dtype not in _DTYPES or (dtype == "uint8" and codec is not Codec.RAW):
        raise RemoteProtocolError("wrong-dtype", f"{dtype} as {codec.value}")
    numel = math.prod(shape)
    if codec in BLOCKS:
        elements = numel if codec is Codec.INT8 else math.ceil(numel / 2)
        return elements + 4 * _num_blocks(shape, codec)
    if codec is Codec.TOPK:
        return topk_bytes(numel)
    return numel * (2 if codec is Codec.BF16 else _DTYPES[dtype].itemsize)


def _num_blocks(shape: Sequence[int], codec: Codec) -> int:
    width = shape[-1] if shape else 1
    return math.prod(shape[:-1]) * math.ceil(width / BLOCKS[codec])


def _scale_max(dtype: str, codec: Codec) -> float:
    """So many steps of it are still finite in the decoded dtype; what its largest finite number gets at most."""
    finite = min(torch.finfo(torch.float32).max * (1 - 2**-23), torch.finfo(_DTYPES[dtype]).max)
    return finite / _STEPS[codec]


# ---- out ---------------------------------------------------------------------------------------------------


def encode(tensor: Tensor, codec: Codec) -> TensorPacket:
    """LocalProtocolError when the tensor is not finite.

    `data` of a raw packet is the tensor's own memory where that is contiguous: do not write to it afterwards.
    """
    tensor = tensor.detach()
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None or (dtype == "uint8" and codec is not Codec.RAW):
        raise LocalProtocolError(f"no packet for {tensor.dtype} as {codec.value}")
    data = _ENCODERS[codec](tensor, dtype)
    return TensorPacket(dtype=dtype, shape=tuple(tensor.shape), codec=codec, data=data)


def _encode_raw(tensor: Tensor, dtype: str) -> memoryview:
    data = _memory(tensor)
    if dtype in _BITS_MAX and not _is_bounded(data, *_BITS_MAX[dtype]):
        raise LocalProtocolError("non-finite tensor")
    return data


def _encode_bf16(tensor: Tensor, dtype: str) -> memoryview:
    bound, bits = _BF16_MAX[dtype]
    data = _memory(tensor.to(torch.bfloat16))
    if _is_bounded(data, np.int16, np.uint16, bits):
        return data
    if not torch.isfinite(tensor).all():
        raise LocalProtocolError("non-finite tensor")
    return _memory(tensor.clamp(-bound, bound).to(torch.bfloat16))  # the largest values round up to Inf


def _encode_int8(tensor: Tensor, dtype: str) -> memoryview:
    scales, elements = _blocks(tensor, Codec.INT8)
    return _joined(scales, elements.to(torch.int8).view(torch.uint8))


def _encode_int4(tensor: Tensor, dtype: str) -> memoryview:
    scales, elements = _blocks(tensor, Codec.INT4)
    nibbles = F.pad((elements + 8).to(torch.uint8), (0, elements.numel() % 2)).view(-1, 2)
    return _joined(scales, nibbles[:, 0] | nibbles[:, 1] << 4)


def _blocks(tensor: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Scales and whole numbers, both flat and fp32."""
    if not tensor.numel():
        return torch.zeros(0), torch.zeros(0)
    width, block = tensor.shape[-1] if tensor.ndim else 1, BLOCKS[codec]
    rows = tensor.float().reshape(-1, width)
    if width <= block:
        scales, elements = _quantise(rows, codec)
    else:
        padded = F.pad(rows, (0, -width % block))
        scales, elements = _quantise(padded.view(-1, block), codec)
        elements = elements.view(padded.shape)[:, :width]
    return scales.flatten(), elements.flatten()


def _quantise(blocks: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Scales [blocks, 1] and whole numbers, of float32 [blocks, width]."""
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    absmax = torch.maximum(high, -low)
    if not torch.isfinite(absmax).all():  # a NaN or Inf anywhere in a block shows here
        raise LocalProtocolError("non-finite tensor")
    scales = absmax.div_(_STEPS[codec]).clamp_(_SCALE_MIN, _scale_max("float32", codec))
    return scales, (blocks / scales).round_()


def _joined(scales: Tensor, elements: Tensor) -> memoryview:
    return _memory(torch.cat([scales.view(torch.uint8), elements]))


def _encode_topk(tensor: Tensor, dtype: str) -> memoryview:
    if not torch.isfinite(tensor).all():
        raise LocalProtocolError("non-finite tensor")
    return _memory(encode_topk(tensor.float().flatten(), _BF16_MAX[dtype][0]))


_ENCODERS = {
    Codec.RAW: _encode_raw,
    Codec.BF16: _encode_bf16,
    Codec.INT8: _encode_int8,
    Codec.INT4: _encode_int4,
    Codec.TOPK: _encode_topk,
}


def _memory(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().view(-1) if tensor.ndim else tensor.view(1)
    return flat.view(torch.uint8).cpu().numpy().data


# ---- in ----------------------------------------------------------------------------------------------------


def check_packet(packet: TensorPacket, *, shape: Sequence[int], dtype: str) -> None:
    """RemoteProtocolError unless the packet has this shape and dtype, as many bytes, and only finite elements.

    Two integer reductions over the bytes where they lie: no copy, no torch.
    """
    if tuple(packet.shape) != tuple(shape):
        raise RemoteProtocolError("wrong-shape", f"{packet.shape} for {tuple(shape)}")
    if packet.dtype != dtype:
        raise RemoteProtocolError("wrong-dtype", f"{packet.dtype} for {dtype}")
    num_bytes = encoded_bytes(shape, dtype, packet.codec)
    if packet.num_bytes != num_bytes:
        raise RemoteProtocolError("wrong-size", f"{packet.num_bytes} bytes for {num_bytes}")
    if not _is_finite(packet):
        raise RemoteProtocolError("non-finite")


def _is_finite(packet: TensorPacket) -> bool:
    """Of a packet with the right number of bytes."""
    if packet.dtype == "uint8":
        return True
    if packet.codec is Codec.RAW:
        return _is_bounded(packet.data, *_BITS_MAX[packet.dtype])
    if packet.codec is Codec.BF16:
        return _is_bounded(packet.data, np.int16, np.uint16, _BF16_MAX[packet.dtype][1])
    if packet.codec is Codec.TOPK:
        return is_topk(packet.data, math.prod(packet.shape), _BF16_MAX[packet.dtype][0])
    scales = np.frombuffer(packet.data, np.float32, _num_blocks(packet.shape, packet.codec))
    # a negative scale or a NaN fails the comparison
    if scales.size and not (scales.min() >= 0 and scales.max() <= _scale_max(packet.dtype, packet.codec)):
        return False
    if packet.codec is Codec.INT4:
        return _are_nibbles(packet, scales.nbytes)
    elements = np.frombuffer(packet.data, np.int8, offset=scales.nbytes)
    return not elements.size or bool(elements.min() >= -127)  # -128 is no symmetric code


def _are_nibbles(packet: TensorPacket, at: int) -> bool:
    """Each from 1 to 15 (0 is no symmetric code); behind an odd last one 0, as there is nothing."""
    packed = np.frombuffer(packet.data, np.uint8, offset=at)
    low, high = packed & 15, packed >> 4
    if math.prod(packet.shape) % 2:
        return bool(low.all() and high[:-1].all() and high[-1] == 0)
    return bool(low.all() and high.all())


def _is_bounded(
    data: bytes | bytearray | memoryview,
    signed: type[np.signedinteger],
    unsigned: type[np.unsignedinteger],
    bits_max: int,
) -> bool:
    """Whether no element's bits, without the sign, exceed `bits_max`."""
    if not len(data):
        return True
    # as signed integers the largest is the largest positive float; as unsigned ones, the largest negative float
    if np.frombuffer(data, signed).max() > bits_max:
        return False
    sign = np.iinfo(signed).max + 1
    return int(np.frombuffer(data, unsigned).max()) <= sign + bits_max


def decode(packet: TensorPacket) -> Tensor:
    """On the CPU, in the packet's dtype; RemoteProtocolError when its bytes do not fit its shape.

    Of a raw packet in writable memory it is a view: whoever owns the packet owns the tensor.
    """
    if packet.num_bytes != encoded_bytes(packet.shape, packet.dtype, packet.codec):
        raise RemoteProtocolError("wrong-size", f"{packet.num_bytes} bytes for {packet.shape}")
    dtype = _DTYPES[packet.dtype]
    if not packet.num_bytes:
        return torch.empty(packet.shape, dtype=dtype)
    view = memoryview(packet.data)
    data = bytearray(view) if view.readonly else view
    if packet.codec is Codec.RAW:
        return torch.frombuffer(data, dtype=dtype).view(packet.shape)
    if packet.codec is Codec.BF16:
        return torch.frombuffer(data, dtype=torch.bfloat16).to(dtype).view(packet.shape)
    if packet.codec is Codec.TOPK:
        return decode_topk(data, math.prod(packet.shape)).to(dtype).view(packet.shape)
    return _decode_blocks(data, packet.shape, packet.codec).to(dtype)


def _decode_blocks(data: bytearray | memoryview, shape: tuple[int, ...], codec: Codec) -> Tensor:
    num_blocks = _num_blocks(shape, codec)
    width, block = shape[-1] if shape else 1, BLOCKS[codec]
    scales = torch.frombuffer(data, dtype=torch.float32, count=num_blocks)
    if codec is Codec.INT8:
        elements = torch.frombuffer(data, dtype=torch.int8, offset=4 * num_blocks)
    else:
        packed = torch.frombuffer(data, dtype=torch.uint8, offset=4 * num_blocks)
        elements = torch.stack([packed & 15, packed >> 4], 1).flatten()[: math.prod(shape)].to(torch.int8) - 8
    rows = elements.view(-1, width)
    if width <= block:
        return (rows * scales[:, None]).view(shape)
    scale_of_row = scales.view(len(rows), -1).repeat_interleave(block, dim=1)[:, :width]
    return (rows * scale_of_row).view(shape)
