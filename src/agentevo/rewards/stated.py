"""What the rewards that compare answers have in common: the answer that a reply states, and those
that are right."""

from __future__ import annotations

from typing import Any

from agentevo.event_loop import in_thread
from agentevo.rewards.answers import Place, find_answer, place_of, references
from agentevo.rewards.reward import RewardConfig, completion_of
from agentevo.types import Task, Trajectory


class AnswerConfig(RewardConfig):
    """A reward that compares the stated answer with the task's."""

    place: Place = "auto"
    """Where a reply states its answer: `boxed`, `hashes`, `number`, `whole`, `json:KEY`,
    `regex:PATTERN`, or the name of an XML tag such as `answer`; `auto` takes the first of <answer>,
    \\\\boxed{...} and #### that the reply has, else all of it. A task's own `answer_schema`
    decides before this."""


async def stated_answer(trajectory: Trajectory, task: Task, place: str) -> str | None:
    """The answer that the last reply states, where the task or else `place` says. None: it is not
    there. Raises TimeoutError for a regular expression that does not end."""
    where = place_of(task, place)
    reply = completion_of(trajectory)
    if where.startswith("regex:"):
        return await in_thread(find_answer, reply, where)
    return find_answer(reply, where)


def right_answers(task: Task) -> list[Any]:
    """Raises ValueError for a task without any."""
    if task.answer is None or task.answer == []:
        raise ValueError(
            f"the task {task.id!r} has no answer to compare with: give its row one "
            f"(tasks.fields); its query begins {(task.query or '')[:60]!r}"
        )
    return references(task.answer)
