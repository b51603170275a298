"""Countdown: write an arithmetic expression that uses each given number once and equals the target.

Reward: 1 for the target, and 0.1 for an expression that uses the numbers exactly once but has
another value. Any other action is invalid and has the reward 0. The target is the value of a random
expression, so all instances are solvable.
"""

from __future__ import annotations

import random
from typing import ClassVar, Literal

import pydantic

from agentevo.environments.arithmetic import (
    evaluate,
    random_expression,
    random_expression_success,
    solve,
)
from agentevo.environments.environment import EnvironmentConfig, environments
from agentevo.environments.episode import INVALID, ActionResult, EpisodicEnvironment, stream
from agentevo.errors import EnvironmentFailure
from agentevo.types import Baselines

WRONG_VALUE_REWARD = 0.1
MAX_TRIES = 20_000
SIGN_ORDER = "+-*/"
EXACT_NUMBERS = 4
"""Up to this many numbers, the random player's rate is computed exactly. Beyond, it is estimated by
play."""
SAMPLED_EXPRESSIONS = 4000


class CountdownConfig(EnvironmentConfig):
    """The number and size of the given numbers, and the operations."""

    type: Literal["countdown"] = "countdown"
    max_actions: int = pydantic.Field(default=1, ge=1)
    """The number of actions after which an unfinished episode is truncated. With more than 1, a
    player can try again after a malformed expression."""
    num_numbers: int = pydantic.Field(default=3, ge=2, le=5)
    """The number of given numbers, all of which must be used."""
    max_number: int = pydantic.Field(default=20, ge=1)
    """The largest number. Numbers are random from 1."""
    min_target: int = 1
    """Lowest target."""
    max_target: int = 100
    """Highest target."""
    operations: str = pydantic.Field(default="+-*", pattern=r"^[-+*/]+$")
    """The allowed operations, a subset of `+-*/`."""

    @pydantic.model_validator(mode="after")
    def _check_targets(self) -> CountdownConfig:
        if self.min_target > self.max_target:
            raise ValueError(
                f"min_target={self.min_target} is above max_target={self.max_target}: swap or "
                "widen them"
            )

        if len(set(self.operations)) != len(self.operations):
            raise ValueError(f"operations={self.operations!r} repeats a sign: name each once")
        return self


@environments.register("countdown")
class CountdownEnvironment(EpisodicEnvironment):
    """A single expression, which is checked exactly."""

    Config: ClassVar[type[EnvironmentConfig]] = CountdownConfig
    config: CountdownConfig

    @property
    def instructions(self) -> str:
        signs = " ".join(sign for sign in SIGN_ORDER if sign in self.config.operations)
        return (
            "Write an arithmetic expression that equals the target. Use each number exactly "
            f"once, with {signs} and parentheses. "
            "Your action is the expression alone."
        )

    def start(self, seed: int) -> None:
        rng = stream(self.config, seed, "instance")
        config = self.config
        for _ in range(MAX_TRIES):
            self.numbers = [rng.randint(1, config.max_number) for _ in range(config.num_numbers)]
            result = evaluate(
                random_expression(self.numbers, config.operations, rng), config.operations
            )
            value = result[0] if result else None
            if (
                value is not None
                and value.denominator == 1
                and config.min_target <= value <= config.max_target
            ):
                self.target = int(value)
                self._solution: str | None = None
                return

        raise EnvironmentFailure(
            f"countdown: none of {MAX_TRIES} expressions over {config.num_numbers} numbers up to "
            f"{config.max_number} "
            f"with {config.operations} is within {config.min_target}..{config.max_target}: "
            "widen the target's range"
        )

    def observe(self) -> str:
        return f"Numbers: {', '.join(map(str, self.numbers))}. Target: {self.target}."

    def act(self, action: str) -> ActionResult:
        result = evaluate(action, self.config.operations)
        if result is None or sorted(result[1]) != sorted(self.numbers):
            return INVALID
        success = result[0] == self.target
        return ActionResult(
            reward=1.0 if success else WRONG_VALUE_REWARD, terminated=True, success=success
        )

    def random_action(self, rng: random.Random) -> str:
        return random_expression(self.numbers, self.config.operations, rng)

    def optimal_action(self) -> str | None:
        if self._solution is None:
            self._solution = solve(self.numbers, self.target, self.config.operations)
        return self._solution

    def baselines(self, max_actions: int | None = None) -> Baselines:
        numbers = self.numbers
        operations = self.config.operations
        if len(numbers) <= EXACT_NUMBERS:
            return Baselines(
                random=random_expression_success(numbers, self.target, operations), optimal=1.0
            )

        rng = random.Random(f"{numbers} {self.target}")
        results = (
            evaluate(random_expression(numbers, operations, rng), operations)
            for _ in range(SAMPLED_EXPRESSIONS)
        )
        return Baselines(
            random=sum(1 for result in results if result and result[0] == self.target)
            / SAMPLED_EXPRESSIONS,
            optimal=1.0,
        )
