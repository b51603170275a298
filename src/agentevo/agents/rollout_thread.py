"""Runs an agent function that is not async on its own thread, so that a function that hangs fails
only its attempt.

The thread (daemon_threads.py) has the context of the attempt. When the attempt ends, the thread is
abandoned, and its policy no longer answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from agentevo.agents.policy import AttemptSession, Policy, Prompt, RemoteHandle, Reply
from agentevo.errors import EngineError

T = TypeVar("T")

_PLAIN = ("agents", "name", "turns", "text", "examples", "call")
"""What a Policy answers at once, on any thread."""


class BlockingPolicy:
    """The policy for a function that is not async. `generate` returns the answer directly.
    Coroutines of an event loop that the function runs await `generate` as usual."""

    def __init__(self, policy: Policy, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Must be created on the sampler's event loop, unless `loop` is that loop. Any thread may
        use the object."""
        self._policy = policy
        self._loop = loop or asyncio.get_running_loop()

    def __getitem__(self, name: str) -> BlockingPolicy | BlockingModel:
        agent = self._policy[name]
        if isinstance(agent, Policy):
            return BlockingPolicy(agent, self._loop)
        return BlockingModel(self, agent)

    def __getattr__(self, name: str) -> Any:
        if name not in _PLAIN:
            raise AttributeError(f"a function that is not async has no policy.{name}")
        return getattr(self._policy, name)

    @property
    def session(self) -> AttemptSession:
        """See Policy.session. Opens the session on the sampler's loop."""
        if _running_loop() is self._loop:
            return self._policy.session

        async def open_session() -> AttemptSession:
            return self._policy.session

        return self._on_loop(open_session()).result()

    @property
    def base_url(self) -> str:
        return self.session.base_url

    @property
    def api_key(self) -> str:
        return self.session.key

    def generate(self, prompt: Prompt, **options: Any) -> Reply | list[Reply] | Any:
        return self._answer(self._policy.generate(prompt, **options))

    def ask(self, question: Callable[[Policy], Coroutine[Any, Any, T]]) -> T | Any:
        """Runs a coroutine of the policy on the sampler's loop, and returns its result. Within a
        coroutine, returns an awaitable."""
        return self._answer(question(self._policy))

    def model(self, name: str, agent: str = "") -> BlockingModel:
        return BlockingModel(self, self._policy.model(name, agent))

    def _answer(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        running_loop = _running_loop()
        if running_loop is self._loop:
            return coroutine
        answer = self._on_loop(coroutine)
        return answer.result() if running_loop is None else asyncio.wrap_future(answer)

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise EngineError(f"the run of the attempt {self.name} is over") from None


class BlockingModel:
    """A remote model for a function that is not async."""

    def __init__(self, policy: BlockingPolicy, model: RemoteHandle) -> None:
        self._policy = policy
        self._model = model

    def generate(self, prompt: Sequence[Any], **options: Any) -> Reply | list[Reply] | Any:
        return self._policy._answer(self._model.generate(prompt, **options))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
