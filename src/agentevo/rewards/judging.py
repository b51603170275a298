"""The common part of all judges. It asks models in order until one gives a usable answer. After an
unusable answer, a model gets one chance to correct the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import Field, field_validator

from agentevo.errors import AgentEvoError
from agentevo.rewards.reward import RewardConfig, ScorerModel
from agentevo.rewards.verdicts import UnusableError, text_after_reasoning

T = TypeVar("T")
ROLE = "judge"
"""The role of judges' calls in the price log."""
MAX_ECHO = 20_000
"""The maximum number of characters of its unusable answer that a judge sees again."""


THRESHOLDS = {
    "min_rank_correlation": ("its rank correlation with the truth", True),
    "max_position_bias": ("its position bias", False),
    "max_injected": ("the share of injections that raise a score", False),
}
"""Key -> the name of the measured value, and whether the key is its lower bound (else the
upper)."""


class JudgeOptions(RewardConfig):
    """The options of a reward for which remote models are judges."""

    models: tuple[str, ...] = Field(default=("judge",), min_length=1)
    """Names in `remote_models`, tried in this order until a model gives a usable answer. A model
    with `api: engine` runs on this machine."""
    timeout_s: float = Field(default=300.0, gt=0)
    """The time limit of one score, in seconds, for all models together. Beyond it, the attempt is
    recorded as failed."""

    calibration: str | None = None
    """The file that `agentevo judge` wrote for this judge. Training is refused if the
    file belongs to another judge, or if a value misses its threshold."""
    min_rank_correlation: float = Field(default=0.5, ge=-1, le=1)
    """The lowest rank correlation (Spearman's) with the truth."""
    max_position_bias: float = Field(default=0.25, ge=0, le=1)
    """The largest change of a score between the first and the last position."""
    max_injected: float = Field(default=0.1, ge=0, le=1)
    """The largest share of injections that raise the score of a bad attempt."""
    uncalibrated: bool = False
    """Train with this judge although its agreement with the truth was not measured."""

    @property
    def needs_calibration(self) -> bool:
        """Whether training with this judge is refused if it was not calibrated."""
        return not self.uncalibrated

    @field_validator("models", mode="before")
    @classmethod
    def _to_tuple(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class NoScoreError(AgentEvoError):
    """No judge gave a usable answer."""


@dataclass(frozen=True, slots=True)
class JudgeAnswer(Generic[T]):
    """A usable answer of a judge."""

    model: str
    value: T
    text: str


async def ask_in_order(
    models: Mapping[str, ScorerModel],
    names: Sequence[str],
    question: str,
    read: Callable[[str], T],
    *,
    until: float,
    attempt: str,
    correction: Callable[[str], str],
    seed: int | None = None,
    schema: Mapping[str, Any] | None = None,
) -> JudgeAnswer[T]:
    """The first usable answer. Each model gets its share of the time until the monotonic time
    `until`. `schema` is the schema of the answer. Servers that support schemas enforce it. `read`
    receives a model's text after its reasoning, and raises UnusableError if the text can't be used.
    The model then gets one more request, with the `correction`. Raises NoScoreError with the
    problem of each model."""
    options: dict[str, Any] = {"seed": seed, "schema": schema}
    options = {name: value for name, value in options.items() if value is not None}
    problems = []
    for index, name in enumerate(names):
        if name not in models:
            problems.append(f"{name}: no remote model has that name")
            continue

        num_left = len(names) - index
        share_s = max(0.0, (until - time.monotonic()) / num_left)
        try:
            async with asyncio.timeout(share_s if num_left > 1 else None):
                value, text = await _ask(
                    partial(models[name].generate, role=ROLE, attempt=attempt, **options),
                    question,
                    read,
                    correction,
                )
                return JudgeAnswer(name, value, text)
        except TimeoutError:
            problems.append(f"{name}: no answer within its share of timeout_s, {share_s:.1f} s")
        except (AgentEvoError, UnusableError) as error:
            problems.append(f"{name}: {error}")

    raise NoScoreError(
        f"no judge gave a score: {'; '.join(problems)}: check the model's answers, or name "
        "another model in the reward's `models`"
    )


async def all_or_first_error(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all coroutines. A failure does not cancel the others, because their requests
    are paid and their answers stored. Raises the first failure after all have ended."""
    outcomes = await asyncio.gather(*coroutines, return_exceptions=True)
    values: list[T] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        values.append(outcome)
    return values


async def _ask(
    generate: Callable[..., Awaitable[Any]],
    question: str,
    read: Callable[[str], T],
    correction: Callable[[str], str],
) -> tuple[T, str]:
    messages = [{"role": "user", "content": question}]
    reply = await generate(messages)
    try:
        return read(text_after_reasoning(reply)), reply.text
    except UnusableError as error:
        echo = reply.text[-MAX_ECHO:].strip() or "(nothing)"
        messages += [
            {"role": "assistant", "content": echo},
            {"role": "user", "content": correction(str(error))},
        ]

    reply = await generate(messages)
    return read(text_after_reasoning(reply)), reply.text
