"""The section model.lora: what it reads, and what can't hold together."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from agentevo.config import build_config, config_keys, to_yaml
from agentevo.errors import ConfigError

BASE = {"environment": {"type": "coins"}, "model": {"name": "smollm2-135m-instruct"}}


def built(*overrides: str):
    return build_config(BASE, overrides)


def test_the_default_trains_the_whole_model():
    assert not built().model.lora.enabled


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("model.lora.targets=q_proj", "targets", ("q_proj",)),
        ("model.lora.targets=[q_proj,v_proj]", "targets", ("q_proj", "v_proj")),
        ("model.lora.rank_pattern={q_proj: 4}", "rank_pattern", {"q_proj": 4}),
        ("model.lora.alpha=32", "alpha", 32),
        ("model.lora.modules_to_save=[lm_head]", "modules_to_save", ("lm_head",)),
        ("model.lora.dora=true", "dora", True),
        ("model.lora.quantize=4bit", "quantize", "4bit"),
    ],
)
def test_options_come_from_the_command_line_and_survive_the_file(override, key, value, tmp_path):
    config = built("model.lora.rank=16", override)
    assert config.model.lora.enabled
    assert getattr(config.model.lora, key) == value
    assert build_config(yaml.safe_load(to_yaml(config))) == config


def test_an_adapter_to_start_from(tmp_path):
    lora = built(f"model.lora.adapter={tmp_path}").model.lora
    assert lora.enabled and lora.adapter == tmp_path
    assert built("model.lora.adapter=~/x").model.lora.adapter == Path.home() / "x"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.lora.alpha=8"], "alpha is for adapters.*rank=16"),
        (["model.lora.quantize=4bit"], "quantize is for adapters"),
        (
            ["model.lora.rank=4", "model.lora.adapter=x"],
            "brings its own settings, so rank would do nothing",
        ),
        (["model.lora.adapter=x", "model.lora.dora=true"], "so dora would do nothing"),
        (["model.lora.rank=4", "model.lora.targets=[all-linear,q_proj]"], "includes the others"),
        (["model.lora.rank=4", "model.lora.layers=[0]"], "layers needs targets by name"),
        (["model.lora.rank=3", "model.lora.init=orthogonal"], "needs even ranks"),
        (["model.lora.rank=4", "model.name=tiny"], "tiny policy's weights are random"),
        (["model.lora.rank=4", "model.lora.dropout=0.1"], "dropout=0.1 is for supervised training"),
        (["model.lora.rank=4", "model.lora.init=pissa"], "model.lora.init"),
        (["model.lora.rnak=4"], "did you mean.*rank"),
    ],
)
def test_contradictions_are_refused_with_the_remedy(overrides, message):
    with pytest.raises(ConfigError, match=message):
        built(*overrides)


def test_dropout_goes_with_a_cold_start():
    assert (
        built(
            "model.lora.rank=4", "model.lora.dropout=0.1", "cold_start.episodes=5"
        ).model.lora.dropout
        == 0.1
    )


def test_every_key_is_explained():
    for name in (name for name in config_keys().names() if name.startswith("model.lora.")):
        assert len(config_keys().explain(name)[0].meaning) > 10, name
