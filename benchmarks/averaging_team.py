"""Replicas of a whole tiny LLaMa in one process, and the ways to keep them together of `benchmarks.averaging`.

Every way sees the same tokens: in round r replica i takes one AdamW step on the microbatch with the address (r, i),
with the product's model, optimizer and text. Data parallel is one replica that steps on all of them together. Averaging
is `protocols.noloco` over `protocols.pairing` with `protocols.tensor_codec`, without the conversation around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from peer.compute.flat import FlatStage
from peer.compute.inner_optimizer import InnerOptimizer
from peer.config import HostConfig
from peer.data import load_data
from peer.evaluate import Batch
from peer.model.stage import build_model
from protocols import noloco
from protocols.pairing import partners
from protocols.run_spec import Codec, OuterSpec, RunSpec, preset
from protocols.tensor_codec import decode, encode
from protocols.topk_codec import ErrorFeedback

ROWS, SEQ_LEN = 4, 64
VALIDATION_ROWS = 64
HOSTILE_OFFSET = 10.0
LEARNING_RATE = 6e-3  # where a way says nothing else
DENSE_BYTES = 4  # of a weight in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How replicas are kept together. `outer` None: one gradient of all, every round."""

    outer: OuterSpec | None
    learning_rate: float = LEARNING_RATE  # of the inner steps
    is_group_of_all: bool = False  # DiLoCo
    is_one_hostile: bool = False  # replica 0 sends its half + 10
    has_changes: bool = (
        False  # beside the fragment, the top-k of what all fast weights gained since the last time
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Losses in nats a token on held-out text, of honest replicas."""

    single: float  # mean over the replicas
    averaged: float  # of the mean of their weights
    best: float  # replica
    spread: float  # root mean square distance of a weight from the replicas' mean
    round_bytes: float  # a replica sends in a round, per weight of the model
    curve: tuple[tuple[int, float], ...]  # (round, mean loss of the replicas)


def team_spec(seed: int, rounds: int, learning_rate: float = LEARNING_RATE) -> RunSpec:
    """pico; small microbatches, so that replicas have different things to tell."""
    return preset(
        "pico",
        name="averaging",
        seed=seed,
        rounds={"rows": ROWS, "seq_len": SEQ_LEN, "microbatches": 1, "total_rounds": rounds},
        optimizer={"lr": learning_rate, "warmup_rounds": rounds // 10},
    )


class Replica:
    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self.model = build_model(spec)
        self.flat = FlatStage(self.model)
        self._optimizer = InnerOptimizer(spec, self.flat)

    def train(self, round_number: int, microbatches: Sequence[Batch]) -> None:
        """One inner step on the mean gradient of all rows."""
        for tokens_BL, targets_BL in microbatches:
            loss = F.cross_entropy(self.model(tokens_BL).flatten(0, 1), targets_BL.flatten())
            (loss * len(tokens_BL)).backward()
        rows = sum(len(tokens_BL) for tokens_BL, _ in microbatches)
        self._optimizer.rows = {False: rows, True: rows}
        self._optimizer.step(round_number)

    @torch.inference_mode()
    def loss(self, held_out: Sequence[Batch]) -> float:
        return fmean(
            float(F.cross_entropy(self.model(tokens_BL).flatten(0, 1), targets_BL.flatten()))
            for tokens_BL, targets_BL in held_out
        )


class Team:
    """`count` replicas, trained and judged together."""

    def __init__(
        self, spec: RunSpec, count: int, way: Way, *, held_out_batches: int, curve_points: int
    ) -> None:
        self._spec, self._count, self._way = spec, count, way
        self._data = load_data(spec, HostConfig().cache_dir)
        num_models = 1 if way.outer is None else count
        self.replicas = [Replica(spec) for _ in range(num_models)]
        self._averaging = None if way.outer is None else Averaging(spec, way.outer, way, self.replicas)
        self._held_out = [
            self._data.validation_batch(index, VALIDATION_ROWS, SEQ_LEN) for index in range(held_out_batches)
        ]
        self._curve_every = spec.rounds.total_rounds // curve_points

    def run(self) -> Outcome:
        curve: list[tuple[int, float]] = []
        for round_number in range(1, self._spec.rounds.total_rounds + 1):
            self._train(round_number)
            if round_number % self._curve_every == 0:
                curve.append((round_number, fmean(one.loss(self._held_out[:1]) for one in self._honest)))
        return self._outcome(tuple(curve))

    def _train(self, round_number: int) -> None:
        """Between two averagings and, where one is due, the averaging."""
        microbatches = [
            self._data.sample(self._spec.seed, round_number, f"replica-{number}", 0, ROWS, SEQ_LEN)
            for number in range(self._count)
        ]
        if self._way.outer is None:
            self.replicas[0].train(round_number, microbatches)
            return
        for replica, microbatch in zip(self.replicas, microbatches, strict=True):
            replica.train(round_number, [microbatch])
        outer_step, rest = divmod(round_number, self._way.outer.inner_steps)
        if not rest:
            assert self._averaging is not None, "replicas that are averaged"
            self._averaging.step(outer_step)

    @property
    def _honest(self) -> list[Replica]:
        return self.replicas[1:] if self._way.is_one_hostile else self.replicas

    def _outcome(self, curve: tuple[tuple[int, float], ...]) -> Outcome:
        losses = [one.loss(self._held_out) for one in self._honest]
        weights = torch.stack([one.flat.weights for one in self._honest])
        mean = Replica(self._spec)
        mean.flat.weights.copy_(weights.mean(0))
        averaging = self._averaging
        return Outcome(
            single=fmean(losses),
            averaged=mean.loss(self._held_out),
            best=min(losses),
            spread=float(weights.var(0, unbiased=False).mean().sqrt()),
            round_bytes=(
                averaging.sent_bytes / self._spec.rounds.total_rounds / weights.numel()
                if averaging
                else 2 * DENSE_BYTES * (self._count - 1) / self._count  # gradients, as a ring does it
            ),
            curve=curve,
        )


class Averaging:
    """Slow weights and momenta of all replicas, and one outer step of them all."""

    def __init__(self, spec: RunSpec, outer: OuterSpec, way: Way, replicas: Sequence[Replica]) -> None:
        self._seed, self._outer, self._way = spec.seed, outer, way
        self._fast = [one.flat.weights for one in replicas]
        self._phi = [weights.clone() for weights in self._fast]
        self._delta = [torch.zeros_like(phi) for phi in self._phi]
        self._limits = [noloco.PullLimit() for _ in replicas]
        self._before = [weights.clone() for weights in self._fast]
        self._feedback = [ErrorFeedback(len(weights)) for weights in self._fast]
        self.sent_bytes = 0  # by all replicas

    def step(self, outer_step: int) -> None:
        """The fragment whose turn it is: its slow weights move, and its fast weights become what they are then."""
        if self._way.has_changes:
            self._exchange_changes(outer_step)
        part = self._outer.part(outer_step, len(self._phi[0]))
        phi, theta, delta = ([one[part] for one in all_] for all_ in (self._phi, self._fast, self._delta))
        state = list(zip(phi, theta, delta, strict=True))
        halves = [noloco.half(self._outer, phi=p, theta=t, delta=d) for p, t, d in state]
        groups = self._exchanged(halves, outer_step, 0)
        stepped = [
            noloco.outer_step(self._outer, phi=p, theta=t, delta=d, halves=group, limit=limit)
            for (p, t, d), group, limit in zip(state, groups, self._limits, strict=True)
        ]
        new = [phi for phi, _ in stepped]
        if self._outer.rounds == 2:
            groups = self._exchanged(new, outer_step, 1)
            new = [
                phi if halves is None else noloco.settle(phi, halves, limit)
                for phi, halves, limit in zip(new, groups, self._limits, strict=True)
            ]
        for number, (_, momentum) in enumerate(stepped):
            self._phi[number][part] = self._fast[number][part] = new[number]
            self._delta[number][part] = momentum
        self._before = [weights.clone() for weights in self._fast] if self._way.has_changes else []

    def _exchange_changes(self, outer_step: int) -> None:
        """Sparse news of all fragments: each pair takes half the difference of what both have sent of their gains."""
        gains = [fast - before for fast, before in zip(self._fast, self._before, strict=True)]
        sent: list[Tensor] = []
        for gain, feedback in zip(gains, self._feedback, strict=True):
            wanted = feedback.add_to(gain)
            packet = encode(wanted, Codec.TOPK)
            self.sent_bytes += packet.num_bytes
            sent.append(decode(packet))
            feedback.keep(wanted, sent[-1])
        for me, other in self._partners(len(sent), outer_step, 0).items():
            pull = (sent[other] - sent[me]).mul_(0.5)
            self._fast[me].add_(pull)

    def _exchanged(
        self, halves: Sequence[Tensor], outer_step: int, pair_round: int
    ) -> list[list[Tensor] | None]:
        """What each has in the end: its own half and those of its group, as decoded; None: it is alone."""
        packets = [encode(half, self._outer.codec) for half in halves]
        decoded = [decode(packet) for packet in packets]
        if self._way.is_one_hostile:
            decoded[0] = decoded[0] + HOSTILE_OFFSET
        numbers = list(range(len(halves)))
        if self._way.is_group_of_all:
            groups: list[list[int]] = [[me, *numbers[:me], *numbers[me + 1 :]] for me in numbers]
            self.sent_bytes += 2 * sum(packet.num_bytes for packet in packets[1:])  # as a ring does it
        else:
            found = self._partners(len(halves), outer_step, pair_round)
            groups = [[me, found[me]] if me in found else [] for me in numbers]
            self.sent_bytes += sum(packets[me].num_bytes for me in found)
        return [[decoded[one] for one in group] or None for group in groups]

    def _partners(self, count: int, outer_step: int, pair_round: int) -> dict[int, int]:
        outer = self._outer
        found = partners(
            [f"{number:03d}" for number in range(count)],
            outer_step=outer_step, stage=0, fragment=outer.fragment(outer_step), pair_round=pair_round,
            rounds=outer.rounds, seed=self._seed, schedule=outer.schedule,
        )  # fmt: skip
        return {int(me): int(other) for me, other in found.items()}
