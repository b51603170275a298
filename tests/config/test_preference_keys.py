"""Keys of algorithms that train by a preference loss: what makes no sense together is refused, with
the way out."""

from __future__ import annotations

import pytest
import yaml

from agentevo.algorithms.describe import describe
from agentevo.algorithms.presets import PREFERENCE_PRESETS, resolve_preference
from agentevo.cli.listings import algorithms
from agentevo.config import AlgorithmSection, RunConfig, build_config, to_yaml
from agentevo.errors import ConfigError


def build(algorithm: dict, **sections) -> RunConfig:
    tree = {
        "environment": {"type": "bandit"},
        "model": {"name": "tiny"},
        "algorithm": algorithm,
        **sections,
    }
    return build_config(tree)


@pytest.mark.parametrize("name", PREFERENCE_PRESETS)
def test_every_preset_settles_is_explained_and_comes_back_from_yaml(name):
    config = build({"name": name})
    assert config.algorithm.preference() == resolve_preference(name, {})
    assert PREFERENCE_PRESETS[name].parts["preference_loss"] in describe(name)[0]
    assert name in dict(algorithms())
    again = build_config(yaml.safe_load(to_yaml(config)))
    assert again == config


def test_what_a_recipe_chooses_wins_and_the_rest_is_the_presets():
    assert dict(AlgorithmSection(name="dpo", beta=0.5).preference().hyper) == {
        "beta": 0.5,
        "label_smoothing": 0.0,
    }

    swapped = AlgorithmSection(name="dpo", preference_loss="ipo", pairs="all").preference()
    assert (swapped.loss, dict(swapped.hyper), swapped.pairs) == ("ipo", {"beta": 0.1}, "all")

    spin = AlgorithmSection(name="spin")
    assert (spin.reference, spin.reference_every, spin.preference().pairs) == (
        "synced",
        10,
        "demonstrations",
    )
    assert AlgorithmSection(name="spin", reference_every=3).reference_every == 3
    assert AlgorithmSection().preference() is None
    assert AlgorithmSection(name="dpo").within_group
    assert not AlgorithmSection(name="rft").within_group


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (
            {"name": "dpo", "advantage": "grpo"},
            "name=dpo (preference loss dpo) does not use advantage: remove it. Its "
            "hyper-parameters are beta, label_smoothing",
        ),
        (
            {"name": "dpo", "policy_loss": "gspo", "kl": "k1"},
            "does not use policy_loss, kl: remove them",
        ),
        (
            {"name": "dpo", "kl_coef": 0.1},
            "does not use kl_coef: remove it. Its hyper-parameters are beta, label_smoothing; the "
            "pull to the reference is beta",
        ),
        ({"name": "orpo", "entropy_coef": 0.1}, "does not use entropy_coef"),
        (
            {"name": "kto", "importance": "token_tis", "old_logprobs": "recomputed"},
            "does not use old_logprobs, importance",
        ),
        ({"name": "dpo", "clip_low": 0.1}, "clip_low belongs to policy loss ppo_clip, "),
        (
            {"name": "dpo", "beta": 0.0},
            "preference loss dpo: beta=0.0 is not possible: give a number above 0",
        ),
        (
            {"name": "orpo", "beta": 0.1},
            "does not use beta: remove it. Its hyper-parameters are coef; beta belongs to policy "
            "loss dro, preference loss dpo, ipo, kto, spin, sppo",
        ),
        (
            {"name": "orpo", "reference": "ema"},
            "does not use reference: remove it. Its hyper-parameters are coef; preference loss "
            "orpo has no reference",
        ),
        (
            {"name": "kto", "pairs": "all"},
            "does not use pairs: remove it. Its hyper-parameters are beta, desirable_weight, "
            "undesirable_weight; preference loss kto takes single answers",
        ),
        (
            {"name": "kto", "pairs_per_group": 2},
            "kto takes every attempt",
        ),
        (
            {"name": "rft", "pair_margin": 0.1},
            "does not use pair_margin: remove it. Its hyper-parameters are none; preference loss "
            "rft takes single answers",
        ),
        (
            {"name": "spin", "pair_margin": 0.1},
            "demonstrations have no margin",
        ),
        (
            {"pairs": "all"},
            "pairs works only with a preference loss (name=dpo, ipo, ",
        ),
        (
            {"preference_loss": "dpo"},
            "name=grpo (advantage grpo, policy loss ppo_clip, aggregation token-mean) does not use "
            "preference_loss: remove it. Its hyper-parameters are scale_by_std, epsilon, clip_low, "
            "clip_high, dual_clip; preference_loss works only with",
        ),
        ({"label_smoothing": 0.1}, "label_smoothing belongs to preference loss dpo"),
        ({"name": "dpoo"}, "algorithm.name: got 'dpoo'; did you mean dpo?"),
        (
            {"name": "dpo", "preference_loss": "dpoo"},
            "algorithm.preference_loss: got 'dpoo'; did you mean dpo?",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(algorithm, said):
    with pytest.raises(ConfigError) as error:
        build(algorithm)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("algorithm", "sections", "said"),
    [
        (
            {"name": "dpo"},
            {"data": {"pairs": "a.jsonl", "pairs_from": "runs/a"}},
            "data.pairs and data.pairs_from both set",
        ),
        (
            {},
            {"data": {"pairs": "a.jsonl"}},
            "need a preference loss, and algorithm.name=grpo has none: choose one of dpo",
        ),
        (
            {"name": "dpo", "pairs": "all"},
            {"data": {"pairs": "a.jsonl"}},
            "so algorithm.pairs does nothing: remove it",
        ),
        (
            {"name": "spin"},
            {"data": {"pairs_from": "runs/a"}},
            "lets the environment's solver play sampled tasks, not stored groups",
        ),
        (
            {"name": "dpo"},
            {"reward_model": {"name": "x"}},
            "reward_model.name scores single tokens",
        ),
        (
            {"name": "dpo"},
            {"trainer": {"group_size": 1}},
            "algorithm.name=dpo compares the members of a group, but trainer.group_size is 1",
        ),
        ({"name": "dpo"}, {"data": {"pairs": ""}}, "got an empty path"),
    ],
)
def test_what_contradicts_another_section_is_refused(algorithm, sections, said):
    with pytest.raises(ConfigError) as error:
        build(algorithm, **sections)
    assert said in str(error.value)


def test_one_attempt_is_enough_where_none_is_compared():
    for name in ("kto", "rft", "spin"):
        assert build({"name": name}, trainer={"group_size": 1}).trainer.group_size == 1
    assert build({"name": "dpo"}, trainer={"group_size": 1}, data={"pairs": "a.jsonl"}).data.given


def test_a_solver_needs_an_environment():
    with pytest.raises(
        ConfigError, match=r"algorithm\.pairs=demonstrations needs an environment with a solver"
    ):
        build_config(
            {"model": {"name": "tiny"}, "algorithm": {"name": "spin"}}, needs_environment=False
        )
