"""The simple built-in rewards. Each gives 1 for right and 0 for wrong, by a rule.

Rewards for answers in words: SQuAD's exact match and F1, and multiple choice.

The reward `reasoning_gym`: the score that the task's dataset of reasoning-gym gives.
"""

from __future__ import annotations

import math

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


@reward("exact_match")
class ExactMatch:
    """The stated answer is the task's answer, or one of several. White space, case and a final full
    stop don't count."""

    Config = TextConfig

    def __init__(self, config: TextConfig) -> None:
        self.config = config

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        right = [
            normalise_text(str(answer), self.config.ignore_case) for answer in right_answers(task)
        ]
        stated = await stated_answer(trajectory, task, self.config.place)
        return Score(
            float(stated is not None and normalise_text(stated, self.config.ignore_case) in right)
        )


@reward("contains")
class Contains:
    """The stated answer contains the task's answer, or one of several, and no other candidates. A
    number must be the last number of the reply. Words must be whole words, and not part of a list
    (containment.py)."""

    Config = TextConfig

    def __init__(self, config: TextConfig) -> None:
        self.config = config

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """See Scorer.score. Raises ValueError for a task whose answers are all empty."""
        right = [str(answer) for answer in right_answers(task)]
        answers = [answer for answer in right if normalise_text(answer, self.config.ignore_case)]
        if not answers:
            raise ValueError(
                f"the answer of the task {task.id!r} has no words to search for: {task.answer!r}"
            )

        stated = await stated_answer(trajectory, task, self.config.place) or ""
        query = task.query or ""
        return Score(
            float(
                any(
                    states_answer(stated, answer, query, ignore_case=self.config.ignore_case)
                    for answer in answers
                )
            )
        )


@reward("numeric")
class Numeric:
    """The last number of the stated answer equals that of the task's answer, in any notation
    (numerals.py): 1,234.5, 1.234,5, 1 000, $3, 3/4, 1 1/2, 5e3, 50% (which is 0.5, or 50 if the
    question is about percents), and TeX's 9{,}500, \\\\frac{3}{4}, 5 \\\\times 10^3."""

    Config = NumberConfig

    def __init__(self, config: NumberConfig) -> None:
        self.config = config

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """See Scorer.score. Raises ValueError for a task whose answer has no number."""
        right = [number for answer in right_answers(task) for number in _numbers_of(answer, task)]
        stated = readings(await stated_answer(trajectory, task, self.config.place) or "")
        return Score(
            float(
                any(self._is(stated_number, number) for stated_number in stated for number in right)
            )
        )

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
class SquadExactMatch:
    """Score 1 if the stated answer is a right answer, without regard to case, punctuation and
    English articles, else 0."""

    Config = AnswerConfig

    def __init__(self, config: AnswerConfig) -> None:
        self.config = config

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        right_texts = {squad_normalised(str(answer)) for answer in right_answers(task)}
        stated = await stated_answer(trajectory, task, self.config.place)
        return Score(float(stated is not None and squad_normalised(stated) in right_texts))


@reward("f1")
class F1:
    """The F1 of the words in the stated answer and a right answer, as SQuAD counts words. The score
    of several right answers is their highest F1."""

    Config = AnswerConfig

    def __init__(self, config: AnswerConfig) -> None:
        self.config = config

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        answers = right_answers(task)
        stated = await stated_answer(trajectory, task, self.config.place)
        return Score(0.0 if stated is None else max(f1(stated, str(answer)) for answer in answers))


@reward("multiple_choice")
class MultipleChoice:
    """Score 1 if the stated answer chooses a right option, by its letter (`B`, `(B)`, `B.`, `the
    answer is B`) or by its text, else 0."""

    Config = ChoiceConfig

    def __init__(self, config: ChoiceConfig) -> None:
        self.config = config

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """See Scorer.score. Raises ValueError for a task whose answer is not an option."""
        options = options_of(task, self.config.options_key)
        right_options = {check_right(answer, options, task.id) for answer in right_answers(task)}
        stated = await stated_answer(trajectory, task, self.config.place)
        return Score(float(stated is not None and choice_of(stated, options) in right_options))


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
