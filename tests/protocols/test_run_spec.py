"""What all peers of a run agree on, and how a person hears that it cannot work."""

from __future__ import annotations

import json

import pytest

from protocols.errors import ConfigError
from protocols.run_spec import PRESET_NAMES, OuterMode, RunSpec, preset


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_a_preset_survives_its_text(name: str):
    spec = preset(name)
    assert RunSpec.from_json(spec.to_json()) == spec
    assert RunSpec.from_json(spec.to_json()).run_id == spec.run_id


def test_any_difference_gives_another_run():
    """Peers that disagree never meet: their keys and streams have different names."""
    ids = {
        preset("nano").run_id,
        preset("nano", seed=1).run_id,
        preset("nano", outer={"inner_steps": 11}).run_id,
        preset("nano", name="other").run_id,
    }
    assert len(ids) == 4
    assert preset("nano").run_id == preset("nano").run_id


def test_a_diverging_gamma_is_refused_with_the_bound_and_the_way_out():
    """The published class defaults, alpha 0.9 and gamma 0.7, drive replicas apart."""
    with pytest.raises(ConfigError) as caught:
        preset("nano", outer={"mode": "paper", "alpha": 0.9, "beta": 0.7, "gamma": 0.7})
    text = str(caught.value)
    assert "gamma 0.7" in text
    assert "0.38" in text
    assert "propose" in text
    assert preset("nano", outer={"alpha": 0.9, "gamma": 0.7, "mode": OuterMode.PROPOSE}).outer.gamma == 0.7


def test_an_unknown_field_is_named_with_its_place():
    fields = json.loads(preset("nano").to_json())
    fields["rounds"]["microbatchs"] = 3
    with pytest.raises(ConfigError, match=r"run\.json: rounds\.microbatchs: "):
        RunSpec.from_json(json.dumps(fields), where="run.json")


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError, match=r"rounds\.rows: .*; rounds\.window: "):
        preset("nano", rounds={"rows": 0, "window": 0})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"liveness": {"ping_s": 9.0}}, "ping_s .* must not exceed heartbeat_s"),
        ({"liveness": {"round_s": 500.0}}, "round_s .* must not exceed lease_s"),
        ({"liveness": {"record_ttl_s": 12.0}}, "three heartbeats"),
        ({"num_stages": 4}, "cannot be cut into 3 equal stages"),
        ({"rounds": {"seq_len": 4096}}, "seq_len exceeds"),
        ({"paths": {"path_stages": 9}}, "path_stages exceeds"),
        ({"paths": {"growth": [[5, 3], [2, 4]]}}, "paths.growth"),
        ({"paths": {"growth": [[0, 9]]}}, "paths.growth"),
        ({"protocol_version": 9}, "this release speaks 2"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(changes: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        preset("nano", **changes)


def test_heads_must_divide_the_width():
    fields = json.loads(preset("nano").to_json())
    fields["model"]["num_attention_heads"] = 3
    with pytest.raises(ConfigError, match="multiple of num_attention_heads"):
        RunSpec.from_json(json.dumps(fields))


@pytest.mark.parametrize("name", ["", "Up", "a/b", "-x", "x" * 33])
def test_a_run_name_is_fit_for_a_key(name: str):
    with pytest.raises(ConfigError, match="name"):
        preset("nano", name=name)


def test_an_unknown_model_names_the_known_ones():
    with pytest.raises(ConfigError, match="pico, nano, micro"):
        preset("mega")


def test_text_that_is_no_json_is_a_config_error():
    with pytest.raises(ConfigError, match="RunSpec"):
        RunSpec.from_json("{")


def test_layers_are_cut_without_gap_or_overlap():
    for name in PRESET_NAMES:
        spec = preset(name)
        layers = [layer for stage in range(spec.num_stages) for layer in spec.layer_range(stage)]
        assert layers == list(range(spec.model.num_hidden_layers))


def test_a_spec_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        preset("nano").seed = 3  # type: ignore[misc]
