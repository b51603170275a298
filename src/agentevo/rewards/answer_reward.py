"""The common part of the rewards that compare answers: the stated answer and the right answers."""

from __future__ import annotations

from typing import Any

from agentevo.rewards.answer_texts import Place, find_answer, place_of, references
from agentevo.rewards.reward import RewardConfig, completion_of
from agentevo.runtime.event_loop import in_thread
from agentevo.types import Task, Trajectory


class AnswerConfig(RewardConfig):
    """A reward that compares the stated answer with the task's."""

    place: Place = "auto"
    """Where a reply states its answer: `boxed`, `hashes`, `number`, `whole`, `json:KEY`,
    `regex:PATTERN`, or the name of an XML tag such as `answer`. `auto` is the first of <answer>,
    \\\\boxed{...} and #### that the reply has, else the whole reply. A task's own `answer_schema`
    overrides it."""


async def stated_answer(trajectory: Trajectory, task: Task, place: str) -> str | None:
    """The stated answer of the last reply, at the task's place or else at `place`. None if there is
    no answer. Raises TimeoutError for a regular expression that does not end."""
    where = place_of(task, place)
    reply = completion_of(trajectory)
    if where.startswith("regex:"):
        return await in_thread(find_answer, reply, where)
    return find_answer(reply, where)


def right_answers(task: Task) -> list[Any]:
    """The task's right answers. Raises ValueError for a task without an answer."""
    if task.answer is None or task.answer == []:
        raise ValueError(
            f"the task {task.id!r} has no answer to compare with: give its row one "
            f"(tasks.fields); its query begins {(task.query or '')[:60]!r}"
        )
    return references(task.answer)
