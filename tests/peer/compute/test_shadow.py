"""A shadow has its owner's bits, or is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peer.compute.shadow import (
    ShadowHolder,
    ShadowOwner,
    ShadowUpdate,
    holder_stage,
    is_due,
    shadowed_stage,
    traffic_share,
    weights_sha256,
)
from peer.compute.stage_runtime import StageRuntime
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.run_spec import Codec
from protocols.tensor_codec import encode
from tests.peer.compute.replica import a_spec

SIZE = 3_000


def weights(seed: int = 0, scale: float = 0.05) -> Tensor:
    return scale * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def a_pair(codec: Codec = Codec.RAW) -> tuple[ShadowOwner, ShadowHolder]:
    return ShadowOwner(3, "schema", codec), ShadowHolder(3, "schema", SIZE, bytes_max=4 * SIZE)


def held_of(holder: ShadowHolder) -> Tensor:
    restored = holder.restore()
    assert restored is not None
    return restored.weights


def a_change(owner: ShadowOwner, slow: Tensor, codec: Codec, step: int) -> ShadowUpdate:
    update = owner.change(slow, codec, round_=10 * step, outer_step=step)
    assert update is not None
    return update


@given(num_stages=st.integers(2, 40))
def test_the_ring_has_one_holder_for_every_stage(num_stages: int):
    """The last stage's peers keep both ends of the model."""
    held = [shadowed_stage(stage, num_stages) for stage in range(num_stages)]
    assert sorted(held) == list(range(num_stages))
    assert held[-1] == 0
    for stage in range(num_stages):
        assert shadowed_stage(holder_stage(stage, num_stages), num_stages) == stage


def test_a_whole_copy_in_fp32_is_exact_and_says_of_when_it_is():
    owner, holder = a_pair()
    slow = weights()
    assert holder.restore() is None
    holder.take(owner.whole(slow, round_=50, outer_step=5))
    restored = holder.restore()
    assert restored is not None
    assert torch.equal(restored.weights, slow)
    assert (restored.round, restored.outer_step, holder.round) == (50, 5, 50)
    assert holder.num_bytes == 4 * SIZE


def test_a_whole_copy_in_bf16_has_half_the_bytes_and_its_rounding():
    owner, holder = a_pair(Codec.BF16)
    update = owner.whole(weights(), round_=50, outer_step=5)
    assert update.packet.num_bytes == 2 * SIZE
    holder.take(update)
    torch.testing.assert_close(held_of(holder), weights(), atol=0, rtol=2**-8)


def test_training_on_does_not_change_what_was_sent():
    """A raw packet may be the sender's own memory."""
    owner, holder = a_pair()
    slow = weights()
    update = owner.whole(slow, round_=50, outer_step=5)
    slow.add_(1.0)
    holder.take(update)
    assert torch.equal(held_of(holder), weights())


def test_neither_restored_weights_nor_the_packet_share_memory_with_the_shadow():
    owner, holder = a_pair()
    update = owner.whole(weights(), round_=50, outer_step=5)
    holder.take(update)
    held_of(holder).zero_()
    torch.frombuffer(update.packet.data, dtype=torch.float32).zero_()
    assert torch.equal(held_of(holder), weights())


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("whole", [Codec.RAW, Codec.BF16])
def test_changes_keep_owner_and_holder_equal_bit_for_bit_and_no_error_builds_up(whole: Codec, codec: Codec):
    """A hundred outer steps; each change also carries what the ones before it lost."""
    owner, holder = a_pair(whole)
    slow = weights()
    holder.take(owner.whole(slow, round_=0, outer_step=0))
    for step in range(1, 101):
        slow = slow + weights(step, scale=1e-3)
        update = a_change(owner, slow, codec, step)
        holder.take(update)
        assert weights_sha256(held_of(holder)) == update.sha256
    # of the last change alone: absmax / 254 for int8, 1/256 for bf16; top-k is behind by what it left out
    limit = {Codec.RAW: 1e-7, Codec.BF16: 3e-5, Codec.INT8: 3e-5, Codec.INT4: 5e-4, Codec.TOPK: 5e-2}[codec]
    assert float((held_of(holder) - slow).abs().max()) < limit
    assert holder.round == 1_000


def test_tiny_changes_add_up():
    """A thousand outer steps of 1/16 bf16 ulp each would vanish, were the shadow itself kept in bf16."""
    owner, holder = a_pair(Codec.BF16)
    slow = torch.ones(SIZE)
    holder.take(owner.whole(slow, round_=0, outer_step=0))
    for step in range(1, 1_001):
        slow = slow + 2**-11
        holder.take(a_change(owner, slow, Codec.INT8, step))
    torch.testing.assert_close(held_of(holder), torch.full((SIZE,), 1 + 1_000 / 2**11), atol=1e-3, rtol=0)


def test_there_is_no_change_before_a_whole_copy():
    owner, holder = a_pair()
    assert owner.change(weights(), Codec.RAW, round_=1, outer_step=1) is None
    other, _ = a_pair()
    other.whole(weights(), round_=0, outer_step=0)
    with pytest.raises(RemoteProtocolError, match="no-base"):
        holder.take(a_change(other, weights(1), Codec.RAW, 1))


def test_a_lost_change_is_noticed_and_the_shadow_stays_as_it_was():
    """The hash is of the result, so a gap cannot go unseen; the holder then asks for a whole copy."""
    owner, holder = a_pair()
    holder.take(owner.whole(weights(), round_=0, outer_step=0))
    a_change(owner, weights(1), Codec.RAW, 1)  # never arrives
    with pytest.raises(RemoteProtocolError, match="wrong-hash"):
        holder.take(a_change(owner, weights(2), Codec.RAW, 2))
    assert torch.equal(held_of(holder), weights())
    holder.take(owner.whole(weights(3), round_=30, outer_step=3))
    assert torch.equal(held_of(holder), weights(3))


def spoilt(name: str, update: ShadowUpdate) -> ShadowUpdate:
    match name:
        case "stage":
            return replace(update, stage=4)
        case "schema":
            return replace(update, schema="other")
        case "hash":
            return replace(update, sha256="0" * 64)
        case "shape":
            return replace(update, packet=encode(weights()[:-1], Codec.RAW))
        case "coarse":
            return replace(update, packet=encode(weights(), Codec.INT8))
        case "old":
            return replace(update, round=9, outer_step=1)
        case _:
            data = bytearray(update.packet.data)
            data[:4] = b"\x00\x00\xc0\x7f"  # NaN
            return replace(update, packet=replace(update.packet, data=bytes(data)))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("stage", "wrong-stage"), ("schema", "wrong-stage"), ("hash", "wrong-hash"), ("shape", "wrong-shape"),
     ("coarse", "wrong-codec"), ("old", "stale"), ("nan", "non-finite")],
)  # fmt: skip
def test_a_bad_update_is_refused_and_changes_nothing(name: str, reason: str):
    owner, holder = a_pair()
    holder.take(owner.whole(weights(), round_=20, outer_step=2))
    update = owner.whole(weights(1), round_=30, outer_step=3)
    with pytest.raises(RemoteProtocolError) as refusal:
        holder.take(spoilt(name, update))
    assert refusal.value.reason == reason
    assert torch.equal(held_of(holder), weights())


def test_a_change_that_overflows_is_refused_though_its_hash_is_right():
    """Both parts finite, their sum is not: a hostile owner can compute the hash of infinity as well as we can."""
    owner, holder = a_pair()
    huge = torch.full((SIZE,), 3e38)
    holder.take(owner.whole(huge, round_=0, outer_step=0))
    update = ShadowUpdate(
        stage=3,
        schema="schema",
        round=1,
        outer_step=1,
        is_whole=False,
        packet=encode(huge, Codec.RAW),
        sha256=weights_sha256(huge + huge),
    )
    with pytest.raises(RemoteProtocolError, match="non-finite"):
        holder.take(update)
    assert torch.equal(held_of(holder), huge)


def test_an_old_shadow_can_be_refused_and_a_forgotten_one_is_gone():
    owner, holder = a_pair()
    holder.take(owner.whole(weights(), round_=50, outer_step=5))
    assert holder.restore(oldest_round=51) is None
    assert holder.restore(oldest_round=50) is not None
    holder.forget()
    assert holder.restore() is None
    assert (holder.num_bytes, holder.round) == (0, None)


def test_bounds_are_checked_when_a_shadow_is_set_up():
    with pytest.raises(LocalProtocolError, match="bytes"):
        ShadowHolder(3, "schema", SIZE, bytes_max=4 * SIZE - 1)
    with pytest.raises(LocalProtocolError, match="int8"):
        ShadowOwner(3, "schema", Codec.INT8)


def test_whole_copies_are_due_in_the_same_rounds_for_everyone():
    assert [round_ for round_ in range(1, 120) if is_due(round_, 50)] == [50, 100]


def test_steady_traffic_is_a_small_part_of_one_border():
    """The 500M model of CheckFree: 67 M weights a stage, 64 sequences a round; 2.5 % at 20 rounds, 1 % at 50."""
    spec = a_spec()
    fields = spec.model_dump()
    fields["model"] |= {"hidden_size": 1024, "max_position_embeddings": 1024, "num_attention_heads": 16}
    fields["rounds"] |= {"rows": 4, "seq_len": 1024, "microbatches": 4}
    fields["boundary_codec"] = Codec.BF16
    large = type(spec).model_validate(fields)
    assert traffic_share(large, 67_000_000, Codec.BF16, 20, originators=4) == pytest.approx(0.025, rel=0.01)
    assert traffic_share(large, 67_000_000, Codec.BF16, 50, originators=4) == pytest.approx(0.010, rel=0.01)


def test_a_stage_lives_on_in_its_shadow():
    """A replica's own weights and schema: what a peer of the stage before would hand over."""
    runtime = StageRuntime(a_spec(), 2)
    owner = ShadowOwner(2, runtime.schema, Codec.RAW)
    holder = ShadowHolder(2, runtime.schema, runtime.flat.size, bytes_max=1 << 30)
    holder.take(owner.whole(runtime.flat.weights, round_=7, outer_step=0))
    reborn = StageRuntime(a_spec(seed=99), 2)
    reborn.flat.weights.copy_(held_of(holder))
    for name, weight in runtime.weights().items():
        assert torch.equal(reborn.weights()[name], weight)
