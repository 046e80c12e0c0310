"""RunSpec: what all peers of a run must agree on; `run_id` is its name and hash.

Invariant: two peers with different specs have different run ids, and every DHT key and stream name starts with the
run id, so they never meet. What concerns one machine only is `peer.config.HostConfig`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from enum import Enum
from math import prod
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocols.errors import ConfigError, describe_errors

PROTOCOL_VERSION = 2
RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
GAMMA_SAFETY_SHARE = 0.9  # of the stability bound for pairs among many replicas


class Codec(str, Enum):
    """How a tensor's elements travel."""

    RAW = "raw"
    BF16 = "bf16"
    INT8 = "int8"  # per row (last axis), absolute maximum
    INT4 = "int4"  # the same, in shorter blocks
    TOPK = "topk"  # the largest 64 of each 4,096, two bits a value; what is left out waits at the sender


class OuterMode(str, Enum):
    """NoLoCo's update: as published, or averaging Nesterov proposals."""

    PAPER = "paper"
    PROPOSE = "propose"


class PairSchedule(str, Enum):
    """How partners are drawn (`protocols.pairing`)."""

    RANDOM = "random"
    HYPERCUBE = "hypercube"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSpec(_Part):
    """LLaMa with untied embeddings; sizes under the names of Hugging Face's config."""

    vocab_size: int = Field(ge=2, le=1 << 20)
    hidden_size: int = Field(ge=8, le=1 << 15)
    intermediate_size: int = Field(ge=8, le=1 << 17)
    num_hidden_layers: int = Field(ge=1, le=512)
    num_attention_heads: int = Field(ge=1, le=512)
    num_key_value_heads: int = Field(ge=1, le=512)
    max_position_embeddings: int = Field(ge=2, le=1 << 20)
    rope_theta: float = Field(default=10_000.0, gt=0)
    rms_norm_eps: float = Field(default=1e-5, gt=0)

    @model_validator(mode="after")
    def _divisible(self) -> ModelSpec:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size must be a multiple of num_attention_heads")
        if (self.hidden_size // self.num_attention_heads) % 2:
            raise ValueError("hidden_size / num_attention_heads must be even (rotary embedding)")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        return self

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class OptimizerSpec(_Part):
    """Inner AdamW, one step a round: linear warm-up, then cosine down to `lr_min_share` of the rate."""

    lr: float = Field(default=3e-3, gt=0, le=1.0)
    lr_min_share: float = Field(default=0.1, ge=0, le=1)
    warmup_rounds: int = Field(default=20, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    dtype: str = Field(default="float32", pattern="^(float32|bfloat16)$")


class RoundSpec(_Part):
    """What one round holds, and how far peers may run ahead of each other."""

    rows: int = Field(default=8, ge=1, le=4096, description="sequences in a microbatch")
    seq_len: int = Field(default=128, ge=2, description="tokens in a sequence")
    microbatches: int = Field(
        default=2, ge=1, le=4096, description="microbatches an originator sends a round"
    )
    total_rounds: int = Field(default=300, ge=1)
    window: int = Field(default=3, ge=1, le=256, description="microbatches an originator has in flight")
    slots: int = Field(
        default=6, ge=1, le=256, description="microbatches a relay holds from forward to backward"
    )
    staleness_max: int = Field(default=0, ge=0, le=1)
    attempts_max: int = Field(default=6, ge=1, le=64)
    start_replicas: int = Field(
        default=1, ge=1, le=64, description="replicas of each stage before round 0 begins"
    )
    eval_every: int = Field(default=20, ge=0, description="rounds between validations; 0: never")
    eval_microbatches: int = Field(
        default=4, ge=1, le=1024, description="validation microbatches, all originators"
    )


class PathSpec(_Part):
    """Which stage orders are legal (SkipPipe 2.1; `protocols.stage_order` applies it)."""

    path_stages: int | None = Field(default=None, ge=2, description="stages a microbatch runs; null: all")
    growth: tuple[tuple[int, int], ...] = Field(
        default=(), max_length=64, description="[round, path_stages] from that round on, instead; ascending"
    )
    swaps_max: int = Field(default=0, ge=0, le=2)
    skip_width_max: int = Field(
        default=4, ge=1, description="the next stage is at most so far beyond the frontier"
    )
    planned: bool = Field(
        default=True, description="together; false: each originator takes its fastest paths"
    )
    missing_stages_max: int = Field(default=1, ge=0, description="stages without a replica that it may skip")
    missing_rounds_max: int = Field(default=500, ge=1, description="rounds for which they may; then all wait")
    skip_train_share: float = Field(
        default=0.0, ge=0, le=0.5, description="microbatches that leave out one stage, to learn to do without"
    )


class OuterSpec(_Part):
    """NoLoCo: pairwise averaging every `inner_steps` rounds."""

    inner_steps: int = Field(default=10, ge=1)
    mode: OuterMode = OuterMode.PROPOSE
    alpha: float = Field(default=0.0, ge=0, lt=1)
    beta: float = Field(default=1.0, gt=0, le=2)
    gamma: float = Field(default=0.7, gt=0, description="mode paper: pull to the partner")
    rounds: int = Field(default=1, ge=1, le=2, description="partners one after the other, each outer step")
    schedule: PairSchedule = PairSchedule.RANDOM
    fragments: int = Field(default=1, ge=1, le=64, description="pieces, one averaged each outer step in turn")
    codec: Codec = Codec.RAW
    spread_max: int = Field(default=1, ge=0, description="outer steps that partners may differ by")

    def fragment(self, outer_step: int) -> int:
        """Whose turn it is."""
        return outer_step % self.fragments

    def part(self, outer_step: int, size: int) -> slice:
        """Where that fragment lies in a flat vector: one of nearly equal cuts."""
        index = self.fragment(outer_step)
        return slice(index * size // self.fragments, (index + 1) * size // self.fragments)

    @model_validator(mode="after")
    def _stable(self) -> OuterSpec:
        """Replicas must come together, and their mean must not swing up (`gamma_bound`, `beta_bound`)."""
        many, pair, four = (gamma_bound(self.alpha, replicas=count) for count in (None, 2, 4))
        if self.mode is OuterMode.PAPER and self.gamma >= GAMMA_SAFETY_SHARE * many:
            raise ValueError(
                f"gamma {self.gamma} with alpha {self.alpha} lets replicas drift apart: pairs among many replicas "
                f"come together only below 2 (1 - alpha^2) = {many:.3g} (two replicas alone below {pair:.3g}, four "
                f"below {four:.3g}); take gamma < {GAMMA_SAFETY_SHARE * many:.3g} (best {many / 2:.3g}) or mode "
                f"'propose', which comes together with every alpha"
            )
        if self.codec in (Codec.INT4, Codec.TOPK):
            raise ValueError(
                f"codec '{self.codec.value}' keeps too little of a half, which holds the slow weights and not only "
                f"their change; take raw, bf16 or int8, and fragments to send less"
            )
        if self.beta >= beta_bound(self.mode, self.alpha):
            raise ValueError(
                f"beta {self.beta} with alpha {self.alpha} in mode '{self.mode.value}' lets the mean of all replicas "
                f"swing up where inner steps reach their minimum; take beta < {beta_bound(self.mode, self.alpha):.3g}"
            )
        return self


def gamma_bound(alpha: float, *, replicas: int | None = None, group: int = 2) -> float:
    """Mode paper: below this gamma replicas come together in mean square where the loss is flat; None: very many.

    With E[pull] = q x on deviations x from the mean of all, q = 1 - (N - n) / (n (N - 1)), and the pull a projection,
    the three second moments of x and momentum contract exactly for gamma < 2 (1 - alpha^2) / (1 + alpha - 2 alpha q):
    pairs among many 2 (1 - alpha^2), best at half of that; everybody together 2 (1 + alpha). Eq. 74 of arXiv
    2506.10911 allows more, and there replicas drift apart.
    """
    rest = 1.0 if replicas is None else (replicas - group) / (replicas - 1)
    pull = 1 - rest / group
    return 2 * (1 - alpha**2) / (1 + alpha - 2 * alpha * pull)


def beta_bound(mode: OuterMode, alpha: float) -> float:
    """Below this beta the mean is stable for every curvature: heavy ball 2 (1 + alpha), Nesterov less."""
    heavy_ball = 2 * (1 + alpha)
    return heavy_ball if mode is OuterMode.PAPER else heavy_ball / (1 + 2 * alpha)


class DataSpec(_Part):
    """Which text; peers check the hashes, so that a run cannot mix two corpora."""

    corpus: str = Field(default="sotu", min_length=1, max_length=256, description="built-in name, or a path")
    corpus_sha256: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    tokenizer: str = Field(
        default="bpe1024", min_length=1, max_length=256, description="built-in name, or a path"
    )
    tokenizer_sha256: str = Field(default="", pattern="^([0-9a-f]{64})?$")


class LivenessSpec(_Part):
    """Time limits, one hierarchy: ping < heartbeat < time to live; attempt < round < lease."""

    heartbeat_s: float = Field(default=5.0, gt=0, le=60)
    record_ttl_s: float = Field(default=20.0, gt=0, le=300)
    view_poll_s: float = Field(default=2.0, gt=0, le=60)
    ping_s: float = Field(default=2.0, gt=0, le=30)
    ping_misses_max: int = Field(default=3, ge=1, le=20)
    attempt_s: float = Field(
        default=30.0, gt=0, description="longest wait for an attempt, before rates are measured"
    )
    round_s: float = Field(default=90.0, gt=0, description="longest wait of a replica for its round")
    lease_s: float = Field(default=180.0, gt=0, description="a stash dies after that")
    exchange_s: float = Field(default=20.0, gt=0, description="longest wait for an averaging partner")
    suspect_s: float = Field(default=15.0, gt=0)
    empty_confirm: int = Field(
        default=3, ge=1, description="polls that must show a stage empty before adoption"
    )

    @model_validator(mode="after")
    def _hierarchy(self) -> LivenessSpec:
        ordered = ("ping_s", "heartbeat_s", "record_ttl_s", "attempt_s", "round_s", "lease_s")
        for low, high in itertools.pairwise(ordered):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"{low} ({getattr(self, low)}) must not exceed {high} ({getattr(self, high)})"
                )
        if self.record_ttl_s < 3 * self.heartbeat_s:
            raise ValueError(
                "record_ttl_s must be at least three heartbeats, or one lost store drops a live peer"
            )
        return self


class RecoverySpec(_Part):
    """How a stage that nobody serves any more comes back."""

    shadow_every: int = Field(default=50, ge=1, description="rounds between copies of a stage's weights")
    shadow_depth: int = Field(
        default=2, ge=0, le=4, description="following stages whose weights a peer keeps; 0: none"
    )


class RunSpec(_Part):
    """The whole agreement. `from_json` is the only way in for a person's file."""

    name: str
    protocol_version: int = PROTOCOL_VERSION
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    num_stages: int = Field(ge=2, le=256)
    first_stage_layers: int = Field(default=0, ge=0)
    model: ModelSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    rounds: RoundSpec = RoundSpec()
    paths: PathSpec = PathSpec()
    outer: OuterSpec = OuterSpec()
    data: DataSpec = DataSpec()
    liveness: LivenessSpec = LivenessSpec()
    recovery: RecoverySpec = RecoverySpec()
    boundary_codec: Codec = Codec.BF16

    @model_validator(mode="after")
    def _consistent(self) -> RunSpec:
        if not RUN_NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r} must match {RUN_NAME.pattern}")
        if self.protocol_version != PROTOCOL_VERSION:
            raise ValueError(
                f"protocol_version {self.protocol_version}: this release speaks {PROTOCOL_VERSION}"
            )
        middle_layers = self.model.num_hidden_layers - self.first_stage_layers
        if middle_layers < self.num_stages - 1 or middle_layers % (self.num_stages - 1):
            raise ValueError(
                f"{middle_layers} layers beyond the first stage's {self.first_stage_layers} cannot be cut into "
                f"{self.num_stages - 1} equal stages"
            )
        if self.boundary_codec is Codec.TOPK:
            raise ValueError("boundary_codec topk drops most of a tensor; take bf16, int8, int4 or raw")
        if self.rounds.seq_len > self.model.max_position_embeddings:
            raise ValueError("rounds.seq_len exceeds model.max_position_embeddings")
        if self.paths.path_stages is not None and self.paths.path_stages > self.num_stages:
            raise ValueError("paths.path_stages exceeds num_stages")
        starts, lengths = (
            [start for start, _ in self.paths.growth],
            [stages for _, stages in self.paths.growth],
        )
        if sorted(set(starts)) != starts or not all(2 <= stages <= self.num_stages for stages in lengths):
            raise ValueError("paths.growth: give ascending rounds, each with 2 to num_stages stages")
        return self

    def at(self, round_: int) -> RunSpec:
        """The rules for paths of that round: without `growth`, and `path_stages` as it says."""
        grown = [stages for start, stages in self.paths.growth if start <= round_]
        changes = {"growth": (), **({"path_stages": grown[-1]} if grown else {})}
        return self.model_copy(update={"paths": self.paths.model_copy(update=changes)})

    @property
    def path_stages(self) -> int:
        """Stages that a microbatch runs, the first included (SkipPipe's L)."""
        return self.paths.path_stages or self.num_stages

    @property
    def layers_per_stage(self) -> int:
        """Layers of a middle stage."""
        return (self.model.num_hidden_layers - self.first_stage_layers) // (self.num_stages - 1)

    @property
    def tokens_per_microbatch(self) -> int:
        return self.rounds.rows * self.rounds.seq_len

    @property
    def boundary_bytes(self) -> int:
        """Of a boundary tensor on the wire, without the few of its scales."""
        bits = {Codec.RAW: 32, Codec.BF16: 16, Codec.INT8: 8, Codec.INT4: 4}[self.boundary_codec]
        return bits * prod(self.boundary_shape) // 8

    @property
    def boundary_shape(self) -> tuple[int, int, int]:
        """[B, L, D] of every boundary tensor."""
        return (self.rounds.rows, self.rounds.seq_len, self.model.hidden_size)

    def layer_range(self, stage: int) -> range:
        """The layers of `stage`, numbered as in the exported model: 0's come first."""
        if stage == 0:
            return range(self.first_stage_layers)
        start = self.first_stage_layers + (stage - 1) * self.layers_per_stage
        return range(start, start + self.layers_per_stage)

    def to_json(self) -> str:
        """Canonical text: sorted keys, no spaces. What is hashed and signed."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def run_id(self) -> str:
        return f"{self.name}-{hashlib.sha256(self.to_json().encode()).hexdigest()[:16]}"

    @classmethod
    def from_json(cls, text: str, *, where: str = "RunSpec") -> RunSpec:
        """Parse a person's file; ConfigError names each wrong field and `where`."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(f"{where}: {describe_errors(error)}") from None


_PRESETS: dict[str, dict[str, Any]] = {
    # embeddings untied, hence narrower feed-forward layers at the same parameter count
    "pico": {
        "num_stages": 3,
        "model": dict(vocab_size=1024, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256),
        "rounds": dict(rows=16, seq_len=64),
        "optimizer": dict(lr=2e-3),
    },
    "nano": {
        "num_stages": 5,
        "model": dict(vocab_size=1024, hidden_size=128, intermediate_size=320, num_hidden_layers=4,
                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512),
        "rounds": dict(rows=8, seq_len=128),
        "optimizer": dict(lr=3e-3),
    },
    "micro": {
        "num_stages": 5,
        "first_stage_layers": 2,
        "model": dict(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=6,
                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512),
        "rounds": dict(rows=4, seq_len=256),
        "optimizer": dict(lr=1.5e-3),
        "data": dict(tokenizer="bpe4096"),
    },
}  # fmt: skip
PRESET_NAMES = tuple(_PRESETS)


def preset(model: str, name: str = "demo", **changes: Any) -> RunSpec:
    """A RunSpec for one of our model sizes; `changes` are top-level fields, sections merged field by field."""
    if model not in _PRESETS:
        raise ConfigError(f"model {model!r} is unknown; choose one of {', '.join(PRESET_NAMES)}")
    fields: dict[str, Any] = {"name": name, **_PRESETS[model]}
    for key, value in changes.items():
        fields[key] = {**fields.get(key, {}), **value} if isinstance(value, dict) else value
    try:
        return RunSpec.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"RunSpec: {describe_errors(error)}") from None
