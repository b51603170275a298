"""reasoning-gym's procedural datasets as one-turn environments: the question is the observation,
and the action is the whole answer.

The episode's seed is the dataset's seed, and its question is the dataset's first item. The reward
is the dataset's own score of the answer (0..1), and success is a score of 1. Answers are free text,
so a random player's success is unknown. The optimal player gives the reference answer.
"""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any, ClassVar, Literal

import pydantic

from agentevo.environments.environment import EnvironmentConfig, environments
from agentevo.environments.episode import INVALID, ActionResult, EpisodicEnvironment
from agentevo.errors import ConfigError
from agentevo.runtime.extras import load_extra
from agentevo.runtime.registry import nearest
from agentevo.types import Baselines

FULL_SCORE = 1.0 - 1e-9


class ReasoningGymConfig(EnvironmentConfig):
    """A dataset with its own options."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    max_actions: int = pydantic.Field(default=1, ge=1)
    """The number of actions after which an unfinished episode is truncated. With more than 1, a
    player can try again after an empty answer."""
    dataset: str = pydantic.Field(min_length=1)
    """Name of the dataset, such as `chain_sum`."""
    options: dict[str, pydantic.JsonValue] = pydantic.Field(default_factory=dict)
    """Options of the dataset, such as `{min_terms: 2, max_terms: 3}`. The adapter sets `seed` and
    `size`."""
    instructions: str = "Answer the question. Your action is the answer alone."
    """The text for the player before the question."""


def _package(module: str) -> ModuleType:
    return load_extra(module, "reasoning-gym", "environment.type=reasoning_gym")


@environments.register("reasoning_gym")
class ReasoningGymEnvironment(EpisodicEnvironment):
    """One question per episode."""

    Config: ClassVar[type[EnvironmentConfig]] = ReasoningGymConfig
    config: ReasoningGymConfig

    def __init__(self, config: ReasoningGymConfig) -> None:
        super().__init__(config)
        self._package = _package("reasoning_gym")

        datasets = sorted(_package("reasoning_gym.factory").DATASETS)
        if config.dataset not in datasets:
            guess = nearest(config.dataset, datasets)
            hint = f"did you mean {guess!r}? " if guess else ""
            raise ConfigError(
                f"reasoning_gym: no dataset is called {config.dataset!r}: {hint}known: "
                f"{', '.join(datasets)}"
            )

        self._dataset(0)

    def _dataset(self, seed: int) -> Any:
        taken = {"seed", "size"} & set(self.config.options)
        if taken:
            raise ConfigError(
                f"reasoning_gym: options must not set {' or '.join(sorted(taken))}: they come "
                "from the episode's seed"
            )

        try:
            return self._package.create_dataset(
                self.config.dataset, seed=seed, size=1, **self.config.options
            )
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"reasoning_gym: dataset {self.config.dataset!r} refuses options "
                f"{self.config.options}: {error}"
            ) from error

    @property
    def instructions(self) -> str:
        return self.config.instructions

    def start(self, seed: int) -> None:
        self._questions = self._dataset(seed)
        self._entry: dict[str, Any] = self._questions[0]

    def observe(self) -> str:
        return str(self._entry["question"])

    def _score(self, answer: str) -> float:
        return float(self._questions.score_answer(answer=answer, entry=self._entry))

    def act(self, action: str) -> ActionResult:
        if not action:
            return INVALID
        score = self._score(action)
        return ActionResult(reward=score, terminated=True, success=score >= FULL_SCORE)

    def random_action(self, rng: random.Random) -> str:
        """The reference answer to another question of the same kind: the right form with random
        content."""
        answer = self._dataset(rng.randrange(2**31))[0]["answer"]
        return "" if answer is None else str(answer)

    def optimal_action(self) -> str | None:
        answer = self._entry["answer"]
        return (
            str(answer) if answer is not None and self._score(str(answer)) >= FULL_SCORE else None
        )

    def baselines(self, max_actions: int | None = None) -> Baselines:
        return Baselines(random=None, optimal=None if self.optimal_action() is None else 1.0)
