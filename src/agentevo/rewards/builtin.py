"""The simple built-in rewards. Each gives 1 for right and 0 for wrong, by a rule.

Rewards for answers in words: SQuAD's exact match and F1, and multiple choice.

The reward `reasoning_gym`: the score that the task's dataset of reasoning-gym gives.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from pydantic import Field, field_validator

from agentevo.rewards.answer_texts import find_answer, normalise_text
from agentevo.rewards.containment import states_answer
from agentevo.rewards.multiple_choice import check_right, choice_of, options_of
from agentevo.rewards.numerals import readings
from agentevo.rewards.patterns import Pattern
from agentevo.rewards.reward import (
    AnswerConfig,
    RewardConfig,
    Score,
    completion_of,
    reward,
    right_answers,
    stated_answer,
)
from agentevo.rewards.texts import f1, squad_normalised
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.extras import load_extra
from agentevo.types import Task, Trajectory


class TextConfig(AnswerConfig):
    """A reward that compares texts."""

    ignore_case: bool = True
    """Ignore upper and lower case."""


class NumberConfig(AnswerConfig):
    """A reward that compares numbers."""

    tolerance: float = Field(default=1e-6, ge=0)
    """The largest difference that counts as equal, as a share of the right number (of 1 if it is
    0)."""
    absolute_tolerance: float = Field(default=0.0, ge=0)
    """The largest absolute difference that counts as equal. A number within either tolerance counts
    as equal."""


class FormatConfig(RewardConfig):
    """A reward for the form of a reply."""

    pattern: str
    """A regular expression that the whole reply must match; `.` also matches line breaks."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, value: str) -> str:
        Pattern(value)
        return value


class _AnswerReward(ABC):
    """A reward that compares the stated answer with the right ones."""

    Config: type[AnswerConfig] = AnswerConfig

    def __init__(self, config: Any) -> None:
        self.config = config

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """See Scorer.score. Raises ValueError for a task without a usable answer."""
        right = self.right(task)
        stated = await stated_answer(trajectory, task, self.config.place)
        return Score(0.0 if stated is None else float(self.compare(stated, right, task)))

    def right(self, task: Task) -> list[Any]:
        """The right answers in the form that `compare` takes. Raises ValueError."""
        return right_answers(task)

    @abstractmethod
    def compare(self, stated: str, right: list[Any], task: Task) -> float:
        """The score of the stated answer. `right`: what `right` returns."""


@reward("exact_match")
class ExactMatch(_AnswerReward):
    """The stated answer is the task's answer, or one of several. White space, case and a final full
    stop don't count."""

    Config = TextConfig

    def compare(self, stated: str, right: list[Any], task: Task) -> float:
        texts = [normalise_text(str(text), self.config.ignore_case) for text in (stated, *right)]
        return texts[0] in texts[1:]


@reward("contains")
class Contains(_AnswerReward):
    """The stated answer contains the task's answer, or one of several, and no other candidates. A
    number must be the last number of the reply. Words must be whole words, and not part of a list
    (containment.py)."""

    Config = TextConfig

    def right(self, task: Task) -> list[Any]:
        answers = [str(answer) for answer in right_answers(task)]
        answers = [answer for answer in answers if normalise_text(answer, self.config.ignore_case)]
        if not answers:
            raise ValueError(
                f"the answer of the task {task.id!r} has no words to search for: {task.answer!r}"
            )
        return answers

    def compare(self, stated: str, right: list[Any], task: Task) -> float:
        query = task.query or ""
        ignore_case = self.config.ignore_case
        return any(states_answer(stated, text, query, ignore_case=ignore_case) for text in right)


@reward("numeric")
class Numeric(_AnswerReward):
    """The last number of the stated answer equals that of the task's answer, in any notation
    (numerals.py): 1,234.5, 1.234,5, 1 000, $3, 3/4, 1 1/2, 5e3, 50% (which is 0.5, or 50 if the
    question is about percents), and TeX's 9{,}500, \\\\frac{3}{4}, 5 \\\\times 10^3."""

    Config = NumberConfig

    def right(self, task: Task) -> list[Any]:
        return [number for answer in right_answers(task) for number in _numbers_of(answer, task)]

    def compare(self, stated: str, right: list[Any], task: Task) -> float:
        return any(self._is(number, expected) for number in readings(stated) for expected in right)

    def _is(self, stated: float, right: float) -> bool:
        allowed = self.config.tolerance * (abs(right) or 1.0)
        return abs(stated - right) <= max(allowed, self.config.absolute_tolerance)


def _numbers_of(answer: object, task: Task) -> tuple[float, ...]:
    if isinstance(answer, (int, float)) and math.isfinite(answer):
        return (float(answer),)
    numbers = readings(find_answer(str(answer), "auto") or "")
    if not numbers:
        raise ValueError(f"the answer of the task {task.id!r} has no number: {answer!r}")
    return numbers


@reward("format")
class Format:
    """The whole reply matches a regular expression, its option `pattern`."""

    Config = FormatConfig

    def __init__(self, config: FormatConfig) -> None:
        self._pattern = Pattern(config.pattern)

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """See Scorer.score. The form alone is never a success: the other rewards of the list decide
        that."""
        reply = completion_of(trajectory).strip()
        return Score(float(await in_thread(self._pattern.matches_whole, reply)))


@reward("returned")
class Returned:
    """The reward that the agent returned or the environment gave, for lists that add to it."""

    def __init__(self, config: RewardConfig) -> None:
        pass

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        return Score(trajectory.reward, dict(trajectory.reward_parts), trajectory.success)


class ChoiceConfig(AnswerConfig):
    """A reward for the choice of an option."""

    options_key: str | None = None
    """The column of a row that has the options. Default: options or choices."""


@reward("em")
class SquadExactMatch(_AnswerReward):
    """Score 1 if the stated answer is a right answer, without regard to case, punctuation and
    English articles, else 0."""

    def compare(self, stated: str, right: list[Any], task: Task) -> float:
        return squad_normalised(stated) in {squad_normalised(str(answer)) for answer in right}


@reward("f1")
class F1(_AnswerReward):
    """The F1 of the words in the stated answer and a right answer, as SQuAD counts words. The score
    of several right answers is their highest F1."""

    def compare(self, stated: str, right: list[Any], task: Task) -> float:
        return max(f1(stated, str(answer)) for answer in right)


@reward("multiple_choice")
class MultipleChoice(_AnswerReward):
    """Score 1 if the stated answer chooses a right option, by its letter (`B`, `(B)`, `B.`, `the
    answer is B`) or by its text, else 0."""

    Config = ChoiceConfig

    def right(self, task: Task) -> list[Any]:
        options = options_of(task, self.config.options_key)
        return [check_right(answer, options, task.id) for answer in right_answers(task)]

    def compare(self, stated: str, right: list[Any], task: Task) -> float:
        return choice_of(stated, options_of(task, self.config.options_key)) in right


ENTRY = "entry"
"""The key in a task's metadata with the metadata of the dataset's entry, which includes
`source_dataset`."""


@reward("reasoning_gym")
def reasoning_gym(model_answer: str, task: Task) -> float:
    """The dataset's score of the stated answer, from 0 to 1, for tasks from `agentevo data
    prepare`. Raises ValueError for any other task."""
    metadata = task.metadata.get(ENTRY)
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        raise ValueError(
            f"the task {task.id!r} is not from reasoning-gym: make its tasks with `agentevo data "
            "prepare reasoning_gym/NAME FOLDER`"
        )

    package = load_extra("reasoning_gym", "reasoning-gym", "the reward reasoning_gym")
    score = package.get_score_answer_fn(metadata["source_dataset"])
    entry = {"question": task.query, "answer": task.answer, "metadata": metadata}
    return float(score(answer=model_answer, entry=entry))
