"""Importance weights are on by default where tokens are not drawn from quite the policy that is
trained: by another program, or over a base in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest

from agentevo.algorithms.presets import PRESETS
from agentevo.config import RunConfig, build_config
from agentevo.errors import ConfigError

ON = ("token_tis", "recomputed")
OFF = ("none", "rollout")


def config_of(engine: str = "other", *overrides: str, **algorithm: Any) -> RunConfig:
    tree = {"environment": {"type": "coins"}, "model": {"name": "tiny"}}
    return build_config(tree | {"engine": {"type": engine}, "algorithm": algorithm}, overrides)


def weights_of(config: RunConfig) -> tuple[str, str]:
    return config.algorithm.importance, config.algorithm.old_logprobs


@pytest.mark.parametrize(
    ("engine", "given", "expected"),
    [
        ("torch", {}, OFF),
        ("other", {}, ON),
        ("other", {"name": "dapo"}, ON),
        ("other", {"importance": "none"}, OFF),
        ("other", {"old_logprobs": "rollout"}, OFF),
        ("other", {"old_logprobs": "recomputed"}, ON),
        ("other", {"importance": "token_mis", "old_logprobs": "recomputed"}, ("token_mis", ON[1])),
        ("other", {"train_observations": True, "old_logprobs": "recomputed"}, ("none", ON[1])),
    ],
)
def test_the_default_follows_the_engine_and_what_is_given_decides(
    engine: str, given: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert weights_of(config_of(engine, **given)) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("model.lora.quantize=8bit",), ON),
        (("model.lora.quantize=4bit",), OFF),
        (("model.lora.quantize=8bit", "algorithm.importance=none"), OFF),
        (("model.lora.quantize=8bit", "engine.type=vllm", "algorithm.name=dapo"), ON),
    ],
)
def test_a_base_in_8_bits_has_them_too(overrides: tuple[str, ...], expected: object) -> None:
    tree = {"environment": {"type": "coins"}, "model": {"name": "some/model"}}
    config = build_config(tree, ["model.lora.rank=8", *overrides])
    assert weights_of(config) == expected


def test_overrides_count_as_given_and_choose_the_engine() -> None:
    assert weights_of(config_of("other", "algorithm.importance=none")) == OFF
    assert weights_of(config_of("torch", "engine.type=other")) == ON
    assert weights_of(build_config({"environment": {"type": "coins"}}, ["engine.type=other"])) == ON


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_is_refused_for_its_engine(name: str) -> None:
    """Whatever the algorithm is, an engine is no contradiction that nobody wrote."""
    plain, foreign = [_outcome(engine, name) for engine in ("torch", "other")]
    assert plain == foreign


def _outcome(engine: str, name: str) -> str:
    """Empty, or why the recipe is refused."""
    try:
        config_of(engine, name=name)
    except ConfigError as error:
        return str(error)
    return ""


def test_what_was_resolved_is_read_again_as_it_is() -> None:
    first = config_of("other", importance="none")
    again = build_config(first.model_dump(mode="json"), [])
    assert weights_of(again) == OFF


def test_a_decay_without_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="importance_age_power=1 lets importance weights decay"):
        config_of("torch", importance_age_power=1.0)
    assert config_of("other", importance_age_power=1.0).algorithm.importance_age_power == 1.0
