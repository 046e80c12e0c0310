"""Top-k's bytes: how many, what they hold, which foreign ones are refused; and the sender's memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import RemoteProtocolError
from protocols.messages import TensorPacket
from protocols.run_spec import Codec
from protocols.tensor_codec import check_packet, decode, encode
from protocols.topk_codec import CHUNK, FEEDBACK_DECAY, KEPT, ErrorFeedback, topk_bytes

FLAT = torch.randn(2 * CHUNK + 300, generator=torch.Generator().manual_seed(1))


def decoded(flat: torch.Tensor) -> torch.Tensor:
    return decode(encode(flat, Codec.TOPK))


@given(numel=st.integers(0, 3 * CHUNK))
def test_bytes_are_what_the_formula_says(numel: int):
    """14 bits for each kept element, 32 for each chunk, rounded up to bytes twice."""
    chunks = [min(CHUNK, numel - start) for start in range(0, numel, CHUNK)]
    kept = sum(math.ceil(size / 64) for size in chunks)
    assert topk_bytes(numel) == 4 * len(chunks) + math.ceil(12 * kept / 8) + math.ceil(2 * kept / 8)
    assert encode(FLAT[:1].expand(numel), Codec.TOPK).num_bytes == topk_bytes(numel)


def test_long_vectors_cost_less_than_a_fortieth_of_fp32_by_far():
    """0.219 bits an element for places and values, and 32 bits a chunk for its levels: 1/141."""
    assert topk_bytes(256 * CHUNK) * 8 / (256 * CHUNK) == 14 * 64 / 4096 + 32 / 4096


def test_the_largest_arrive_with_their_sign_and_the_right_mean():
    """Of each chunk its own 64 largest, of the shorter last one 5 of 300."""
    arrived = decoded(FLAT)
    for start in range(0, len(FLAT), CHUNK):
        part, got = FLAT[start : start + CHUNK], arrived[start : start + CHUNK]
        largest = part.abs().topk(KEPT if len(part) == CHUNK else 5).indices
        assert set(got.nonzero().flatten().tolist()) == set(largest.tolist())
        assert torch.equal(got[largest].sign(), part[largest].sign())
        assert got.abs().sum() == pytest.approx(float(part[largest].abs().sum()), rel=1 / 256)
        assert len(got[largest].abs().unique()) == 2


def test_two_levels_lose_little_of_what_is_kept():
    """Of the energy of the kept elements; what is lost, like all that is left out, stays at the sender."""
    arrived = decoded(FLAT)
    kept = FLAT[arrived != 0]
    assert (arrived[arrived != 0] - kept).square().sum() < 0.02 * kept.square().sum()


def tampered(change: str) -> TensorPacket:
    """A packet of two chunks: 8 bytes of levels, 96 + 96 of places, 32 of values."""
    packet = encode(FLAT[: 2 * CHUNK], Codec.TOPK)
    data = bytearray(packet.data)
    if change == "a place twice":
        data[8:11] = bytes([1, 0x10, 0])  # places 1 and 1
    elif change == "descending places":
        data[8:11] = bytes([5, 0x10, 0])  # 5, then 1
    else:
        data[0:2] = torch.tensor([float(change)]).bfloat16().view(torch.uint8).numpy().tobytes()
    return replace(packet, data=data)


@pytest.mark.parametrize("change", ["a place twice", "descending places", "nan", "inf", "-1.0"])
def test_the_receiver_refuses_what_we_never_send(change: str):
    """A place twice would let one element count double at some decoders; a level may not overflow."""
    with pytest.raises(RemoteProtocolError, match="non-finite"):
        check_packet(tampered(change), shape=(2 * CHUNK,), dtype="float32")


def test_the_receiver_refuses_a_place_behind_the_end():
    """Of a chunk of 300 elements 12 bits can name 3,796 places that do not exist."""
    packet = encode(FLAT[:300], Codec.TOPK)
    data = bytearray(packet.data)
    data[4 + 6 : 4 + 8] = b"\xff\x0f"  # the fifth and last place: 4,095
    with pytest.raises(RemoteProtocolError, match="non-finite"):
        check_packet(replace(packet, data=data), shape=(300,), dtype="float32")


@given(noise=st.binary(min_size=topk_bytes(300), max_size=topk_bytes(300)))
def test_no_bytes_make_the_decoder_write_elsewhere(noise: bytes):
    """Checked or not, there are 300 elements at the end."""
    packet = TensorPacket(dtype="float32", shape=(300,), codec=Codec.TOPK, data=noise)
    assert decode(packet).shape == (300,)


def test_what_is_left_out_is_sent_later():
    """Error feedback: of a constant signal all has been sent in the long run, up to what waits."""
    feedback, signal = ErrorFeedback(CHUNK), FLAT[:CHUNK]
    total = torch.zeros(CHUNK)
    for _ in range(400):
        wanted = feedback.add_to(signal)
        sent = decoded(wanted)
        feedback.keep(wanted, sent)
        total += sent
    seen = torch.dot(total, signal) / (400 * signal.square().sum())
    assert 0.5 < seen < 1.0  # the rest has faded before its turn came: 0.95 a step
    assert (total != 0).float().mean() > 0.25  # though one in 64 is sent each time


def test_what_waits_fades_by_one_step_each_time_and_after_an_outage_by_all_missed():
    """Old news about a loss that others have gone down meanwhile."""
    feedback = ErrorFeedback(3)
    feedback.keep(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.0, 2.0, 0.0]))
    assert feedback.add_to(torch.zeros(3)).tolist() == pytest.approx([FEEDBACK_DECAY, 0, 4 * FEEDBACK_DECAY])
    feedback.miss(3)
    assert feedback.kept_back.tolist() == pytest.approx([FEEDBACK_DECAY**3, 0, 4 * FEEDBACK_DECAY**3])
