"""A key of another system is answered with ours, by the pairs on docs/coming_from.md."""

import re
from pathlib import Path

import pytest

from agentevo.config import build_config, config_keys
from agentevo.config.peer_keys import PEER_KEYS
from agentevo.errors import ConfigError, UnknownNameError

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
THEIRS = re.compile(r"`([a-z_][a-z_0-9]*(?:\.[a-z_0-9]+)*)(?:=[^`]*)?`")
OURS = re.compile(
    r"`((?!agentevo\.|policy\.|\w+\.jsonl|\w+\.html)[a-z_]+(?:\.[a-z_0-9]+)+(?:=[^`]*)?)`"
)


def pairs_on_the_page():
    """System -> its key -> ours. A row with as many keys of theirs as of ours pairs them in order;
    in another row each of theirs stands for all of ours."""
    pairs = {}
    for section in re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        system, *lines = section.splitlines()
        for left, right in (line.strip("| ").split(" | ") for line in lines if line[:2] == "| "):
            theirs = THEIRS.findall(left)
            ours = OURS.findall(right)
            if len(theirs) != len(ours):
                ours = [", ".join(ours)] * len(theirs)
            for key, stands_for in zip(theirs, ours, strict=True):
                if stands_for not in ("", key):
                    pairs.setdefault(system, {}).setdefault(key, stands_for)

    return pairs


def test_the_page_and_the_refusals_have_the_same_pairs():
    assert pairs_on_the_page() == PEER_KEYS


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("trainer.num_generations=4", "TRL's num_generations is trainer.group_size here"),
        (
            "per_device_train_batch_size=1",
            "TRL's per_device_train_batch_size is trainer.micro_batch_tokens here",
        ),
        (
            "actor_rollout_ref.rollout.n=4",
            "verl's actor_rollout_ref.rollout.n is trainer.group_size here",
        ),
        ("rollout.n=4", "verl's actor_rollout_ref.rollout.n is trainer.group_size here"),
        (
            "actor_rollout_ref.actor={ppo_epochs: 2, optim: {lr: 1e-6}}",
            "verl's actor.ppo_epochs is trainer.epochs here; "
            "verl's actor.optim.lr is trainer.learning_rate here",
        ),
        (
            "rollout.trace.backend=mlflow",
            "verl's rollout.trace.backend is tracing.backend=mlflow here",
        ),
        (
            "actor_rollout_ref.rollout.trace={token2text: true}",
            "verl's rollout.trace.token2text is tracing.token2text here",
        ),
        ("data.train_batch_size=8", "verl's data.train_batch_size is trainer.groups_per_step here"),
        ("critic.optim.lr=1e-6", "verl's critic.optim.lr is critic.learning_rate here"),
        (
            "es_manager.train.env_groups=8",
            "RAGEN's es_manager.train.env_groups is trainer.groups_per_step here",
        ),
        ("trainer.temperature=1", "did you mean sampling.temperature?"),
        ("trainer.group_sizes=4", "did you mean trainer.group_size?"),
    ],
)
def test_a_key_of_another_system_is_answered_with_ours(override, hint):
    with pytest.raises(ConfigError) as refusal:
        build_config({"environment": {"type": "test_doors"}}, [override])
    assert str(refusal.value).endswith(f"unknown key; {hint}")


def test_explain_answers_likewise():
    with pytest.raises(UnknownNameError, match=r"TRL's num_generations is trainer.group_size here"):
        config_keys().explain("num_generations")
