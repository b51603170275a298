"""A recipe's keys for its own preset, if overrides choose another: what goes, and what is told."""

from __future__ import annotations

import pytest
from slow import slow, soak

from agentevo.algorithms.presets import PRESETS
from agentevo.cli.main import main
from agentevo.config import AlgorithmSection, build_config, config_keys, load_config, sources
from agentevo.config.preset_keys import drop_idle_keys, kept_keys, own_values
from agentevo.config.sweep import load_sweep
from agentevo.errors import ConfigError

DOORS = {"environment": {"type": "test_doors"}}
RL = {**DOORS, "algorithm": {"entropy_coef": 0.2, "kl_coef": 0.1, "clip_high": 0.3}}
PPO = {**DOORS, "algorithm": {"name": "ppo", "lam": 0.9}, "critic": {"coef": 0.3}}
DPO = {**DOORS, "algorithm": {"name": "dpo", "beta": 0.2, "pairs": "all", "reference": "synced"}}


def test_an_algorithm_of_another_kind_on_the_quickstart():
    algorithm = load_config("coins", ["algorithm.name=dpo"]).algorithm
    assert (algorithm.name, algorithm.entropy_coef) == ("dpo", 0.0)


@pytest.mark.parametrize("tree", [RL, *slow(PPO, DPO)], ids=["grpo", "ppo", "dpo"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_may_replace_every_other(tree, name):
    assert build_config(tree, [f"algorithm.name={name}"]).algorithm.name == name


CI_PRESETS = ("grpo", "ppo", "dpo", "kto", "rft")
"""Presets with all that others have: a critic, pairs, single answers, no reference."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["frozen_lake", *soak("coins", "sokoban")])
@pytest.mark.parametrize(
    "name", [*CI_PRESETS, *soak(*(name for name in PRESETS if name not in CI_PRESETS))]
)
def test_every_preset_passes_the_dry_run_of_a_packaged_recipe(recipe, name, capsys):
    assert main(["train", recipe, f"algorithm.name={name}", "--dry-run"]) == 0
    assert f"  name: {name}\n" in capsys.readouterr().out


@pytest.mark.parametrize("chosen", ["algorithm.name=maxrl", "algorithm.advantage=maxrl"])
def test_a_preset_that_divides_by_the_mean_reward_has_no_penalty_by_default(chosen):
    assert build_config(DOORS, [chosen]).agent.format_penalty == 0
    assert build_config(DOORS).agent.format_penalty == 0.1
    with pytest.raises(ConfigError, match="set it to 0"):
        build_config(DOORS, [chosen, "agent.format_penalty=0.2"])


def test_equal_groups_are_left_out_by_a_preset_whatever_the_recipe_says_for_its_own():
    lake = {**DOORS, "algorithm": {"drop_zero_variance": False}}
    assert build_config(lake, ["algorithm.name=dapo"]).algorithm.drop_zero_variance
    assert not build_config(lake, ["algorithm.name=gspo"]).algorithm.drop_zero_variance
    with pytest.raises(ConfigError, match="set dynamic_sampling=0 or drop_zero_variance=true"):
        build_config(lake, ["algorithm.name=dapo", "algorithm.drop_zero_variance=false"])


def test_the_keys_of_a_credit_function_stay_with_it():
    credit = {"credit": "mine", "turn_baseline": "place", "clip_high": 0.3}
    tree = {"algorithm": {**credit, "name": "dpo"}}
    dropped = drop_idle_keys({"algorithm": credit}, tree, [])
    assert dropped == ["algorithm.credit", "algorithm.turn_baseline", "algorithm.clip_high"]
    tree = {"algorithm": {**credit, "name": "rloo"}}
    assert drop_idle_keys({"algorithm": credit}, tree, []) == []


def test_what_is_left_out_is_told():
    is_text = config_keys().is_text
    lines = kept_keys(RL, ["algorithm.name=dpo"], where="r.yaml", is_text=is_text)
    assert lines == [
        "r.yaml sets keys for algorithm.name=grpo that dpo does not use; they are left out: "
        "algorithm.entropy_coef=0.2, algorithm.kl_coef=0.1, algorithm.clip_high=0.3"
    ]


@pytest.mark.parametrize(
    "override", ["algorithm.entropy_coef=0.1", "algorithm={name: dpo, entropy_coef: 0.1}"]
)
def test_what_an_override_sets_itself_is_refused_as_before(override):
    with pytest.raises(ConfigError, match="does not use entropy_coef"):
        build_config(RL, ["algorithm.name=dpo", override])


def test_a_recipe_that_contradicts_itself_is_refused_as_before():
    wrong = {**DOORS, "algorithm": {"name": "dpo", "entropy_coef": 0.1}}
    with pytest.raises(ConfigError, match="does not use entropy_coef"):
        build_config(wrong)
    with pytest.raises(ConfigError, match="does not use entropy_coef"):
        build_config(wrong, ["algorithm.beta=0.3"])


def test_a_variant_of_a_sweep_may_choose_another_preset(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "environment: {type: test_doors}\nalgorithm: {entropy_coef: 0.2}\n"
        "sweep: {variants: {plain: {}, pairs: {algorithm.name: dpo}}}\n"
    )
    sweep = load_sweep(recipe)
    assert sweep is not None
    coefs = {member.variant: member.config.algorithm.entropy_coef for member in sweep.members}
    assert coefs == {"plain": 0.2, "pairs": 0.0}


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
