"""Which stages of an exported model run: from what a person typed to the model's layers.

How the model was cut is in the run's spec, which every export carries (`gossamer.json`). Stage 0 holds both ends and
always comes first; the others may be left out or exchanged, since layers are residual (SkipPipe, arXiv 2502.19913).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from peer.export import PROVENANCE_NAME
from protocols.errors import ConfigError, describe_errors
from protocols.run_spec import ModelSpec, RunSpec


def read_run(folder: Path, model: ModelSpec) -> RunSpec:
    """The run that the exported `model` is from; ConfigError when the folder does not say."""
    file = folder / PROVENANCE_NAME
    try:
        spec = RunSpec.model_validate(json.loads(file.read_text(encoding="utf-8"))["spec"])
    except ValidationError as error:
        raise ConfigError(f"{file}: spec: {describe_errors(error)}") from None
    except (OSError, ValueError, TypeError, KeyError):
        raise ConfigError(f"{file}: does not say how the model is cut into stages; export again") from None
    if spec.model != model:
        raise ConfigError(f"{file}: is about a model of other sizes than config.json; export again")
    return spec


def parse_stages(text: str) -> tuple[int, ...]:
    """`0,1,3`."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(f"stages {text!r}: give numbers with commas between, such as 0,1,3") from None


def check_order(spec: RunSpec, stages: Sequence[int]) -> None:
    """Any order of some stages, stage 0 first: what a path may skip and exchange in training does not bind here."""
    _check_stages(spec, stages)
    if tuple(stages[:1]) != (0,):
        raise ConfigError(
            "stage 0 must come first: it embeds the text, and nothing can be said without its head"
        )


def without(spec: RunSpec, dropped: Sequence[int]) -> tuple[int, ...]:
    """The stages that are left, in the model's order."""
    _check_stages(spec, dropped)
    if 0 in dropped:
        raise ConfigError("stage 0 cannot be dropped: it embeds the text and computes the loss")
    return tuple(stage for stage in range(spec.num_stages) if stage not in dropped)


def _check_stages(spec: RunSpec, stages: Sequence[int]) -> None:
    for stage in stages:
        if not 0 <= stage < spec.num_stages:
            raise ConfigError(f"stage {stage}: this model has the stages 0 to {spec.num_stages - 1}")
    if len(set(stages)) < len(stages):
        raise ConfigError(f"stages {','.join(map(str, stages))}: each can be named once")


def layers_of(spec: RunSpec, stages: Sequence[int]) -> list[int]:
    """The layers that these stages run, in order."""
    return [layer for stage in stages for layer in spec.layer_range(stage)]
