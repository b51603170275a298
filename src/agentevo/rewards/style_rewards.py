"""Rewards for the manner of an attempt, independent of its answer: its length, its repetitions, its
language, and its tool calls.

None of them decides whether a task is solved, so list them together with a reward that does.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from agentevo.rewards.reward import RewardConfig, Score, completion_of, reward, text_of
from agentevo.rewards.texts import SCRIPTS, repeated_share, share_of_language, words_of
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.parsing import ParseError, parse_json
from agentevo.types import Message, Task, Trajectory, Turn


class LengthConfig(RewardConfig):
    """A penalty for attempts that are too long or too short."""

    max_length: int = Field(ge=1)
    """The largest length without a penalty."""
    min_length: int = Field(default=0, ge=0)
    """The smallest length without a penalty."""
    margin: int = Field(default=0, ge=0)
    """The distance beyond a limit over which the penalty grows linearly from 0 to -1. With 0, the
    full penalty applies at once."""
    unit: Literal["tokens", "words", "characters"] = "tokens"
    """The unit of the length: the tokens that the policy sampled in the whole attempt, or the words
    or characters of its last reply."""

    @model_validator(mode="after")
    def _check_range(self) -> LengthConfig:
        if self.min_length > self.max_length:
            raise ValueError(
                f"min_length={self.min_length} is above max_length={self.max_length}: swap them"
            )
        return self


class RepetitionConfig(RewardConfig):
    """A penalty for repetitions in an attempt."""

    ngram: int = Field(default=3, ge=1, le=100)
    """The number of words of an n-gram."""


class LanguageConfig(RewardConfig):
    """A reward for one language."""

    language: str
    """The language that the reply should be in: en, zh, ja, ko, ru, el, ar, he, hi or th. The
    language is detected by its script, so `en` accepts any language in Latin letters."""

    @field_validator("language")
    @classmethod
    def _check_language(cls, value: str) -> str:
        if value not in SCRIPTS:
            raise ValueError(f"{value!r} is not known: give one of {', '.join(SCRIPTS)}")
        return value


@reward("length")
class Length:
    """0 within min_length and max_length. Beyond a limit, the reward falls evenly to -1 over
    `margin`."""

    Config = LengthConfig

    def __init__(self, config: LengthConfig) -> None:
        self.config = config

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """DAPO's soft penalty for overlong replies (https://arxiv.org/abs/2503.14476, equation 13)
        with L_max = max_length + margin and L_cache = margin, and its mirror image for short
        replies."""
        config = self.config
        reply = completion_of(trajectory)
        counts = {
            "tokens": lambda: _num_tokens(trajectory),
            "words": lambda: len(words_of(reply)),
            "characters": lambda: len(reply),
        }
        length = counts[config.unit]()
        beyond = max(length - config.max_length, config.min_length - length, 0)
        return Score(-min(1.0, beyond / (config.margin or 1)), success=beyond == 0)


@reward("repetition")
class Repetition:
    """Minus the share of n-grams in the policy's replies that repeat earlier n-grams: 0 to -1."""

    Config = RepetitionConfig

    def __init__(self, config: RepetitionConfig) -> None:
        self.config = config

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """See Scorer.score. The formula is that of Yeo et al. (https://arxiv.org/abs/2502.03373),
        without its factor, which is `weight`."""
        replies = [reply for turn in trajectory.turns if (reply := _reply(turn)) is not None]
        text = "\n".join(text_of(message.content) for message in replies)
        share = await in_thread(repeated_share, text, self.config.ngram)
        return Score(-share, success=share == 0)


@reward("language")
class Language:
    """The share of the last reply's words that are in the target language, from 0 to 1."""

    Config = LanguageConfig

    def __init__(self, config: LanguageConfig) -> None:
        self.config = config

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """See Scorer.score. DeepSeek-R1's language consistency (https://arxiv.org/abs/2501.12948,
        section 2.3.2)."""
        reply = completion_of(trajectory)
        return Score(await in_thread(share_of_language, reply, self.config.language))


@reward("tool_use")
class ToolUse:
    """The share of the policy's tool calls that were well formed and returned no error. 0 without a
    call."""

    def __init__(self, config: RewardConfig) -> None:
        pass

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """See Scorer.score. A call that can't be parsed counts as failed, and so does a call whose
        result begins with `Error`. A call at the end of the attempt has no result, so only its form
        counts."""
        good: list[bool] = []
        under_way: dict[str, int] = {}  # calls of the last reply: id -> index in `good`
        for turn in trajectory.turns:
            for message in turn.messages:
                place = (
                    under_way.get(message.tool_call_id or "") if message.role == "tool" else None
                )
                if place is not None and _is_error(text_of(message.content)):
                    good[place] = False

            calls = () if (reply := _reply(turn)) is None else reply.tool_calls
            under_way = {call.id: len(good) + n for n, call in enumerate(calls) if call.id}
            good += [bool(call.name) and _is_object(call.arguments) for call in calls]

        number = len(good) + trajectory.metrics.get("num_malformed_calls", 0.0)
        return Score(sum(good) / number if number else 0.0)


def _num_tokens(trajectory: Trajectory) -> int:
    """The number of sampled tokens. If a remote model replaces the policy, the count of its
    server."""
    return trajectory.num_completion_tokens() or int(trajectory.metrics.get("policy_tokens", 0))


def _reply(turn: Turn) -> Message | None:
    """The policy's message of a turn. None if it was not recorded as a message."""
    return next((m for m in reversed(turn.messages) if m.role == "assistant"), None)


def _is_error(result: str) -> bool:
    return result.lstrip()[:5].lower() == "error"


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(parse_json(arguments), dict)
    except ParseError:
        return False
