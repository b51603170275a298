"""Environments with `load_environment`: SingleTurnEnv, MultiTurnEnv, ToolEnv and every other
`verifiers.Environment` (verifiers 0.1.14 to 0.3).

An attempt is the environment's `run_rollout`, with a client of the gateway: it asks, calls its
tools and is scored by its rubric, whose weighted sum is the reward; the score of each function is a
metric. verifiers counts a function that raises as 0 and continues; here its attempt fails.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from itertools import islice
from typing import Any

from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient

from agentevo.agents import Policy
from agentevo.errors import ConfigError, EnvironmentFailure
from agentevo.rewards.returned_values import plain_number
from agentevo.runtime.loop_thread import DedicatedLoop
from agentevo.types import Outcome, Task

NOTHING_SAID = "EmptyModelResponseError"
"""The verifiers error for an empty reply of the policy, which the rubric scores."""
TOO_LONG = "context_length_exceeded"

_raised: ContextVar[list[Exception]] = ContextVar("raised")
"""The errors of the rubric's functions in an attempt."""


class ClassicWorld:
    """See the module, and loading.World."""

    def __init__(self, environment: Any, name: str, max_tasks: int) -> None:
        """Raises ConfigError for an environment whose rubric compares attempts of a group."""
        if environment.requires_group_rollouts:
            raise ConfigError(
                f"verifiers: the rubric of {name!r} scores a whole group at once, but AgentEvo "
                "scores each attempt alone: give it functions of one attempt"
            )

        self.name = name
        self._environment = environment
        self._max_tasks = max_tasks
        self._rows: dict[str, Any] = {}
        self._tasks: tuple[list[Task], list[Task]] | None = None
        self._loop = DedicatedLoop(f"verifiers {name}")
        self._clients: dict[asyncio.AbstractEventLoop, AsyncOpenAI] = {}

        for rubric in _rubrics(environment):
            rubric.funcs = [_watch(function) for function in rubric.funcs]

    def tasks(self) -> tuple[list[Task], list[Task]]:
        """See VerifiersWorld.tasks. The held-out ones are those of its eval_dataset."""
        if self._tasks is None:
            train, held_out = (
                self._read(split, dataset)
                for split, dataset in (
                    ("train", self._environment.build_dataset()),
                    ("eval", self._environment.build_eval_dataset()),
                )
            )
            if not train:
                raise ConfigError(
                    f"verifiers: {self.name!r} has no `dataset`, only an `eval_dataset`: there is "
                    "nothing to train on"
                )

            self._tasks = train, held_out

        return self._tasks

    def _read(self, split: str, dataset: Any) -> list[Task]:
        tasks = []
        for row in islice(() if dataset is None else dataset, self._max_tasks):
            task = _task(f"{split}-{row['example_id']}", row)
            if task.id in self._rows:
                raise ConfigError(f"verifiers: {self.name!r} has two rows {task.id!r}")
            self._rows[task.id] = row
            tasks.append(task)

        return tasks

    async def play(self, task: Task, policy: Policy) -> Outcome:
        row = copy.deepcopy(self._rows[task.id])
        base_url = policy.base_url
        api_key = policy.api_key
        raised: list[Exception] = []

        async def attempt() -> Any:
            _raised.set(raised)
            client = self._client().with_options(base_url=base_url, api_key=api_key)
            asks = OpenAIChatCompletionsClient(client)
            return await self._environment.run_rollout(row, asks, "policy", {})

        return self._outcome(await self._loop.run(attempt), raised)

    def _client(self) -> AsyncOpenAI:
        """One for each loop, since creating one takes longer than a turn."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none")
        return self._clients[loop]

    def _outcome(self, played: Mapping[str, Any], raised: list[Exception]) -> Outcome:
        error = _words(played.get("error"))
        too_long = TOO_LONG in error
        if not error.startswith(NOTHING_SAID) and not too_long:
            if error:
                raise EnvironmentFailure(f"the environment {self.name} failed: {error}")
            if raised:
                raise raised[0]

        reward = plain_number(played["reward"], f"the reward of {self.name}'s rubric")
        return Outcome(
            reward=reward,
            success=reward >= getattr(self._environment, "pass_threshold", 1.0),
            truncated=bool(played.get("is_truncated")) or too_long,
            metrics=dict(played.get("metrics") or {}),
        )


def _task(name: str, row: Mapping[str, Any]) -> Task:
    """The row in the store's form: the question, the answer, and a digest of the rest."""
    plain = json.dumps(row, sort_keys=True, default=str)
    return Task(
        id=name,
        query=_last_text(row.get("prompt")),
        answer=row.get("answer"),
        metadata={"row": hashlib.sha256(plain.encode()).hexdigest()[:16]},
    )


def _last_text(prompt: Any) -> str:
    """The last user message."""
    if isinstance(prompt, str):
        return prompt
    user_texts = [m.get("content") for m in prompt or [] if m.get("role") == "user"]
    return user_texts[-1] if user_texts and isinstance(user_texts[-1], str) else ""


def _words(error: Any) -> str:
    """An error of a rollout in the words of verifiers; empty where there is none."""
    if not error:
        return ""
    if isinstance(error, Mapping):
        error = error.get("error_chain_repr") or error.get("message") or error.get("error")
    return str(error)


def _rubrics(environment: Any) -> Iterator[Any]:
    """Every rubric of an environment, of groups of rubrics and of groups of environments."""
    waiting = [environment.rubric]
    while waiting:
        rubric = waiting.pop()
        yield rubric
        waiting.extend(getattr(rubric, "rubrics", ()))
    for sub_environment in getattr(environment, "envs", ()):
        yield from _rubrics(sub_environment)


def _watch(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose exceptions are remembered for the attempt."""
    if getattr(function, "is_watched", False):
        return function

    async def await_result(result: Any) -> Any:
        try:
            return await result
        except Exception as error:
            _raised.get([]).append(error)
            raise

    @functools.wraps(function)
    def watch_call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            _raised.get([]).append(error)
            raise
        return await_result(result) if inspect.isawaitable(result) else result

    watch_call.is_watched = True  # type: ignore[attr-defined]
    return watch_call
