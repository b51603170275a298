"""What is told of a recipe's hyper-parameters when the command line names another preset."""

from __future__ import annotations

import pytest

from agentevo.algorithms.presets import PRESETS
from agentevo.config import AlgorithmSection, build_config, config_keys, sources
from agentevo.config.preset_keys import kept_keys, own_values

TREE = {
    "environment": {"type": "test_doors"},
    "algorithm": {"clip_high": 0.28, "entropy_coef": 0.2, "drop_zero_variance": True},
    "trainer": {"groups_per_step": 7},
}


def told(*overrides: str, tree: dict = TREE) -> list[str]:
    return kept_keys(tree, overrides, where="r.yaml", is_text=config_keys().is_text)


def test_what_stays_is_told_with_the_presets_own_and_the_remedy():
    lines = told("algorithm.name=gspo")
    assert lines == [
        "r.yaml sets values for algorithm.name=grpo, and they stay in effect with gspo:",
        "  algorithm.clip_high=0.28    gspo's own is 0.0004",
        "  algorithm.entropy_coef=0.2  gspo's own is 0.0",
        "to use gspo's own, add: algorithm.clip_high=0.0004 algorithm.entropy_coef=0.0",
    ]


def test_the_remedy_is_one():
    remedy = told("algorithm.name=gspo")[-1].partition("add: ")[2].split()
    assert told("algorithm.name=gspo", *remedy) == []
    config = build_config(TREE, ["algorithm.name=gspo", *remedy])
    assert (
        config.algorithm.resolve().loss_hyper["clip_high"]
        == AlgorithmSection(name="gspo").resolve().loss_hyper["clip_high"]
    )


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("trainer.steps=3", "run.seed=${trainer.groups_per_step}"),
        ("algorithm.name=grpo",),
        ("algorithm.kl_coef=0.1",),
        ("algorithm.name=nothing_like_it",),
        ("algorithm={name: gspo, clip_high: 0.1, entropy_coef: 0.3}",),
        ("algorithm.clip_high=0.001", "algorithm.entropy_coef=0.1", "algorithm.name=gspo"),
    ],
    ids=str,
)
def test_nothing_to_tell(overrides: tuple[str, ...]):
    assert told(*overrides) == []


def test_a_recipe_of_another_preset_or_without_hyper_parameters():
    assert (
        told(
            "algorithm.name=grpo", tree={**TREE, "algorithm": {"name": "gspo", "clip_high": 0.001}}
        )[1].split()[-1]
        == "0.2"
    )
    assert told("algorithm.name=gspo", tree={"environment": {"type": "test_doors"}}) == []
    assert told("algorithm.name=gspo", tree={**TREE, "algorithm": {"name": "grpo"}}) == []


def test_what_is_equal_to_the_presets_own_is_not_told():
    assert "clip_high" not in "".join(told("algorithm.name=dapo")), "0.28 is DAPO's own"


@pytest.mark.parametrize("name", PRESETS)
def test_own_values_are_what_the_preset_computes_with(name: str):
    own = own_values(name)
    section = AlgorithmSection(name=name)
    preference = section.preference()
    if preference is not None:
        used = dict(preference.hyper)
    else:
        algorithm = section.resolve()
        used = {**algorithm.advantage_hyper, **algorithm.loss_hyper, **algorithm.aggregation_hyper}

    assert {key: own[key] for key in used} == used


def test_the_packaged_recipe_that_is_wrong_by_orders_of_magnitude():
    tree = sources.read_yaml(sources.find_recipe("frozen_lake"))
    assert any(
        "clip_high=0.28" in line and "0.0004" in line
        for line in told("algorithm.name=gspo", tree=tree)
    )


def test_options_of_python_tell_the_same():
    def told_by(**algorithm: object) -> list[str]:
        is_text = config_keys().is_text
        options = {"algorithm": algorithm}
        return kept_keys(TREE, (), where="r.yaml", is_text=is_text, options=options)

    assert told_by(name="gspo")[:-1] == told("algorithm.name=gspo")[:-1]
    assert told_by(name="gspo", clip_high=0.1, entropy_coef=0.3) == []
    assert told_by(clip_high=0.1) == []
