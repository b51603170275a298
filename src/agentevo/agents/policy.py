"""The policy as an agent sees it: messages in, a reply out, every token recorded as the engine
emitted it.

One `Policy` serves one attempt. `generate(messages)` takes the whole history, as a chat API does;
the handle finds the longest recorded conversation that the history begins with and encodes only
what is new, so what the model said is never encoded again. A history that was edited matches less,
and its turn starts a new branch or root (types.Turn.parent).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from agentevo.errors import EngineError, EngineUnavailableError, RequestTooLongError
from agentevo.inference.engine import Engine, SleepingEngine
from agentevo.models.chat import ChatFormat
from agentevo.seeds import derive_seed
from agentevo.types import Completion, Message, SamplingParams, Turn


@dataclass(frozen=True)
class Reply:
    """What the policy said."""

    text: str
    """Without the end-of-turn token."""
    complete: bool
    """False if the token limit cut it off."""
    turn: int
    """Index of the recorded turn."""

    @property
    def message(self) -> Message:
        return Message("assistant", self.text)


class Policy:
    """See the module. `sampling` is the base for every turn; each call gets a seed of its own,
    derived from `seed` and its number. Calls may overlap: turns are numbered in the order in which
    they end."""

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        sampling: SamplingParams,
        *,
        name: str,
        seed: int,
        context_length: int,
        timeout_s: float,
    ) -> None:
        self._engine, self._chat, self._sampling = engine, chat, sampling
        self._name, self._seed = name, seed
        self._context_length, self._timeout_s = context_length, timeout_s
        self._num_calls = 0
        self._turns: list[Turn] = []
        self._contexts: list[
            list[int]
        ] = []  # per turn: every id up to and including its completion
        self._conversations: dict[tuple[Message, ...], int] = {}
        self._pending: Counter[int] = (
            Counter()
        )  # version when it was asked for -> requests without an answer
        self._closed = False
        self.broken: BaseException | None = None
        """The engine's first failure, whatever the agent made of it. A request that is too long is
        the agent's own."""

    @property
    def name(self) -> str:
        """Id of the trajectory: another one for every attempt."""
        return self._name

    @property
    def turns(self) -> list[Turn]:
        """Recorded so far, rewards not yet filled in."""
        return list(self._turns)

    @property
    def oldest_version(self) -> int | None:
        """Of the weights behind any token so far, or behind the request that waits for the longest;
        None before the first. Of a request that was made while no engine was known nothing can be
        said."""
        versions = [min(turn.versions) for turn in self._turns if turn.versions]
        asked = (version for version, count in self._pending.items() if count and version >= 0)
        return min([*versions, *asked], default=None)

    @property
    def slept_s(self) -> float:
        """Seconds that the engine has slept so far: nobody's fault."""
        return self._engine.slept_s if isinstance(self._engine, SleepingEngine) else 0.0

    async def generate(self, messages: Sequence[Message]) -> Reply:
        """The policy's answer to a conversation that ends with someone else's message.

        Raises RequestTooLongError when the context is full, DeadlineExceededError when the engine
        is late.
        """
        parent, known = self._longest_recorded(messages)
        new = list(messages[known:])
        if parent is None:
            added = self._chat.first_prompt(new)
            prompt = added
        else:
            ended = self._turns[parent].completion_ids[-1] in self._chat.end_ids
            added = self._chat.continuation(new, ended_with_stop=ended)
            prompt = self._contexts[parent] + added
        room = self._context_length - len(prompt)
        if room < 1:
            raise RequestTooLongError(
                f"the conversation has {len(prompt)} tokens, the model's context is "
                f"{self._context_length}: allow fewer turns"
            )
        sampling = msgspec.structs.replace(
            self._sampling,
            seed=derive_seed(self._seed, "turn", self._num_calls),
            max_new_tokens=min(self._sampling.max_new_tokens, room),
        )
        self._num_calls += 1
        completion = await self._complete(prompt, sampling)
        text, index = self._chat.text(completion.ids), len(self._turns)
        self._turns.append(
            Turn(
                index=index,
                parent=parent,
                prompt_ids=added,
                completion_ids=completion.ids,
                logprobs=completion.logprobs,
                versions=completion.versions,
                finish_reason=completion.finish_reason,
                temperature=sampling.temperature,
                seed=sampling.seed,
                messages=[*new, Message("assistant", text)],
            )
        )
        self._contexts.append(prompt + completion.ids)
        self._conversations[(*messages, Message("assistant", text))] = index
        return Reply(text, completion.finish_reason == "stop", index)

    async def close(self) -> None:
        """Frees the engine's memory of this attempt, which can ask for nothing more."""
        self._closed = True
        await self._engine.release(self._name)

    async def _complete(self, prompt: list[int], sampling: SamplingParams) -> Completion:
        """The engine's answer; `broken` remembers what it fails with."""
        if self._closed:
            raise EngineError(
                f"the attempt {self._name} is over: its agent was broken off and can't ask for more"
            )
        version = self._engine.version
        self._pending[version] += 1
        try:
            return await self._engine.generate(
                prompt, sampling, session=self._name, deadline_s=self._timeout_s
            )
        except RequestTooLongError:
            raise
        except asyncio.CancelledError:
            if self._engine.version < 0:
                self.broken = self.broken or EngineUnavailableError(
                    "no engine answered until the attempt was broken off"
                )
            raise
        except Exception as error:
            self.broken = self.broken or error
            raise
        finally:
            self._pending[version] -= 1

    def _longest_recorded(self, messages: Sequence[Message]) -> tuple[int | None, int]:
        """The recorded turn whose conversation is the longest beginning of `messages`, and that
        beginning's length."""
        for size in range(len(messages) - 1, 0, -1):
            if messages[size - 1].role == "assistant":
                turn = self._conversations.get(tuple(messages[:size]))
                if turn is not None:
                    return turn, size
        return None, 0
