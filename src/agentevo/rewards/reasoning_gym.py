"""The reward `reasoning_gym`: the score that the task's dataset of reasoning-gym gives."""

from __future__ import annotations

from agentevo.rewards.reward import reward
from agentevo.runtime.extras import load_extra
from agentevo.types import Task

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
