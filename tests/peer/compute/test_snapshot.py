"""Foreign files: what is asked for, finite and fp32, or nothing."""

from __future__ import annotations

import hashlib
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from peer.compute import snapshot
from peer.compute.snapshot import CHUNK_BYTES, pack, unpack
from protocols.messages import TensorPacket
from protocols.run_spec import Codec

EXPECTED = {"w": (2, 3), snapshot.SQUARE: (6,)}


def a_state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0).view(2, 3), snapshot.SQUARE: torch.ones(6)}


def as_file(data: bytes) -> tuple[tuple[TensorPacket, ...], str]:
    """With a hash that fits: the sender is dishonest, not unlucky."""
    packet = TensorPacket(dtype="uint8", shape=(len(data),), codec=Codec.RAW, data=data)
    return (packet,), hashlib.sha256(data).hexdigest()


def test_a_large_state_travels_in_slices() -> None:
    """A slice is one message; 4 MiB is what the wire takes."""
    state = {"w": torch.randn(3, CHUNK_BYTES // 8)}
    packets, sha256 = pack(state, {"round": "3"})
    assert [packet.num_bytes for packet in packets[:-1]] == [CHUNK_BYTES] * (len(packets) - 1)
    assert all(packet.shape == (packet.num_bytes,) for packet in packets)
    found = unpack(packets, sha256, {"w": (3, CHUNK_BYTES // 8)})
    assert found is not None
    assert torch.equal(found["w"], state["w"])


@pytest.mark.parametrize(
    "change",
    [
        {"w": torch.zeros(3, 2)},
        {"w": torch.zeros(2, 3, dtype=torch.float64)},
        {"w": torch.full((2, 3), torch.nan)},
        {snapshot.SQUARE: torch.full((6,), -1e-9)},
    ],
    ids=["shape", "dtype", "nan", "negative square"],
)
def test_an_unfit_tensor_is_refused(change: dict[str, torch.Tensor]) -> None:
    """Any of these would surface rounds later, as a crash or as NaN in every replica."""
    assert unpack(*pack(a_state() | change, {}), EXPECTED) is None


def test_a_missing_tensor_is_refused_and_a_surplus_one_left_out() -> None:
    """A full state serves where the weights alone are needed."""
    packets, sha256 = pack(a_state(), {})
    found = unpack(packets, sha256, {"w": (2, 3)})
    assert found is not None
    assert found.keys() == {"w"}
    assert unpack(packets, sha256, {**EXPECTED, "more": (1,)}) is None


def test_a_file_larger_than_any_state_is_refused_before_it_is_read() -> None:
    """Memory for it would be the sender's choice."""
    huge = TensorPacket(dtype="uint8", shape=(32 << 20,), codec=Codec.RAW, data=bytes(32 << 20))
    assert unpack((huge,), hashlib.sha256(huge.data).hexdigest(), EXPECTED) is None


def test_a_pickle_is_not_opened() -> None:
    """Nor any other format that runs code."""
    assert unpack(*as_file(pickle.dumps(a_state())), EXPECTED) is None


@given(data=st.binary(max_size=300), cut=st.integers(0, 400), at=st.integers(0, 400))
def test_no_bytes_make_unpack_raise(data: bytes, cut: int, at: int) -> None:
    """Noise, a truncated file, a file with noise in the middle."""
    whole = save(a_state())
    for file in (data, whole[:cut], whole[:at] + data + whole[at:]):
        found = unpack(*as_file(file), EXPECTED)
        assert found is None or {name: tuple(tensor.shape) for name, tensor in found.items()} == EXPECTED
