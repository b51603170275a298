"""Keeps held-out tasks out of the training of every stage, by comparing the text of their
questions.

    held out    the pipeline's held-out tasks, and those that each stage evaluates itself on
    trained on  tasks of stages, questions in their conversations, prompts of their pairs

An environment's tasks need no comparison: the seeds of training, evaluation and demonstrations are
never the same (rollout/tasks.py), for any run.seed. Not compared: the observations of an
environment under two seeds, and the conversations of `command` stages with those of environments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agentevo.config import RunConfig
from agentevo.data import RowReport
from agentevo.data.conversation import read_conversations
from agentevo.data.question_overlap import question_key, question_of, questions_in
from agentevo.data.rows import read_rows
from agentevo.errors import ConfigError, shown
from agentevo.rollout.task_source import TaskSource
from agentevo_evolve.pipeline.kinds import TrainsOn


@dataclass
class TaskQuestion:
    """Maps the digest of a question to an example of the text and its source."""

    of: dict[bytes, tuple[str, str]] = field(default_factory=dict)

    def add(self, text: str, where: str) -> None:
        key = question_key(text)
        if key is not None:
            self.of.setdefault(key, (text, where))


class LeakError(ConfigError):
    """`texts`: digests of the held-out questions that are trained on."""

    def __init__(self, message: str, texts: frozenset[bytes]) -> None:
        super().__init__(message)
        self.texts = texts


@dataclass
class Leaks:
    """The tasks and questions of a pipeline's stages so far."""

    held_out: TaskQuestion = field(default_factory=TaskQuestion)
    trained: TaskQuestion = field(default_factory=TaskQuestion)

    def add_stage(self, config: RunConfig, where: str, trains_on: TrainsOn = "") -> None:
        """Registers a stage's tasks and data, if their files exist. Raises LeakError if the stage
        trains on a task that it or an earlier stage holds out, or holds out a task that was trained
        on."""
        held_out = TaskQuestion()
        trained = TaskQuestion()
        if config.tasks.given and _exist(config.tasks.train):
            source = TaskSource(config, None)
            tasks = source.held_out()
            for task in tasks:
                held_out.add(question_of(task), where)

            if trains_on == "tasks":
                names = {task.id for task in tasks}
                for task in source.given():
                    if task.id not in names:
                        trained.add(question_of(task), where)

        for text in _data_of(config, trains_on):
            trained.add(text, where)

        self.held_out.of = {**held_out.of, **self.held_out.of}
        self.trained.of = {**trained.of, **self.trained.of}
        self._refuse([*held_out.of, *trained.of])

    def _refuse(self, keys: Iterable[bytes]) -> None:
        """Raises LeakError if a key is both held out and trained on. Its message has a line for
        each pair of stages: the first that holds the task out, and the first that trains on it."""
        both: dict[tuple[str, str], list[bytes]] = {}
        for key in dict.fromkeys(keys):
            if key in self.held_out.of and key in self.trained.of:
                pair = self.trained.of[key][1], self.held_out.of[key][1]
                both.setdefault(pair, []).append(key)

        if both:
            raise LeakError(
                "\n".join(
                    f"{by}: trains on {len(leaked)} task{'s' * (len(leaked) != 1)} that {of} "
                    f"holds out, such as {shown(self.held_out.of[leaked[0]][0][:80])}: set "
                    "separate held-out tasks (tasks.eval), the same in every stage, and remove "
                    "them from the training data"
                    for (by, of), leaked in both.items()
                ),
                frozenset(key for leaked in both.values() for key in leaked),
            )


def _data_of(config: RunConfig, trains_on: TrainsOn) -> Iterator[str]:
    """The questions in the conversations or pairs that a stage trains on."""
    if trains_on == "conversations":
        for source in config.data.train:
            if _exist([source]):
                for row in read_conversations(source, config.data.format, RowReport("data.train")):
                    yield from questions_in(row.messages)

    files_by_kind = {"pairs": config.rm.pairs, "tasks": config.data.pairs}
    pairs = files_by_kind.get(trains_on)
    if pairs is not None and _exist([str(pairs)]):
        for line in read_rows(str(pairs)):
            prompt = line.value.get("prompt") if isinstance(line.value, dict) else None
            if isinstance(prompt, str):
                yield prompt
            elif isinstance(prompt, list):
                yield from questions_in(prompt)


def _exist(sources: Iterable[str]) -> bool:
    """Whether the sources can be read now. A file that a later stage makes does not exist yet, and
    a dataset of the hub is not downloaded for this check."""
    return all(Path(source).exists() for source in sources)
