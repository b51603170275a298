"""What a recipe says for its own preset only goes when overrides choose another preset."""

from __future__ import annotations

import pytest
from slow import soak

from agentevo.algorithms.presets import PRESETS
from agentevo.cli.main import main
from agentevo.config import build_config, config_keys, load_config
from agentevo.config.preset_keys import drop_idle_keys, kept_keys
from agentevo.config.sweep import load_sweep
from agentevo.errors import ConfigError

DOORS = {"environment": {"type": "test_doors"}}
RL = {**DOORS, "algorithm": {"entropy_coef": 0.2, "kl_coef": 0.1, "clip_high": 0.3}}
PPO = {**DOORS, "algorithm": {"name": "ppo", "lam": 0.9}, "critic": {"coef": 0.3}}
DPO = {**DOORS, "algorithm": {"name": "dpo", "beta": 0.2, "pairs": "all", "reference": "synced"}}


def test_an_algorithm_of_another_kind_on_the_quickstart():
    algorithm = load_config("coins", ["algorithm.name=dpo"]).algorithm
    assert (algorithm.name, algorithm.entropy_coef) == ("dpo", 0.0)


@pytest.mark.parametrize("tree", [RL, PPO, DPO], ids=["grpo", "ppo", "dpo"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_may_replace_every_other(tree, name):
    assert build_config(tree, [f"algorithm.name={name}"]).algorithm.name == name


@pytest.mark.parametrize("recipe", ["frozen_lake", *soak("coins", "sokoban")])
@pytest.mark.parametrize("name", PRESETS)
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
