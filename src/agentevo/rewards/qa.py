"""Rewards for answers in words: SQuAD's exact match and F1, and multiple choice."""

from __future__ import annotations

from agentevo.rewards.answer_reward import AnswerConfig, right_answers, stated_answer
from agentevo.rewards.multiple_choice import check_right, choice_of, options_of
from agentevo.rewards.reward import Score, reward
from agentevo.rewards.texts import f1, squad_normalised
from agentevo.types import Task, Trajectory


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
        """See Scorer.score."""
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
        """See Scorer.score."""
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
