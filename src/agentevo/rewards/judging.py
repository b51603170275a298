"""What all judges have in common: models that are asked in order until one gives a usable answer,
and one chance for each to mend what can't be used."""

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
from agentevo.rewards.verdicts import UnusableError, final_words

T = TypeVar("T")
ROLE = "judge"
"""What a price log calls the calls of judges."""
MAX_ECHO = 20_000
"""Characters of an unusable answer that a judge is shown again."""


BARS = {
    "min_rank_correlation": ("its rank correlation with the truth", True),
    "max_position_bias": ("its position bias", False),
    "max_injected": ("the share of injections that raise a score", False),
}
"""Names of the keys -> what was measured, and whether it is to be at least that."""


class JudgeOptions(RewardConfig):
    """A reward that remote models give."""

    models: tuple[str, ...] = Field(default=("judge",), min_length=1)
    """Names in `remote_models`, asked in this order until one gives a usable answer. One with `api:
    engine` is computed on this machine."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Longest time for one score, in seconds, all models together; then the attempt is recorded as
    failed."""

    calibration: str | None = None
    """The file that `agentevo judge calibrate` has written of this judge. Training is refused where
    it is of another judge, or below a bar."""
    min_rank_correlation: float = Field(default=0.5, ge=-1, le=1)
    """Least rank correlation (Spearman's) with the truth."""
    max_position_bias: float = Field(default=0.25, ge=0, le=1)
    """Most that a score may change from the first place to the last."""
    max_injected: float = Field(default=0.1, ge=0, le=1)
    """Largest share of injections that may raise the score of a bad attempt."""
    uncalibrated: bool = False
    """Train by this judge though nothing says how far it agrees with the truth."""

    @property
    def needs_calibration(self) -> bool:
        """Whether training by it is refused where it was not measured."""
        return not self.uncalibrated

    @field_validator("models", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class NoScoreError(AgentEvoError):
    """No judge gave a usable answer."""


@dataclass(frozen=True, slots=True)
class JudgeAnswer(Generic[T]):
    """A usable answer."""

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
    """The first usable answer. Each model has its share of what is left until the monotonic time
    `until`. `schema` is that of the answer, to which servers hold it that can. `read` is given what
    a model said behind its thought, and raises UnusableError; then the model is asked once more,
    with the `correction` of what is wrong. Raises NoScoreError with what each model said or did."""
    chosen: dict[str, Any] = {"seed": seed, "schema": schema}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    problems = []
    for index, name in enumerate(names):
        if name not in models:
            problems.append(f"{name}: there is no remote model of that name")
            continue

        num_left = len(names) - index
        share_s = max(0.0, (until - time.monotonic()) / num_left)
        try:
            async with asyncio.timeout(share_s if num_left > 1 else None):
                value, text = await _ask(
                    partial(models[name].generate, role=ROLE, attempt=attempt, **chosen),
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
        f"no judge gave a score: {'; '.join(problems)}: see that it answers so, or name another "
        "one in the reward's `models`"
    )


async def all_or_first_error(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them give. One that fails ends no other, since its price is paid and its answer
    is kept; then the first failure is raised."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
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
        return read(final_words(reply)), reply.text
    except UnusableError as error:
        echo = reply.text[-MAX_ECHO:].strip() or "(nothing)"
        messages += [
            {"role": "assistant", "content": echo},
            {"role": "user", "content": correction(str(error))},
        ]

    reply = await generate(messages)
    return read(final_words(reply)), reply.text
