"""The trainers of a policy by kind. Every process that trains it creates its own.

policy         by advantages: attempts and their rewards
preferences    by comparing answers
sft            by likelihood, on conversations
cold_start     by likelihood, on the answers of the environment's solver, before the first step
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo.config import RunConfig, SFTSection
from agentevo.models.compute.attention import prepare
from agentevo.models.files.load import load_reward_model
from agentevo.models.grammar import Grammars
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.learner import Learner
from agentevo.training.pairs import Demonstrations
from agentevo.training.preference import PreferenceTrainer
from agentevo.training.roles.token_rewards import TokenRewardModel
from agentevo.training.supervised import SupervisedTrainer
from agentevo.training.token_numbers import TokenNumbers
from agentevo.training.trainer import Trainer

Shared = Callable[[PreTrainedModel], PreTrainedModel]
"""A model that is loaded whole -> this process's part of it."""
AnyTrainer: TypeAlias = Trainer | PreferenceTrainer | SupervisedTrainer
TrainerName = Literal["policy", "preferences", "sft", "cold_start"]


class LocalTrainers:
    """Makes the trainers of a run's policy in this process."""

    reads_parts = False
    """Whether this process takes only a part of a trainer's saved state."""

    def __init__(
        self,
        config: RunConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        share: Shared = lambda model: model,
        cold_start_seed: int | None = None,
    ) -> None:
        """`share` is for the additional models that do not begin as copies of the policy.
        `cold_start_seed`: of the dropout of a cold start; None if the caller seeds it."""
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._share = share
        self._cold_start_seed = cold_start_seed

    def policy(self) -> Trainer:
        config = self._config
        trainer = Trainer(
            self._model,
            config.trainer,
            config.algorithm,
            critic=config.critic,
            process_reward=config.process_reward,
            reward_model=self._load_token_reward_model(),
            memory=config.memory,
            grammars=Grammars.of(self._model, self._tokenizer),
            distillation=config.distillation,
        )
        trainer.numbers = TokenNumbers() if config.tracking.token_numbers else None
        return trainer

    def _load_token_reward_model(self) -> TokenRewardModel | None:
        """This process's part of the model whose scores are added to the environment's rewards;
        None for a recipe without one."""
        section = self._config.reward_model
        if section.name is None:
            return None
        model = load_reward_model(section.name, self._model, self._tokenizer)
        return TokenRewardModel(self._share(prepare(model).requires_grad_(False)), section)

    def preferences(self, demonstrations: Demonstrations | None) -> PreferenceTrainer:
        """`demonstrations` is needed to make pairs of attempts."""
        return PreferenceTrainer(
            self._model,
            self._config.trainer,
            self._config.algorithm,
            temperature=self._config.sampling.temperature,
            demonstrations=demonstrations,
            memory=self._config.memory,
        )

    def conversations(self, total_steps: int) -> SupervisedTrainer:
        return SupervisedTrainer(
            self._model,
            self._config.sft,
            total_steps,
            memory=self._config.memory,
            dropout_seed=self._config.run.seed,
        )

    def cold_start(self, settings: SFTSection, total_steps: int) -> SupervisedTrainer:
        return SupervisedTrainer(
            self._model,
            settings,
            total_steps,
            "cold_start",
            memory=self._config.memory,
            dropout_seed=self._cold_start_seed,
        )

    def state_of(self, trainer: Learner, *, copied: bool) -> tuple[dict[str, Any], None]:
        """The trainer's state for a checkpoint, and what other processes add to it: nothing."""
        return trainer.state_dict(), None

    def take_optimizer(self, trainer: Learner, checkpoint: Path) -> None:
        """The trainer continues with the optimizer's state of another run's checkpoint."""
        trainer.optimization.carry_on(saved_state(self._config, checkpoint)["optimization"])


def saved_state(config: RunConfig, checkpoint: Path, *, in_parts: bool = False) -> dict[str, Any]:
    """The trainer's state in a checkpoint. `in_parts`: this process reads only what it needs."""
    folder = Checkpoints(checkpoint.parent, config.checkpoint.keep_last, is_only_caller=True)
    return folder.load(checkpoint, mapped=in_parts)[0]
