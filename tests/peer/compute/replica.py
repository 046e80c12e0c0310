"""A tiny replica by hand, for the tests of the compute side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from peer.compute.stage_runtime import StageRuntime
from protocols.actions import DonorState, RecoverySource, RunRecovery
from protocols.messages import TensorPacket, WeightsKind, WorkKey
from protocols.run_spec import Codec, RunSpec, preset
from protocols.tensor_codec import encode

ROWS, TOKENS, VOCAB = 2, 12, 64


def a_spec(num_stages: int = 3, **changes: Any) -> RunSpec:
    fields = preset("pico", **{"seed": 2, "boundary_codec": Codec.RAW, **changes}).model_dump()
    fields["model"] |= dict(num_hidden_layers=num_stages - 1, vocab_size=VOCAB)
    fields["rounds"] |= dict(rows=ROWS, seq_len=TOKENS)
    fields |= dict(num_stages=num_stages)
    return RunSpec.model_validate(fields)


def a_key(counter: int, attempt: int = 1) -> WorkKey:
    return WorkKey("a1", counter, attempt)


def a_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def a_boundary(seed: int = 0) -> TensorPacket:
    tensor = torch.randn(ROWS, TOKENS, 64, generator=torch.Generator().manual_seed(seed))
    return encode(tensor, Codec.RAW)


def train(runtime: StageRuntime, round_: int, seed: int = 0) -> float:
    """A middle stage's round of one microbatch: some boundary input, some boundary gradient."""
    runtime.forward(a_key(round_), a_boundary(seed + round_), train=True)
    runtime.backward(a_key(round_), a_boundary(seed + round_ + 1000))
    return runtime.inner_step(round_)


def round_trip(
    stages: Mapping[int, StageRuntime], key: WorkKey, *, seed: int = 0, train: bool = True
) -> float:
    """One microbatch through all stages and, when training, back."""
    stages[0].put_batch(key, *a_batch(seed))
    packet = stages[0].forward(key, None, train=train)
    for stage in range(1, len(stages)):
        packet = stages[stage].forward(key, packet, train=train)
    loss, gradient = stages[0].loss(key, packet, train=train)
    if train:
        for stage in reversed(range(len(stages))):
            assert gradient is not None
            gradient = stages[stage].backward(key, gradient)
    return loss


def everything(runtime: StageRuntime) -> dict[str, Tensor]:
    tensors, _ = runtime.state_for_checkpoint()
    return tensors


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def a_donor(runtime: StageRuntime, kind: WeightsKind, grad_norm: float = 1.0) -> DonorState:
    packets, sha256 = runtime.snapshot(kind)
    return DonorState(
        donor="d",
        stage=runtime.stage,
        round=runtime.round,
        outer_step=runtime.outer_step,
        sha256=sha256,
        grad_norm=grad_norm,
        packets=packets,
    )


def a_recovery(stage: int, source: RecoverySource, *donors: DonorState) -> RunRecovery:
    return RunRecovery(stage=stage, source=source, donors=donors, round=9, outer_step=3)
