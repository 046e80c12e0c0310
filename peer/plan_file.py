"""Planning problems in files: cost matrices, arrangements, and the published plans that come with Gossamer.

The format is that of the published instances (`assets/skippipe/README.md`). Peers are numbered from 0; inside the
planner they are called by their number with leading zeros, so that both sort alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from protocols.errors import ConfigError, describe_errors
from protocols.planning import Instance, PathRules, Timing, make_instance
from protocols.swarm import PeerId

FILE_BYTES_MAX = 256 << 20  # a matrix of 4,000 peers, each cost with 16 characters
GAP_S, GAP_START_S = 0.13, 0.09  # how long a peer of the published cost model pauses after a job
AGENTS = 3  # of an originator, in a published plan: each sends one microbatch after the other
COARSE_APART_S, WAVE_S = 1.0, 2.5  # between the first sends of agents, and between an agent's own

Arrangement = tuple[tuple[int, ...], ...]
_ARRANGEMENT = TypeAdapter(Arrangement)


class MatrixFile(BaseModel):
    """What is read of an instance file; `make_instance` checks the numbers."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    link_cost_s: list[list[float]]
    compute_forward_s: list[float]
    stage_sizes: list[int]
    path_length: int
    memory_per_node: int
    microbatches_per_origin: int
    backward_factor: float = Field(ge=0, allow_inf_nan=False)
    loss_factor: float = Field(ge=0, allow_inf_nan=False)
    stage_visits_max_per_wave: int | None = None
    setting: str = ""
    node_location: list[str] = []

    def names(self) -> tuple[PeerId, ...]:
        digits = len(str(len(self.compute_forward_s) - 1))
        return tuple(f"{number:0{digits}}" for number in range(len(self.compute_forward_s)))

    def instance(
        self,
        arrangement: Arrangement | None = None,
        *,
        slots: int | None = None,
        originator_slots: int | None = None,
    ) -> Instance:
        """ConfigError says which number is wrong."""
        names = self.names()
        self._check_rows()
        stage_of = None if arrangement is None else _stage_of(arrangement, names)
        sizes = self.stage_sizes if arrangement is None else [len(stage) for stage in arrangement]
        instance = make_instance(
            names,
            self.compute_forward_s,
            self.link_cost_s,
            rules=PathRules(num_stages=len(sizes), path_stages=self.path_length),
            microbatches=self.microbatches_per_origin,
            slots=self.memory_per_node if slots is None else slots,
            stage_of=stage_of,
            stage_sizes=sizes,
            originator_slots=originator_slots,
            timing=Timing(
                backward_factor=self.backward_factor,
                loss_factor=self.loss_factor,
                gap_s=GAP_S,
                gap_start_s=GAP_START_S,
            ),
        )
        if slots is None:  # the cap on visits was made for the file's own slots
            self._check_visits(instance)
        return instance

    def _check_rows(self) -> None:
        num_peers = len(self.compute_forward_s)
        for number, row in enumerate(self.link_cost_s):
            if len(row) != num_peers:
                raise ConfigError(
                    f"the link costs are not square: row {number} has {len(row)} entries for {num_peers} peers"
                )

    def _check_visits(self, instance: Instance) -> None:
        """Equal visits leave no choice of how often a stage is visited."""
        if self.stage_visits_max_per_wave is None:
            return
        rules = instance.rules
        visits = instance.total_microbatches * (rules.path_stages - 1) / len(rules.relayed_stages)
        allowed = self.stage_visits_max_per_wave * instance.waves
        if int(visits) > allowed:
            raise ConfigError(
                f"each stage after the first is visited {visits:g} times a round, but stage_visits_max_per_wave"
                f" allows {self.stage_visits_max_per_wave} x {instance.waves} waves = {allowed}:"
                f" {int(visits) - allowed} too few. Allow more, or make paths or rounds shorter"
            )


def _stage_of(arrangement: Arrangement, names: tuple[PeerId, ...]) -> dict[PeerId, int]:
    numbers = [number for stage in arrangement for number in stage]
    if len(set(numbers)) != len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ConfigError(f"the arrangement names peer {twice} twice: a peer serves one stage")
    if strangers := [number for number in numbers if not 0 <= number < len(names)]:
        raise ConfigError(
            f"the arrangement names peer {strangers[0]}, but peers are numbered 0 to {len(names) - 1}"
        )
    return {names[number]: stage for stage, numbers in enumerate(arrangement) for number in numbers}


def read_matrix(path: Path) -> MatrixFile:
    try:
        return MatrixFile.model_validate(_read_json(path))
    except ValidationError as error:
        raise ConfigError(f"{path} is no instance to plan: {describe_errors(error)}") from None


def read_arrangement(path: Path) -> Arrangement:
    """A list of stages, each a list of peer numbers."""
    try:
        return _ARRANGEMENT.validate_python(_read_json(path))
    except ValidationError as error:
        raise ConfigError(
            f"{path} is no arrangement (a list of stages, each a list of peer numbers): {describe_errors(error)}"
        ) from None


def _read_json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give a JSON file of costs") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is too big for an instance (over {FILE_BYTES_MAX >> 20} MiB)")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPlan:
    """The best that the published scheduler found for an instance: its coarse plan, one path an originator.

    `paths` in injection order; a microbatch is sent at its release, once the one that it comes `after` is back.
    """

    arrangement: Arrangement
    paths: tuple[tuple[int, ...], ...]
    release_s: tuple[float, ...]
    after: tuple[int | None, ...]
    expected_s: float


def published_plan(matrix: MatrixFile) -> PublishedPlan | None:
    """None where `matrix` is none of the published settings, or differs from it in any number."""
    setting = _asset("official_runs.json")["settings"].get(matrix.setting)
    if setting is None or matrix != MatrixFile.model_validate(_asset(f"instance_{matrix.setting}.json")):
        return None
    run = setting["runs"]["ca_coarse"]
    turns = run["path_repeats"] // AGENTS
    sends = [
        (tuple(path), agent * COARSE_APART_S + turn * WAVE_S, turn)
        for path in run["paths"]
        for agent in range(AGENTS)
        for turn in range(turns)
    ]
    return PublishedPlan(
        arrangement=_ARRANGEMENT.validate_python(setting["partitions"]),
        paths=tuple(path for path, _, _ in sends),
        release_s=tuple(release_s for _, release_s, _ in sends),
        after=tuple(index - 1 if turn else None for index, (_, _, turn) in enumerate(sends)),
        expected_s=run["expected_time_s"],
    )


@lru_cache
def _asset(name: str) -> Any:
    return json.loads((files("peer") / "assets" / "skippipe" / name).read_text(encoding="utf-8"))


def published_matrix(setting: str) -> MatrixFile:
    """One of the instances that come with Gossamer."""
    return MatrixFile.model_validate(_asset(f"instance_{setting}.json"))
