"""Held-out tasks stay out of training, of every stage: what is asked in them is compared, as text.

    held out    the pipeline's held-out tasks, and those that each stage evaluates itself on
    trained on  tasks of stages, questions in their conversations, prompts of their pairs

An environment's tasks need no comparison: seeds of training, evaluation and demonstrations are
never the same (rollout/tasks.py), whatever run.seed is. Not compared: what an environment shows
under two seeds, and the conversations of `command` stages' own making with those of environments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentevo.config import RunConfig
from agentevo.data import RowReport
from agentevo.data.conversation import read_conversations
from agentevo.data.rows import read_rows
from agentevo.errors import ConfigError, shown
from agentevo.pipeline.kinds import TrainsOn
from agentevo.rollout.task_source import TaskSource
from agentevo.types import QUERY_MESSAGES, Task


@dataclass
class Asked:
    """Digest of what is asked -> an example of the text, and where it is from."""

    of: dict[bytes, tuple[str, str]] = field(default_factory=dict)

    def add(self, text: str, where: str) -> None:
        plain = " ".join(text.split()).casefold()
        if plain:
            key = hashlib.blake2b(plain.encode("utf-8", "replace"), digest_size=16).digest()
            self.of.setdefault(key, (text, where))


@dataclass
class Leaks:
    """What has been seen of the stages of one pipeline."""

    held_out: Asked = field(default_factory=Asked)
    trained: Asked = field(default_factory=Asked)

    def see(self, config: RunConfig, where: str, trains_on: TrainsOn = "") -> None:
        """Takes up a stage's tasks and data, as far as its files are there. Raises ConfigError
        where a held-out task is trained on, here or in a stage that was seen before."""
        held_out, trained = Asked(), Asked()
        if config.tasks.given and _are_there(config.tasks.train):
            source = TaskSource(config, None)
            tasks = source.held_out()
            for task in tasks:
                held_out.add(_question(task), where)
            if trains_on == "tasks":
                names = {task.id for task in tasks}
                for task in source.given():
                    if task.id not in names:
                        trained.add(_question(task), where)
        for text in _data_of(config, trains_on):
            trained.add(text, where)
        self.held_out.of = {**held_out.of, **self.held_out.of}
        self.trained.of = {**trained.of, **self.trained.of}
        _refuse(held_out.of, self.trained.of)
        _refuse(self.held_out.of, trained.of)


def _refuse(
    held_out: Mapping[bytes, tuple[str, str]], trained: Mapping[bytes, tuple[str, str]]
) -> None:
    both = [key for key in held_out if key in trained]
    if both:
        text, of = held_out[both[0]]
        by = trained[both[0]][1]
        number = len(both)
        raise ConfigError(
            f"{by}: trains on {number} task{'s' * (number != 1)} that {of} holds out, such as "
            f"{shown(text[:80])}: give held-out tasks of their own (tasks.eval), the same in every "
            "stage, and leave them out of what is trained on"
        )


def _question(task: Task) -> str:
    if task.query is not None:
        return task.query
    return _last_question(task.metadata.get(QUERY_MESSAGES) or ())


def _data_of(config: RunConfig, trains_on: TrainsOn) -> Iterator[str]:
    """Questions in the conversations or pairs that a stage trains on."""
    if trains_on == "conversations":
        for source in config.data.train:
            if _are_there([source]):
                for row in read_conversations(source, config.data.format, RowReport("data.train")):
                    yield from _questions(row.messages)
    given = {"pairs": config.rm.pairs, "tasks": config.data.pairs}
    pairs = given.get(trains_on)
    if pairs is not None and _are_there([str(pairs)]):
        for line in read_rows(str(pairs)):
            prompt = line.value.get("prompt") if isinstance(line.value, dict) else None
            if isinstance(prompt, str):
                yield prompt
            elif isinstance(prompt, list):
                yield from _questions(prompt)


def _questions(messages: Iterable[object]) -> Iterator[str]:
    for message in messages:
        if isinstance(message, Mapping) and message.get("role") == "user":
            yield str(message.get("content") or "")


def _last_question(messages: Iterable[object]) -> str:
    asked = list(_questions(messages))
    return asked[-1] if asked else ""


def _are_there(sources: Iterable[str]) -> bool:
    """Whether these can be read now: a file that a stage will make can't yet, and a dataset of the
    hub is not fetched for this."""
    return all(Path(source).exists() for source in sources)
