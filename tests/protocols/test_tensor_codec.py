"""The codecs' promises: sizes, error bounds, and nothing non-finite in either direction."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.messages import TensorPacket
from protocols.run_spec import Codec
from protocols.tensor_codec import BLOCKS, check_packet, decode, encode, encoded_bytes
from protocols.topk_codec import CHUNK

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ALL_CODECS = tuple(Codec)
INT8_BLOCK = BLOCKS[Codec.INT8]
STEPS = {Codec.INT8: 254, Codec.INT4: 14}  # half steps in an absmax
HALF_ULP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY_STEP = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}

EDGE_CASES = {
    "zeros": torch.zeros(3, 5),
    "one element": torch.tensor([[-2.5]]),
    "0-d": torch.tensor(3.25),
    "empty": torch.zeros(0),
    "no rows": torch.zeros(0, 2 * INT8_BLOCK),
    "no columns": torch.zeros(4, 0),
    "constant": torch.full((2, 3, 4), -7.0),
    "denormal": torch.tensor([[1e-45, -1e-40, 0.0, 3e-39]]),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "strided": torch.arange(40.0).view(4, 10)[::2, ::3],
    "requires grad": torch.arange(6.0).view(2, 3).requires_grad_(),
    "largest": torch.tensor([[torch.finfo(torch.float32).max, torch.finfo(torch.float32).min, 1.0]]),
    "just longer than a block": torch.linspace(-1, 1, INT8_BLOCK + 1),
    "rows of several blocks": torch.linspace(-5, 3, 2 * (2 * INT8_BLOCK + 7)).view(2, -1),
    "longer than a chunk": torch.linspace(-3, 5, CHUNK + 65),
}


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast without making an infinity of the largest numbers."""
    info = torch.finfo(dtype)
    return tensor.clamp(info.min, info.max).to(dtype)


def error_bound(tensor: torch.Tensor, codec: Codec) -> torch.Tensor:
    """The table at the head of the module, element by element."""
    exact = torch.atleast_1d(tensor.detach().double())
    own = torch.maximum(exact.abs() * HALF_ULP[tensor.dtype], torch.tensor(TINY_STEP[tensor.dtype]))
    if codec is Codec.RAW:
        return torch.zeros_like(exact)
    if codec is Codec.BF16:
        return torch.maximum(exact.abs() / 256, torch.tensor(1e-40)) + own
    if codec is Codec.TOPK:
        rows, block = exact.flatten()[None], CHUNK
    else:
        rows, block = exact, BLOCKS[codec]
    absmax = torch.zeros_like(rows)
    for start in range(0, rows.shape[-1], block):
        part = rows[..., start : start + block]
        absmax[..., start : start + block] = part.abs().amax(-1, keepdim=True) if part.numel() else 0.0
    absmax = absmax.view(exact.shape)
    if codec is Codec.TOPK:
        return absmax * (1 + 2 * HALF_ULP[tensor.dtype]) + own
    rounding = absmax * (1e-6 + 2 * HALF_ULP[tensor.dtype]) + own
    return torch.maximum(absmax / STEPS[codec], torch.tensor(6e-39)) + rounding


def assert_round_trip(tensor: torch.Tensor, codec: Codec) -> None:
    packet = encode(tensor, codec)
    check_packet(packet, shape=tuple(tensor.shape), dtype=packet.dtype)
    decoded = decode(packet)
    assert decoded.shape == tensor.shape
    assert decoded.dtype == tensor.dtype
    assert torch.isfinite(decoded).all()
    error = torch.atleast_1d((decoded.double() - tensor.detach().double()).abs())
    assert (error <= error_bound(tensor, codec)).all()


@pytest.mark.parametrize("codec", ALL_CODECS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", EDGE_CASES)
def test_edge_cases_keep_shape_dtype_and_bound(case: str, dtype: torch.dtype, codec: Codec) -> None:
    """A fresh stage sends zeros, a dead layer constants, the last shard of a file one element."""
    assert_round_trip(as_dtype(EDGE_CASES[case], dtype), codec)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any finite float32 bits, in shapes with empty and long axes, then cast."""
    shape = draw(st.sampled_from([(), (1,), (7,), (2, 3), (3, 1, 5), (2, INT8_BLOCK + 3), (0, 4)]))
    seed = draw(st.integers(0, 2**32 - 1))
    exponents = draw(st.sampled_from([(0, 255), (100, 140), (0, 3), (250, 255)]))
    random = np.random.default_rng(seed)
    size = math.prod(shape)
    bits = random.integers(0, 1 << 23, size) | (random.integers(*exponents, size) << 23)
    values = bits.astype(np.uint32).view(np.float32) * random.choice([-1, 1], size).astype(np.float32)
    return as_dtype(torch.from_numpy(values).view(shape), draw(st.sampled_from(FLOATS)))


@settings(max_examples=150)
@given(tensor=tensors(), codec=st.sampled_from(ALL_CODECS))
def test_any_finite_tensor_round_trips_within_its_bound(tensor: torch.Tensor, codec: Codec) -> None:
    """Activations of an untrained model can be tiny, of a diverging one huge; both must arrive."""
    assert_round_trip(tensor, codec)


@settings(max_examples=60)
@given(
    codec=st.sampled_from(ALL_CODECS),
    dtype=st.sampled_from(FLOATS),
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
    at=st.integers(0, 14),
)
def test_sender_refuses_what_is_not_finite(codec: Codec, dtype: torch.dtype, value: float, at: int) -> None:
    """One NaN in a gradient would reach every replica within a few rounds."""
    tensor = torch.ones(15, dtype=dtype)
    tensor[at] = value
    with pytest.raises(LocalProtocolError, match="non-finite"):
        encode(tensor.view(3, 5), codec)


@settings(max_examples=200)
@given(
    codec=st.sampled_from(ALL_CODECS),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    noise=st.binary(min_size=40, max_size=40),
)
def test_the_check_passes_exactly_what_decodes_to_finite_numbers(
    codec: Codec, dtype: str, noise: bytes
) -> None:
    """Bytes of a stranger are judged before torch sees them, and judged as torch would read them."""
    data = noise[: encoded_bytes((2, 5), dtype, codec)]
    packet = TensorPacket(dtype=dtype, shape=(2, 5), codec=codec, data=data)
    try:
        check_packet(packet, shape=(2, 5), dtype=dtype)
        passed = True
    except RemoteProtocolError:
        passed = False
    finite = bool(torch.isfinite(decode(packet)).all())
    # the others have codes that we never send (-128, negative scales, places twice): refused, though they would decode
    assert passed == finite if codec in (Codec.RAW, Codec.BF16) else finite or not passed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_receiver_refuses_infinities_wherever_they_stand(dtype: torch.dtype, value: float, at: int) -> None:
    """A hostile sender does not call `encode`; the neighbours of the bad element are large, but fine."""
    tensor = torch.full((8,), -torch.finfo(dtype).max, dtype=dtype)
    tensor[at] = value
    data = tensor.view(torch.uint8).numpy().tobytes()
    name = str(dtype).removeprefix("torch.")
    packet = TensorPacket(dtype=name, shape=(8,), codec=Codec.RAW, data=data)
    with pytest.raises(RemoteProtocolError, match="non-finite"):
        check_packet(packet, shape=(8,), dtype=name)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 3e38])
@pytest.mark.parametrize(("codec", "elements"), [(Codec.INT8, bytes([127, 1])), (Codec.INT4, bytes([0xF9]))])
def test_receiver_refuses_a_scale_that_would_overflow(codec: Codec, elements: bytes, scale: float) -> None:
    """Whole numbers are always finite; their scale need not be."""
    data = np.float32(scale).tobytes() + elements
    packet = TensorPacket(dtype="float32", shape=(2,), codec=codec, data=data)
    with pytest.raises(RemoteProtocolError, match="non-finite"):
        check_packet(packet, shape=(2,), dtype="float32")


def test_each_fault_has_its_reason() -> None:
    """The counters of `status` are keyed by these words."""
    packet = encode(torch.ones(2, 3), Codec.RAW)
    faults = {
        "wrong-shape": replace(packet, shape=(3, 2)),
        "wrong-dtype": replace(packet, dtype="float16"),
        "wrong-size": replace(packet, data=packet.data[:-1]),
    }
    for reason, bad in faults.items():
        with pytest.raises(RemoteProtocolError) as caught:
            check_packet(bad, shape=(2, 3), dtype="float32")
        assert caught.value.reason == reason


@pytest.mark.parametrize("dtype", ["int64", "complex64", "object", ""])
def test_a_dtype_we_do_not_speak_is_refused(dtype: str) -> None:
    """Even when the receiver is careless enough to repeat the sender's word."""
    packet = TensorPacket(dtype=dtype, shape=(2,), codec=Codec.RAW, data=bytes(16))
    with pytest.raises(RemoteProtocolError, match="wrong-dtype"):
        check_packet(packet, shape=(2,), dtype=dtype)
    with pytest.raises(RemoteProtocolError, match="wrong-dtype"):
        decode(packet)


def test_decode_refuses_bytes_that_do_not_fit() -> None:
    """A second line of defence: `check_packet` should have seen it."""
    packet = encode(torch.ones(2, 3), Codec.BF16)
    with pytest.raises(RemoteProtocolError, match="wrong-size"):
        decode(replace(packet, shape=(2, 4)))


def test_a_file_travels_as_bytes() -> None:
    """Weights are sent as slices of a safetensors file."""
    file = bytes(range(256)) * 3
    packet = TensorPacket(dtype="uint8", shape=(len(file),), codec=Codec.RAW, data=file)
    check_packet(packet, shape=(len(file),), dtype="uint8")
    assert decode(packet).numpy().tobytes() == file
    with pytest.raises(LocalProtocolError, match="uint8"):
        encode(decode(packet), Codec.INT8)


def test_raw_neither_copies_out_nor_in() -> None:
    """A boundary tensor of 2 MB crosses eight codecs on its way; each copy would show."""
    tensor = torch.arange(6.0).view(2, 3)
    packet = encode(tensor, Codec.RAW)
    tensor[0, 0] = 42.0
    assert decode(packet)[0, 0] == 42.0
    received = bytearray(packet.data)
    view = decode(replace(packet, data=memoryview(received)))
    received[:4] = np.float32(7.0).tobytes()
    assert view[0, 0] == 7.0


@pytest.mark.parametrize("codec", ALL_CODECS)
def test_data_may_start_at_any_address(codec: Codec) -> None:
    """The transport's buffer has the header in front, of whatever length."""
    tensor = torch.linspace(-3, 3, 30).view(5, 6)
    packet = encode(tensor, codec)
    buffer = bytearray(b"\x00" * 3 + bytes(packet.data))
    moved = replace(packet, data=memoryview(buffer)[3:])
    check_packet(moved, shape=(5, 6), dtype="float32")
    assert torch.equal(decode(moved), decode(packet))


def test_int8_costs_one_byte_an_element_and_a_scale_a_block() -> None:
    """The bar: numel x width + 1 % for rows of at least 400."""
    assert encode(torch.randn(8, 1024), Codec.INT8).num_bytes == 8 * 1024 + 8 * 4
    assert encode(torch.randn(100_000), Codec.INT8).num_bytes <= 1.01 * 100_000


def test_int4_costs_half_a_byte_an_element_and_a_scale_a_block() -> None:
    """An odd last one has a byte for itself."""
    assert encode(torch.randn(8, 1024), Codec.INT4).num_bytes == 4 * 1024 + 8 * 4 * 4
    assert encode(torch.randn(3, 5), Codec.INT4).num_bytes == 8 + 3 * 4


@pytest.mark.parametrize(("byte", "at"), [(0x08, 4), (0x80, 4), (0xF8, 5)])
def test_receiver_refuses_half_bytes_that_we_never_send(byte: int, at: int) -> None:
    """0 stands for -8, which no scale gives; behind an odd last element there is nothing."""
    packet = encode(torch.tensor([7.0, -7.0, 3.0]), Codec.INT4)
    data = bytearray(packet.data)
    data[at] = byte
    with pytest.raises(RemoteProtocolError, match="non-finite"):
        check_packet(replace(packet, data=data), shape=(3,), dtype="float32")
