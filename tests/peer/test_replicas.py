"""Who is asked for a stage's weights, which answers count, and the mean of what came."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dht.records import PeerRecord
from peer.export import weight_shapes
from peer.replicas import AVERAGE, BEST, DonorFailed, Mean, StageMissing, choose, stage_shapes, take_in
from protocols.errors import ConfigError
from protocols.messages import TensorPacket, WeightsChunk, WeightsKind
from protocols.recovery import Download
from protocols.run_spec import Codec, preset
from protocols.swarm import PeerInfo, PeerState

SERVING = PeerState.SERVING


def record(
    peer: str, stage: int | None, round_: int = 10, loss: float | None = None, state: PeerState = SERVING
) -> PeerRecord:
    return PeerRecord(info=PeerInfo(peer=peer, stage=stage, state=state, round=round_), loss=loss)


ALL = (
    record("a0", 0, 300, loss=3.5),
    record("b0", 0, 300, loss=3.4),
    record("c1", 1, 299),
    record("d1", 1, 300),
    record("e2", 2, 280),
    record("f2", 2, 300, state=PeerState.LEAVING),
    record("g2", 2, 300, state=PeerState.CATCHING_UP),
    record("h", None, state=PeerState.JOINING),
)


def asked(take: str, records: Sequence[PeerRecord] = ALL) -> list[tuple[list[str], int]]:
    return [([one.peer for one in plan.replicas], plan.wanted) for plan in choose(records, 3, take)]


# ---- who is asked --------------------------------------------------------------------------------


def test_the_average_is_of_all_that_serve_and_of_nobody_else():
    """Who catches up, leaves or joins has no weights to speak of, or will not answer."""
    assert asked(AVERAGE) == [(["b0", "a0"], 2), (["d1", "c1"], 2), (["e2"], 1)]


def test_the_best_has_most_rounds_then_the_lower_loss_and_the_others_stand_in():
    assert asked(BEST) == [(["b0", "a0"], 1), (["d1", "c1"], 1), (["e2"], 1)]


@pytest.mark.parametrize("which", ["c1", record("c1", 1).friendly_name])
def test_a_named_replica_stands_alone_for_its_stage(which: str):
    """Nobody stands in for it: that one was wanted. Elsewhere all count."""
    assert asked(which) == [(["b0", "a0"], 2), (["c1"], 1), (["e2"], 1)]


def test_a_name_that_is_not_there_or_not_clear_is_a_persons_mistake():
    with pytest.raises(ConfigError, match=r"no serving peer is called 'calm-otter'; there are: .*\.\.\.e2\)"):
        choose(ALL, 3, "calm-otter")
    with pytest.raises(ConfigError, match="no serving peer is called 'f2'"):
        choose(ALL, 3, "f2")
    with pytest.raises(ConfigError, match="several serving peers are called '1'"):
        choose(ALL, 3, "1")


@pytest.mark.parametrize("take", [AVERAGE, BEST, "a0"])
def test_stages_without_a_live_replica_are_named_together(take: str):
    with pytest.raises(StageMissing, match="no live replica of stage 1, 2 among 2 serving peers"):
        choose(ALL[:2], 3, take)


# ---- what counts ---------------------------------------------------------------------------------


def chunk(index: int, count: int = 3, **changes) -> WeightsChunk:
    packet = TensorPacket(dtype="uint8", shape=(4,), codec=Codec.RAW, data=bytes([index] * 4))
    fields = dict(
        kind=WeightsKind.WEIGHTS, stage=1, snapshot="s", index=index, count=count, sha256="x", round=7,
        outer_step=0, packet=packet,
    )  # fmt: skip
    return WeightsChunk(**(fields | changes))


def download() -> Download:
    return Download(record("c1", 1).info, WeightsKind.WEIGHTS, 1)


def test_chunks_in_order_make_a_whole_state():
    """Each is asked for by its number, once there is one by the name of its snapshot."""
    coming = download()
    for index in range(3):
        wanted = coming.request().message
        assert (wanted.index, wanted.snapshot) == (index, "s" if index else "")
        assert not coming.is_whole
        assert take_in(coming, chunk(index), 12)
    assert coming.is_whole
    assert [bytes(packet.data) for packet in coming.state().packets] == [bytes([i] * 4) for i in range(3)]


@pytest.mark.parametrize(
    "late",
    [
        chunk(0),
        chunk(2),
        chunk(1, snapshot="older"),
        chunk(1, stage=2),
        chunk(1, kind=WeightsKind.FULL),
    ],
)
def test_an_answer_to_another_question_is_passed_over(late: WeightsChunk):
    coming = download()
    assert take_in(coming, chunk(0), 12)
    assert not take_in(coming, late, 12)
    assert len(coming.packets) == 1


@pytest.mark.parametrize(
    ("bad", "reason", "again"),
    [
        (chunk(1, count=0, packet=None), "refuses", True),
        (chunk(1, count=4), "contradicts itself", False),
        (chunk(1, sha256="y"), "contradicts itself", False),
    ],
)
def test_a_donor_that_will_not_do_is_given_up(bad: WeightsChunk, reason: str, again: bool):
    """It may refuse because it holds too many snapshots just now, so only then it is asked again."""
    coming = download()
    assert take_in(coming, chunk(0), 12)
    with pytest.raises(DonorFailed, match=reason) as failure:
        take_in(coming, bad, 12)
    assert failure.value.again is again


def test_more_bytes_than_a_stage_has_are_not_kept():
    coming = download()
    assert take_in(coming, chunk(0), 7)
    with pytest.raises(DonorFailed, match="sends too much"):
        take_in(coming, chunk(1), 7)
    assert len(coming.packets) == 1


# ---- the mean ------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.integers(0, 1000))
def test_the_mean_is_that_of_exact_arithmetic_in_any_order(count: int, seed: int):
    """Float64 sums of a few fp32 numbers of like size are exact, so only the last rounding is left."""
    generator = torch.Generator().manual_seed(seed)
    replicas = [{"w": torch.randn(5, 3, generator=generator), "n": torch.ones(3)} for _ in range(count)]
    means = []
    for order in (replicas, replicas[::-1]):
        mean = Mean()
        for one in order:
            mean.add(one)
        means.append(mean)
    found, backwards = (mean.weights() for mean in means)
    exact = [
        math.fsum(float(one["w"].flatten()[i]) for one in replicas) / count for i in range(found["w"].numel())
    ]
    assert found["w"].dtype == torch.float32
    assert found["w"].flatten().tolist() == torch.tensor(exact, dtype=torch.float64).float().tolist()
    assert torch.equal(found["n"], torch.ones(3))
    assert torch.equal(found["w"], backwards["w"])
    stacked = torch.stack([torch.cat([one["w"].flatten(), one["n"]]) for one in replicas]).double()
    away = (stacked - stacked.mean(0)).square().mean().sqrt() / stacked.mean(0).square().mean().sqrt()
    assert means[0].spread() == pytest.approx(float(away), rel=1e-9, abs=1e-12)


def test_a_spread_far_below_the_weights_is_not_lost_to_rounding():
    """Replicas that are all but the same; the difference of two large sums of squares would show noise here."""
    mean = Mean()
    base = torch.ones(1000)
    mean.add({"w": base})
    mean.add({"w": base + 2.0**-20})
    assert mean.spread() == pytest.approx(2.0**-21 / (1 + 2.0**-21), rel=1e-9)


@pytest.mark.parametrize("spec", [preset("pico"), preset("micro")])
def test_the_stages_shapes_together_are_the_models(spec):
    parts = [stage_shapes(spec, stage) for stage in range(spec.num_stages)]
    assert sum(map(len, parts)) == len(weight_shapes(spec.model))
    assert {name: shape for part in parts for name, shape in part.items()} == weight_shapes(spec.model)
