"""Algorithms that need more than groups, in whole small runs: what they compute beside the policy
gets there, and survives a restart."""

from __future__ import annotations

import io

import pytest
from slow import soak
from transformers import LlamaConfig, LlamaForTokenClassification

from agentevo.api.run import train
from agentevo.config import build_config
from agentevo.errors import ModelError
from agentevo.observability import LiveView, read_metrics
from agentevo.runs.orchestration.components import open_components
from agentevo.runtime.event_loop import run_coroutine

SHORT = [
    "algorithm.kl_coef=0",
    "trainer.steps=2",
    "trainer.groups_per_step=2",
    "evaluation.every=0",
    "cold_start.episodes=20",
    "checkpoint.every=0",
]
CASES = {
    "ppo": (
        ["algorithm.name=ppo"],
        ["critic/vf_loss", "critic/vf_explained_var", "critic/grad_norm"],
    ),
    "shared": (
        ["algorithm.name=ppo", "critic.trunk=shared"],
        ["critic/vf_loss", "critic/grad_norm"],
    ),
    "turn_ppo": (["algorithm.name=turn_ppo", "agent.memory=turn"], ["critic/vf_loss"]),
    "bi_level": (["algorithm.name=ppo", "algorithm.advantage=bi_level_gae"], ["critic/vf_loss"]),
    "prime": (
        ["algorithm.name=prime", "process_reward.learning_rate=1e-3"],
        ["process_reward/loss", "process_reward/accuracy"],
    ),
    "remax": (["algorithm.name=remax"], ["rollout/baseline_reward"]),
    "decoupled": (["algorithm.name=decoupled_ppo"], ["rollout/logprob_gap_max"]),
    "corrected": (
        ["algorithm.old_logprobs=recomputed", "algorithm.importance=sequence_mis"],
        ["actor/ess", "actor/rollout_is_mean"],
    ),
    "reward_kl": (
        [
            "algorithm.name=reinforce_pp",
            "algorithm.kl_coef=0.1",
            "algorithm.kl_in=reward",
            "algorithm.kl=k1",
        ],
        ["actor/reward_kl", "critic/rewards/mean"],
    ),
    "otb": (["algorithm.advantage=otb"], []),
    "tree": (["algorithm.advantage=tree_returns", "algorithm.gamma=0.9"], []),
    "gdpo": (
        ["algorithm.advantage=gdpo"],
        ["reward_parts/environment/mean", "reward_parts/format/mean"],
    ),
}
IN_CI = ("turn_ppo", "remax", "gdpo", "corrected", "prime", "reward_kl")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*IN_CI, *soak(*(name for name in CASES if name not in IN_CI))])
def test_an_algorithm_trains_through_the_whole_loop(name, tmp_path, small_config, quiet_view):
    overrides, expected = CASES[name]
    folder = tmp_path / "run"
    train(small_config(folder, *SHORT, *overrides), view=quiet_view())
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "actor/grad_norm" in row]
    assert rows, "at least one step had something to learn from"
    assert all(key in rows[-1] for key in expected), sorted(rows[-1])
    assert all(abs(row["actor/ppo_kl_first"]) < 1e-4 for row in rows), "the first ratio is 1"


@pytest.mark.slow
def test_value_pretraining_comes_first(tmp_path, small_config, quiet_view):
    folder = tmp_path / "run"
    train(
        small_config(folder, *SHORT, "algorithm.name=ppo", "critic.pretrain_steps=1"),
        view=quiet_view(),
    )
    first, second = [
        row for row in read_metrics(folder / "metrics.jsonl") if "critic/vf_loss" in row
    ]
    assert "actor/grad_norm" not in first
    assert "actor/grad_norm" in second


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=ppo", "critic.pretrain_steps=1", "critic.learning_rate=1e-3"],
        *soak(
            ["algorithm.name=prime", "process_reward.learning_rate=1e-3"],
            ["algorithm.name=ppo", "critic.trunk=shared"],
            [
                "algorithm.name=remax",
                "algorithm.kl_coef=0.1",
                "algorithm.kl_in=reward",
                "algorithm.kl_target=0.01",
            ],
        ),
    ],
)
def test_a_run_with_more_models_resumes_bit_for_bit(
    overrides, tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    overrides = [*SHORT, "trainer.steps=3", "checkpoint.every=1", *overrides]
    train(small_config(tmp_path / "whole", *overrides), view=quiet_view())
    with pytest.raises(KeyboardInterrupt):
        train(small_config(tmp_path / "torn", *overrides), view=quiet_view(step=1))
    train(small_config(tmp_path / "torn", *overrides), resume=True, view=quiet_view())
    assert_same(outcome_of(tmp_path / "torn"), outcome_of(tmp_path / "whole"))


def reward_model(folder, config, num_labels: int = 1) -> None:
    """A token classifier with random weights and the vocabulary that the run's tiny policy will
    have."""

    async def tokenizer():
        async with open_components(config, store_url=f"sqlite:///{folder}.sqlite") as parts:
            return parts.tokenizer

    words = run_coroutine(tokenizer())
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForTokenClassification(
        LlamaConfig(vocab_size=len(words), num_labels=num_labels, **shape)
    ).save_pretrained(folder)
    words.save_pretrained(folder)


@pytest.mark.slow
def test_a_reward_model_takes_part(tmp_path, small_config, quiet_view):
    folder = tmp_path / "run"
    judge = tmp_path / "judge"
    reward_model(judge, small_config(tmp_path / "x", *SHORT))
    train(
        small_config(folder, *SHORT, f"reward_model.name={judge}", "algorithm.name=reinforce_pp"),
        view=quiet_view(),
    )
    assert any("reward_model/mean" in row for row in read_metrics(folder / "metrics.jsonl"))


@pytest.mark.slow
def test_reward_models_that_do_not_fit_are_refused(tmp_path, small_config, quiet_view):
    two = tmp_path / "two"
    other = tmp_path / "other"
    reward_model(two, small_config(tmp_path / "x", *SHORT), num_labels=2)

    with pytest.raises(ModelError, match="2 outputs per token"):
        train(small_config(tmp_path / "a", *SHORT, f"reward_model.name={two}"), view=quiet_view())

    lake = small_config(tmp_path / "y", *SHORT).model_dump(mode="json")
    coins = build_config(
        lake | {"environment": {"type": "coins"}, "agent": {"format": "plain", "max_turns": 1}}
    )
    reward_model(other, coins)

    with pytest.raises(ModelError, match="another vocabulary"):
        train(small_config(tmp_path / "b", *SHORT, f"reward_model.name={other}"), view=quiet_view())

    with pytest.raises(Exception, match="nowhere"):
        train(
            small_config(tmp_path / "c", *SHORT, "reward_model.name=./nowhere"),
            view=LiveView("x", stream=io.StringIO(), plain=True),
        )

    assert not (tmp_path / "c").exists(), "nothing was created"
