"""Questions of self-play, their families, and the agent that asks the proposer for a question.

A family is a user's class (config/self_play.py). During the attempt, the family parses a question
from the reply. The parser has its own thread, and its time counts towards the attempt's limit. The
question is stored with the proposer's trajectory as the file QUESTION. The solver's task comes from
that file, never from the reply.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import msgspec

from agentevo.agents import FunctionAgent
from agentevo.agents.policy import Policy
from agentevo.agents.single_turn import conversation_of
from agentevo.config.self_play import PROPOSES, SelfPlay, question_families
from agentevo.config.tasks import TaskFields
from agentevo.data import RowError
from agentevo.data.conversation import check_text
from agentevo.errors import ConfigError, UnknownNameError, shown, storable
from agentevo.rewards.reward import rewards
from agentevo.rollout.given_tasks import task_of
from agentevo.runtime.daemon_threads import call_in_thread, run_in_thread
from agentevo.runtime.tracebacks import describe_failure
from agentevo.types import QUERY_MESSAGES, Outcome, Task

QUESTION = "question.json"
"""The file with the parsed question, among the files of the proposer's trajectory."""
MAX_REASON_CHARS = 500
"""The maximum number of stored characters of the reason why a reply has no question."""
MAX_QUESTION_BYTES = 1 << 20
"""The maximum size of a question, in bytes."""


class Question(msgspec.Struct, frozen=True):
    """A question from a proposer's reply, parsed by its question family."""

    query: str | list[dict[str, Any]]
    """The solver's prompt: a text, or chat messages."""
    answer: Any = None
    """The correct answer, for rewards, as JSON-compatible data."""
    scorer: str | None = None
    """The name of the reward that scores this question instead of the recipe's `rewards`."""
    cluster: str | None = None
    """Questions with the same cluster count as repetitions of one question. By default, questions
    are repetitions if they differ only in white space and case."""
    difficulty: float | None = None
    """A number for the metric `selfplay/difficulty`, such as the number of steps of a solution."""
    metadata: dict[str, Any] = {}
    """Further data for the solver's agent and rewards."""


class QuestionFamily(Protocol):
    """See config/self_play.py."""

    def prompt(self, rng: random.Random) -> str | list[dict[str, Any]]: ...

    def read(self, text: str, prompt: str | list[dict[str, Any]]) -> Question: ...


def make_family(section: SelfPlay, timeout_s: float) -> QuestionFamily:
    """Raises ConfigError if the family is unknown, or can't be created with its options within
    `timeout_s`."""
    try:
        kind = question_families.get(section.family)
    except UnknownNameError as error:
        raise ConfigError(
            f"tasks.self_play.family: {error}; one of your own is a class under "
            f"`@agentevo.question_family({section.family!r})`, in a file that the recipe imports "
            "(key import)"
        ) from error

    try:
        family: QuestionFamily = call_in_thread(
            partial(kind, **section.options), "question family", timeout_s
        )
    except Exception as error:
        raise ConfigError(
            f"tasks.self_play: the family {section.family!r} can't be made with the options "
            f"{shown(section.options)}: {describe_failure(error)}"
        ) from error

    return family


class SelfPlayAgent(FunctionAgent):
    """The agent of self-play. For the solver's and the held-out tasks it is the recipe's agent, and
    for a proposer's task it sends one prompt to the policy."""

    def __init__(self, solver: FunctionAgent, family: QuestionFamily) -> None:
        self._solver = solver
        self._family = family
        self.needs_scorer = solver.needs_scorer
        self.needs_session = solver.needs_session

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """See Agent.run. An exception of the family other than ValueError fails the attempt. A
        proposal gets its reward after the solver has attempted it (self_play.py)."""
        if PROPOSES not in task.metadata:
            return await self._solver.run(task, policy)
        reply = await policy.generate(conversation_of(task, system=None, instruction=None))
        prompt = task.metadata.get(QUERY_MESSAGES) or task.query
        row = await run_in_thread(partial(self._read, reply.answer, prompt), "question family")
        policy.keep_files({QUESTION: row})
        return Outcome(reward=0.0)

    def _read(self, text: str, prompt: Any) -> bytes:
        try:
            question = self._family.read(text, prompt)
        except ValueError as error:
            reason = storable(str(error), MAX_REASON_CHARS)
            return msgspec.json.encode({"invalid": reason or "no question"})
        return encode_question(question)

    async def close(self) -> None:
        """See FunctionAgent.close."""
        await self._solver.close()


def encode_question(question: Question) -> bytes:
    """A question as it is stored. Raises TypeError if a family returns something else than a
    Question, values that JSON can't represent, or more than MAX_QUESTION_BYTES bytes. Raises
    RowError for half of a surrogate pair and for the cases of `task_of_question`, and
    UnknownNameError for an unknown scorer."""
    if not isinstance(question, Question):
        raise TypeError(
            f"the family's read returned {shown(question)}: return an agentevo.Question, or "
            f"raise ValueError if the reply has no question"
        )

    number = question.difficulty
    if number is not None and not (isinstance(number, (int, float)) and math.isfinite(number)):
        raise TypeError(f"the difficulty of a question is {shown(number)}: give a finite number")
    if not isinstance(question.cluster, str | None):
        raise TypeError(f"the cluster of a question is {shown(question.cluster)}: give a text")
    if not isinstance(question.metadata, Mapping):
        raise TypeError(f"the metadata of a question is {shown(question.metadata)}: give a mapping")

    try:
        text = json.dumps(msgspec.structs.asdict(question), allow_nan=False)
    except ValueError as error:
        raise TypeError(f"a question has a value that JSON can't represent: {error}") from error

    if len(text) > MAX_QUESTION_BYTES:
        raise TypeError(f"a question of {len(text)} bytes: the limit is {MAX_QUESTION_BYTES}")

    row = json.loads(text)
    check_text(row)
    task_of_question(row, "question")

    if question.scorer is not None:
        rewards.get(question.scorer)

    return text.encode()


def task_of_question(row: Mapping[str, Any], name: str) -> Task:
    """The solver's task from a stored question. Raises RowError if the question has no words, or if
    its metadata has a reserved key."""
    taken = sorted({"id", "query", "answer", "scorer"} & row["metadata"].keys())
    if taken:
        raise RowError("unknown_form", f"the metadata has the key {taken[0]}: rename it")
    fields = {"id": name, "query": row["query"], "answer": row["answer"], "scorer": row["scorer"]}
    return task_of({**row["metadata"], **fields}, TaskFields(), "agentevo")
