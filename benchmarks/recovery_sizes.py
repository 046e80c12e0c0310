"""How large the recovery studies are: a tiny model for any CPU, and one of 178 million weights for a card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from protocols.run_spec import RunSpec, preset

STAGES = 7
MIDDLE = (1, 2, 3, 4, 5, 6)
INNER = (2, 3, 4, 5)  # both neighbours have their shape, and neither is an edge
PAIRS = ((2, 3), (3, 4), (4, 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model, and how long each study trains it (rounds)."""

    sections: Mapping[str, Mapping[str, Any]] = field(repr=False)  # of the RunSpec, over those of pico
    layers_per_stage: int
    device: str
    seeds: tuple[int, ...]
    base_rounds: int  # before the first loss
    tail_rounds: int  # at most, after one loss
    churn_rounds: int
    target_rounds: int  # failure-free, to the loss that others must reach (A8)
    crucible_rounds: int
    crucible_lr: float  # at its highest
    validation_tokens: int
    validate_every: int
    kept_microbatches: int  # whose boundary activations the neighbours still have
    shadow_every: int = 50
    checkpoint_every: int = 50
    refit_steps: int = 64  # of one stage; twice as many of two together

    @property
    def rows(self) -> int:
        return self.sections["rounds"]["rows"]

    @property
    def seq_len(self) -> int:
        return self.sections["rounds"]["seq_len"]

    def spec(self, seed: int, *, num_stages: int = STAGES, is_outage_study: bool = False) -> RunSpec:
        """The first stage is embedding and head alone. In a study of outages the rate falls to a tenth."""
        fields = preset("pico", name="recovery", seed=seed).model_dump()
        for name, section in self.sections.items():
            fields[name] = {**fields[name], **section}
        if is_outage_study:
            fields["rounds"]["total_rounds"] = self.crucible_rounds
            fields["optimizer"] |= {"lr": self.crucible_lr, "lr_min_share": 0.1}
        fields["num_stages"] = num_stages
        fields["model"]["num_hidden_layers"] = self.layers_per_stage * (num_stages - 1)
        return RunSpec.model_validate(fields)


TINY = Size(
    sections={
        "rounds": {"rows": 8, "seq_len": 64, "microbatches": 1, "total_rounds": 100_000},
        "optimizer": {"lr": 4e-3, "lr_min_share": 1.0, "warmup_rounds": 50},
    },
    layers_per_stage=1,
    device="cpu",
    seeds=(0, 1, 2),
    base_rounds=549,
    tail_rounds=60,
    churn_rounds=200,
    target_rounds=400,
    crucible_rounds=350,
    crucible_lr=2e-3,
    validation_tokens=8_192,
    validate_every=10,
    kept_microbatches=16,
)
"""Rounds of 512 tokens at a constant rate, so that a run may take any number of them."""

QUICK = replace(
    TINY,
    seeds=(0,),
    base_rounds=249,
    tail_rounds=30,
    churn_rounds=100,
    target_rounds=200,
    crucible_rounds=60,
    validation_tokens=4_096,
    validate_every=10,
)

LARGE = replace(
    TINY,
    sections={
        "model": {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3232,
                  "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 512},
        "rounds": {"rows": 16, "seq_len": 512, "microbatches": 1, "total_rounds": 100_000},
        "optimizer": {"lr": 4e-4, "lr_min_share": 1.0, "warmup_rounds": 200, "dtype": "bfloat16"},
        "data": {"tokenizer": "bpe4096"},
    },
    layers_per_stage=2,
    device="cuda",
    base_rounds=2_999,
    tail_rounds=300,
    churn_rounds=1_500,
    target_rounds=3_000,
    crucible_rounds=1_500,
    crucible_lr=4e-4,
    validation_tokens=262_144,
    validate_every=25,
)  # fmt: skip
"""12 layers; embedding and head, with a vocabulary of 4,096, are 8 of the 178 million weights."""

SIZES = {"tiny": TINY, "178m": LARGE}
