"""Keys about filters, length and penalties: what can't hold together is refused with a remedy."""

from __future__ import annotations

import pytest
import yaml

from agentevo.config import AlgorithmSection, build_config, to_yaml
from agentevo.errors import ConfigError


def build(algorithm, group_size: int = 4):
    return build_config(
        {
            "environment": {"type": "bandit"},
            "model": {"name": "tiny"},
            "agent": {"max_turns": 5},
            "sampling": {"max_new_tokens": 20},
            "trainer": {"group_size": group_size},
            "algorithm": algorithm,
        }
    )


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (
            {"dynamic_sampling": 5, "keep_groups": 0.5},
            "keep_groups=0.5 removes most of them: set dynamic_sampling=0 or keep_groups=1",
        ),
        (
            {"name": "starpo_s", "dynamic_sampling": 5},
            "algorithm.keep_groups=0.25 removes most of them",
        ),
        (
            {"name": "dapo", "drop_zero_variance": False},
            "set dynamic_sampling=0 or drop_zero_variance=true",
        ),
        (
            {"rlpr_decay": 0.5},
            "while algorithm.rlpr_beta is null: set rlpr_beta (0.5, say) or remove rlpr_decay",
        ),
        ({"rlpr_start": 5}, "set rlpr_beta (0.5, say) or remove rlpr_start"),
        ({"rlpr_record_from": 5}, "set rlpr_beta (0.5, say) or remove rlpr_record_from"),
        ({"name": "rlpr", "rlpr_beta": None, "rlpr_decay": 0.5}, "remove rlpr_decay"),
        (
            {"rlpr_beta": 0.5, "rlpr_record_from": 11},
            "rlpr_start=11 leaves no step to record, because recording starts at",
        ),
        ({"rlpr_beta": 0.5, "rlpr_start": 6}, "set rlpr_record_from below rlpr_start"),
        ({"rlpr_beta": 0}, "rlpr_beta: got 0; needs"),
        ({"dynamic_sampling": -1}, "dynamic_sampling: got -1; needs"),
        (
            {"length_max": 30},
            "algorithm.length_max has no effect with algorithm.length_shaping=none: remove it, or "
            "set length_shaping=soft_",
        ),
        (
            {"length_shaping": "linear", "length_weight": 1, "length_buffer": 3},
            "length_buffer has no effect with algorithm.length_shaping=linear",
        ),
        (
            {"length_shaping": "cosine", "length_weight": 3},
            "length_shaping=soft_overlong or linear or relative",
        ),
        (
            {"length_shaping": "relative", "length_rewards": [1, 2, 3, 4, 5]},
            "length_rewards has no effect with",
        ),
        ({"length_shaping": "cosine", "length_rewards": [1, 2]}, "needs a list of 5 numbers"),
        (
            {"length_shaping": "linear"},
            "needs algorithm.length_weight: give the reward that a token costs",
        ),
        (
            {"length_shaping": "soft_overlong", "length_buffer": 101},
            "length_buffer=101 is more than the 100 tokens of algorithm.length_max",
        ),
        (
            {"length_shaping": "soft_overlong", "length_buffer": 9, "length_max": 8},
            "lower length_buffer or raise length_max",
        ),
        ({"name": "remax", "length_shaping": "relative"}, "choose soft_overlong, linear or cosine"),
    ],
    ids=str,
)
def test_what_cannot_hold_together_is_refused(algorithm, said):
    with pytest.raises(ConfigError) as error:
        build(algorithm)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ({"name": "arpo", "dynamic_sampling": 2}, "dynamic_sampling=2"),
        ({"name": "arpo", "rlpr_beta": 0.5}, "rlpr_beta=0.5"),
        ({"name": "arpo", "length_shaping": "relative"}, "length_shaping=relative"),
    ],
)
def test_filters_need_a_group(algorithm, key):
    assert build(algorithm).trainer.group_size == 4
    with pytest.raises(ConfigError) as error:
        build(algorithm, group_size=1)
    assert (
        f"algorithm.{key} compares the members of a group, but trainer.group_size is 1: set it "
        "to 2 or more" in str(error.value)
    )


def test_what_may_be_combined():
    assert (
        build(
            {
                "name": "dapo",
                "length_shaping": "soft_overlong",
                "length_buffer": 100,
                "rlpr_beta": 0.5,
            }
        ).length_max
        == 100
    )
    assert build({"length_shaping": "cosine", "length_max": 7}).length_max == 7
    assert (
        build({"name": "remax", "dynamic_sampling": 1}, group_size=1).algorithm.dynamic_sampling
        == 1
    )
    assert (
        build(
            {"name": "dapo", "dynamic_sampling": 0, "drop_zero_variance": False}
        ).algorithm.clip_high
        is None
    )


def test_presets_bring_their_filters_and_a_recipe_may_take_them_away():
    assert AlgorithmSection(name="dapo").dynamic_sampling == 10
    assert AlgorithmSection(name="dapo", dynamic_sampling=0).dynamic_sampling == 0

    starpo_s = AlgorithmSection(name="starpo_s")
    assert (
        starpo_s.keep_groups,
        starpo_s.kl_coef,
        starpo_s.resolve().loss_hyper["clip_high"],
    ) == (0.25, 0.0, 0.28)
    assert starpo_s.resolve().aggregation == "per-trajectory-token-mean"
    assert (
        AlgorithmSection(name="rlpr").rlpr_beta,
        AlgorithmSection(name="rlpr", rlpr_beta=None).rlpr_beta,
    ) == (0.5, None)

    remax = AlgorithmSection(name="remax").resolve()
    assert (remax.advantage, remax.policy_loss, remax.aggregation) == (
        "remax",
        "reinforce",
        "seq-mean-token-sum",
    )


def test_the_name_stays_the_first_key_and_the_tree_survives_its_yaml(tmp_path):
    config = build(
        {
            "name": "dapo",
            "length_shaping": "cosine",
            "length_rewards": [1, 2, 3, 4, 5],
            "dynamic_sampling": 0,
        }
    )
    text = to_yaml(config)
    assert "\nalgorithm:\n  name: dapo\n" in text
    assert build_config(yaml.safe_load(text)).algorithm == config.algorithm


RECIPE = {
    "tasks": "tasks.jsonl",
    "model": {"name": "tiny", "tiny": {"tokenizer": "byte"}},
    "rewards": ["numeric"],
}


@pytest.mark.parametrize(
    ("agent", "key"),
    [
        ({"type": "code_agent", "code_penalty": 0.1}, "code_penalty"),
        ({"type": "tool_agent", "tools": ["calculator"], "call_penalty": 0.1}, "call_penalty"),
    ],
)
def test_a_penalty_that_counts_for_nothing_is_refused(agent, key):
    with pytest.raises(ConfigError, match=rf"agent\.{key} .*rewards=\[numeric, returned\]"):
        build_config({**RECIPE, "agent": agent})

    both = {**RECIPE, "agent": agent, "rewards": ["numeric", "returned"]}
    assert getattr(build_config(both).agent, key) == 0.1
    assert build_config({**RECIPE, "agent": {**agent, key: 0}})
