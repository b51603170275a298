"""The trainers of a policy by kind. Every process that trains it creates its own.

PolicyTraining       by advantages: attempts and their rewards
PreferenceTraining   by comparing answers
SupervisedTraining   by likelihood, on conversations
ColdStartTraining    by likelihood, on the answers of the environment's solver, before the first
                     step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo.config import RunConfig, SFTSection
from agentevo.models.grammar import Grammars
from agentevo.runs.orchestration.components import load_token_reward_model
from agentevo.runtime.seeds import derive_seed
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.checkpoint_parts import Contribution
from agentevo.training.learner import Learner, RolloutTrainer
from agentevo.training.pairs import Demonstrations
from agentevo.training.preference import PreferenceTrainer
from agentevo.training.supervised import SupervisedTrainer
from agentevo.training.token_numbers import TokenNumbers
from agentevo.training.trainer import Trainer
from agentevo.types import Sample

Shared = Callable[[PreTrainedModel], PreTrainedModel]
"""A model that is loaded whole -> this process's part of it."""
AnyTrainer: TypeAlias = Trainer | PreferenceTrainer | SupervisedTrainer


@dataclass(frozen=True)
class PolicyTraining:
    """See the module."""

    name: ClassVar[str] = "policy"


@dataclass(frozen=True)
class PreferenceTraining:
    """See the module."""

    name: ClassVar[str] = "preferences"


@dataclass(frozen=True)
class SupervisedTraining:
    """See the module."""

    name: ClassVar[str] = "sft"
    total_steps: int


@dataclass(frozen=True)
class ColdStartTraining:
    """See the module."""

    name: ClassVar[str] = "cold_start"
    settings: SFTSection
    total_steps: int


TrainerKind: TypeAlias = (
    PolicyTraining | PreferenceTraining | SupervisedTraining | ColdStartTraining
)


class ConversationTrainer(Learner, Protocol):
    """A trainer that learns from conversations, and measures held-out ones."""

    def held_out(
        self, samples: Sequence[Sample], *, stop: Callable[[], bool] = ...
    ) -> dict[str, float] | None:
        """See SupervisedTrainer.held_out."""


class PolicyTrainers(Protocol):
    """Makes the trainers of a run's policy, in this process or in several that train together
    (rank_trainers.py), and moves their states between them and checkpoints."""

    reads_parts: bool
    """Whether this process takes only a part of a trainer's saved state."""

    def policy(self) -> RolloutTrainer: ...

    def preferences(self, demonstrations: Demonstrations | None) -> RolloutTrainer:
        """`demonstrations` is needed to make pairs of attempts."""

    def conversations(self, total_steps: int) -> ConversationTrainer: ...

    def cold_start(self, settings: SFTSection, total_steps: int) -> Learner: ...

    def state_of(
        self, trainer: Learner, *, copied: bool
    ) -> tuple[dict[str, Any], Contribution | None]:
        """The trainer's state for a checkpoint, and what all processes add to it, if there are
        several. `copied`: the latter is of the state as it is now, whenever it is written."""

    def take_optimizer(self, trainer: Learner, checkpoint: Path) -> None:
        """The trainer continues with the optimizer's state of another run's checkpoint."""


class LocalTrainers:
    """PolicyTrainers of this process alone."""

    reads_parts = False

    def __init__(
        self, config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer

    def policy(self) -> Trainer:
        return policy_trainer(self._config, self._model, self._tokenizer)

    def preferences(self, demonstrations: Demonstrations | None) -> PreferenceTrainer:
        return preference_trainer(self._config, self._model, demonstrations)

    def conversations(self, total_steps: int) -> SupervisedTrainer:
        return supervised_trainer(self._config, self._model, total_steps)

    def cold_start(self, settings: SFTSection, total_steps: int) -> SupervisedTrainer:
        """The caller seeds dropout."""
        memory = self._config.memory
        return SupervisedTrainer(self._model, settings, total_steps, "cold_start", memory=memory)

    def state_of(self, trainer: Learner, *, copied: bool) -> tuple[dict[str, Any], None]:
        return trainer.state_dict(), None

    def take_optimizer(self, trainer: Learner, checkpoint: Path) -> None:
        trainer.optimization.carry_on(saved_state(self._config, checkpoint)["optimization"])


def saved_state(config: RunConfig, checkpoint: Path, *, in_parts: bool = False) -> dict[str, Any]:
    """The trainer's state in a checkpoint. `in_parts`: this process reads only what it needs."""
    folder = Checkpoints(checkpoint.parent, config.checkpoint.keep_last, is_only_caller=True)
    return folder.load(checkpoint, mapped=in_parts)[0]


def make_learner(
    config: RunConfig,
    kind: TrainerKind,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    share: Shared,
) -> AnyTrainer:
    """The trainer of that kind in one of several processes. `share` is for the additional models
    that do not begin as copies of the policy."""
    match kind:
        case PolicyTraining():
            return policy_trainer(config, model, tokenizer, share)
        case PreferenceTraining():
            return preference_trainer(config, model)
        case SupervisedTraining():
            return supervised_trainer(config, model, kind.total_steps)
        case ColdStartTraining():
            return SupervisedTrainer(
                model,
                kind.settings,
                kind.total_steps,
                "cold_start",
                memory=config.memory,
                dropout_seed=derive_seed(config.run.seed, "cold-start"),
            )


def policy_trainer(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    share: Shared = lambda model: model,
) -> Trainer:
    """The trainer of a policy that learns by advantages, as the recipe says."""
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
    """The trainer of a policy that learns by comparing answers."""
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
