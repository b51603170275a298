"""The trainers of a policy by name. Every process that trains it creates its own.

policy        by advantages: attempts and their rewards
preferences   by comparing answers
sft           by likelihood, on conversations
cold_start    by likelihood, on the answers of the environment's solver, before the first step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo.config import RunConfig, SFTSection
from agentevo.models.grammar import Grammars
from agentevo.orchestration.components import load_token_reward_model
from agentevo.seeds import derive_seed
from agentevo.training.pairs import Demonstrations
from agentevo.training.preference import PreferenceTrainer
from agentevo.training.supervised import SupervisedTrainer
from agentevo.training.token_numbers import TokenNumbers
from agentevo.training.trainer import Trainer

Shared = Callable[[PreTrainedModel], PreTrainedModel]
"""A model that is loaded whole -> this process's part of it."""


def policy_trainer(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    share: Shared = lambda model: model,
) -> Trainer:
    """The trainer of a policy that learns by advantages, as the recipe says. `share` is for the
    additional models that do not begin as copies of the policy."""
    trainer = Trainer(
        model,
        config.trainer,
        config.algorithm,
        critic=config.critic,
        process_reward=config.process_reward,
        reward_model=load_token_reward_model(config, model, tokenizer, share),
        memory=config.memory,
        grammars=Grammars.of(model, tokenizer),
    )
    trainer.numbers = TokenNumbers() if config.tracking.token_numbers else None
    return trainer


def preference_trainer(
    config: RunConfig, model: PreTrainedModel, demonstrations: Demonstrations | None = None
) -> PreferenceTrainer:
    """The trainer of a policy that learns by comparing answers. `demonstrations` is needed to make
    pairs of attempts."""
    return PreferenceTrainer(
        model,
        config.trainer,
        config.algorithm,
        temperature=config.sampling.temperature,
        demonstrations=demonstrations,
        memory=config.memory,
    )


def supervised_trainer(
    config: RunConfig, model: PreTrainedModel, total_steps: int
) -> SupervisedTrainer:
    """The trainer of `agentevo sft`."""
    return SupervisedTrainer(
        model,
        config.sft,
        total_steps,
        memory=config.memory,
        dropout_seed=config.run.seed,
    )


def cold_start_trainer(
    config: RunConfig, model: PreTrainedModel, settings: SFTSection, total_steps: int
) -> SupervisedTrainer:
    """The trainer of a cold start, which seeds dropout itself."""
    return SupervisedTrainer(
        model,
        settings,
        total_steps,
        key="cold_start",
        memory=config.memory,
        dropout_seed=derive_seed(config.run.seed, "cold-start"),
    )


def make_learner(
    config: RunConfig,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    share: Shared,
    *arguments: Any,
) -> Any:
    """The trainer with that name; see the module. `arguments`: values that the recipe does not
    determine."""
    match name:
        case "policy":
            return policy_trainer(config, model, tokenizer, share)
        case "preferences":
            return preference_trainer(config, model, *arguments)
        case "sft":
            return supervised_trainer(config, model, *arguments)
        case "cold_start":
            return cold_start_trainer(config, model, *arguments)

    raise ValueError(f"no trainer is called {name!r}")
