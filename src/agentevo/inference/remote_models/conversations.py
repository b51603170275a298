"""One attempt's conversations with remote models. They are recorded next to its turns, and never
trained on.

If the messages of a call begin with a recorded conversation of the same model, tools and agent, the
call continues from the conversation's last answer, in whatever form the client sends it back
(equivalence.py). The recorded turn then has only the new messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from agentevo.data.message_images import ImageCollector
from agentevo.errors import BadRequestError
from agentevo.inference.conversations.equivalence import key_of, places_of
from agentevo.inference.remote_models.wire import Listen, RemoteReply
from agentevo.models.chat.answer_form import AnswerForm
from agentevo.models.tool_calls import ContentDelta, ReasoningDelta
from agentevo.runtime.event_loop import gather_all
from agentevo.runtime.seeds import derive_seed
from agentevo.store.call_log import AttemptCalls, RunningCall
from agentevo.store.trace_context import TracedMessage
from agentevo.types import Message, RemoteTurn, SamplingOverrides
from agentevo.types.images import ImageFile

POLICY = "policy"
"""The agent name of the turns if a remote model plays the policy."""
MAX_COMPLETIONS = 128
"""The most answers of one call."""


class RemoteAnswerer(Protocol):
    """A remote model, or a replacement for it."""

    @property
    def sees_images(self) -> bool:
        """Whether it takes images."""
        ...

    @property
    def within_s(self) -> float:
        """The longest duration of a call, in seconds."""
        ...

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: str,
        form: AnswerForm | None,
        sampling: SamplingOverrides | None,
        role: str,
        attempt: str,
        listen: Listen | None,
        images: Mapping[str, ImageFile],
    ) -> RemoteReply:
        """See RemoteModel.generate."""
        ...


class RemoteConversations:
    """See the module. `seed` is the attempt's seed. Every call gets its own seed, derived from the
    attempt's seed and the call's number."""

    def __init__(
        self,
        models: Mapping[str, RemoteAnswerer],
        *,
        name: str,
        seed: int,
        calls: AttemptCalls | None = None,
        images: ImageCollector | None = None,
    ) -> None:
        """`images`: those of the attempt, which its messages name."""
        self.models = models
        self.images = ImageCollector() if images is None else images
        self.turns: list[RemoteTurn] = []
        self._name = name
        self._seed = seed
        self._calls = calls or AttemptCalls(None, name)
        self._num_calls = 0
        self._ends: dict[Hashable, int] = {}
        """The history up to the end of a turn -> the index of the turn, and of the newest one if
        there are several."""
        self._lost: set[int] = set()

    async def complete(
        self,
        model: str,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        form: AnswerForm | None = None,
        overrides: SamplingOverrides | None = None,
        n: int = 1,
        agent: str = "",
        listen: Callable[[int, ContentDelta | ReasoningDelta], None] | None = None,
    ) -> list[RemoteTurn]:
        """Requests `n` answers of a remote model to a whole history, and records them as turns with
        one parent. `agent` is the calling agent, if an attempt has several. `listen` receives each
        answer as it arrives, with its number, in the form of RemoteModel.generate. Raises the
        errors of that method, and UnknownNameError."""
        if not 1 <= n <= MAX_COMPLETIONS:
            raise BadRequestError(f"n is {n}: ask for 1 to {MAX_COMPLETIONS} completions")

        remote = self.models[model]
        number = self._num_calls
        self._num_calls += 1
        seeds = [derive_seed(self._seed, "remote", number, index) for index in range(n)]

        if overrides is not None and overrides.penalties is not None:
            raise BadRequestError(
                f"{model} is a remote model, which gets no penalties: leave them out"
            )

        if overrides is not None and overrides.seed is not None:
            first_seed = overrides.seed
            seeds = [
                derive_seed(first_seed, "completion", index) if index else first_seed
                for index in range(n)
            ]

        with self._calls.call("remote", model) as call:
            replies = await gather_all(
                [
                    remote.generate(
                        messages,
                        tools=tools,
                        tool_choice=tool_choice,
                        form=form,
                        sampling=_with_seed(overrides, seed),
                        role=agent or "agent",
                        attempt=self._name,
                        listen=None if listen is None else partial(listen, index),
                        images=self.images.files,
                    )
                    for index, seed in enumerate(seeds)
                ]
            )
            call.note(
                turn=len(self.turns),
                completions=n,
                prompt_tokens=sum(r.usage.prompt_tokens for r in replies if r.usage),
                completion_tokens=sum(r.usage.completion_tokens for r in replies if r.usage),
                cost=sum(reply.cost for reply in replies),
            )
            schemas = json.dumps(list(tools), ensure_ascii=False) if tools else ""
            _trace_messages(call, messages, schemas, replies)
            parent, num_known = self._find_extended(model, agent, schemas, messages)
            return [
                self._record(model, agent, schemas, messages, parent, num_known, reply, seed)
                for reply, seed in zip(replies, seeds, strict=True)
            ]

    def within_s(self, model: str) -> float:
        """The longest duration of a call of the model, in seconds."""
        return self.models[model].within_s

    def sees_images(self, model: str) -> bool:
        """Whether the model gets images."""
        return self.models[model].sees_images

    def discard(self, turn: int) -> None:
        """Marks the answer of turn `turn` as not received by any client."""
        self._lost.add(turn)

    def received_turns(self) -> set[int]:
        """The indices of all turns that a client received or that another turn continues."""
        parents = {turn.parent for turn in self.turns}
        return {t.index for t in self.turns if t.index not in self._lost or t.index in parents}

    def turns_to_record(self) -> list[RemoteTurn]:
        """The turns for the trajectory: those of `received_turns`, renumbered if some are left
        out."""
        received = self.received_turns()
        recorded = [turn for turn in self.turns if turn.index in received]
        numbers: dict[int | None, int] = {turn.index: n for n, turn in enumerate(recorded)}
        return [
            msgspec.structs.replace(
                turn, index=numbers[turn.index], parent=numbers.get(turn.parent)
            )
            for turn in recorded
        ]

    def metrics(self) -> dict[str, float]:
        """Metrics for the trajectory. Empty if no remote model was called."""
        if not self.turns:
            return {}
        return {
            "num_remote_turns": float(len(self.turns)),
            "remote_tokens": float(
                sum(turn.prompt_tokens + turn.completion_tokens for turn in self.turns)
            ),
            "remote_cost": sum(turn.cost for turn in self.turns),
        }

    def _find_extended(
        self, model: str, agent: str, tools: str, messages: Sequence[Message]
    ) -> tuple[int | None, int]:
        """The recorded turn that a history continues, and how many of its messages that turn
        covers."""
        keys = _keys(messages)
        for num_known in range(len(messages) - 1, 0, -1):
            if messages[num_known - 1].role == "assistant":
                turn = self._ends.get((model, agent, tools, keys[:num_known]))
                if turn is not None:
                    return turn, num_known
        return None, 0

    def _record(
        self,
        model: str,
        agent: str,
        tools: str,
        messages: Sequence[Message],
        parent: int | None,
        num_known: int,
        reply: RemoteReply,
        seed: int,
    ) -> RemoteTurn:
        usage = reply.usage
        turn = RemoteTurn(
            index=len(self.turns),
            parent=parent,
            model=model,
            agent=agent,
            messages=[*messages[num_known:], reply.message],
            tools=tools if parent is None else "",
            finish_reason=reply.finish_reason,
            seed=seed,
            prompt_tokens=0 if usage is None else usage.prompt_tokens,
            cached_tokens=0 if usage is None else usage.cached_tokens,
            completion_tokens=0 if usage is None else usage.completion_tokens,
            cost=reply.cost,
        )
        self.turns.append(turn)
        self._ends[model, agent, tools, _keys([*messages, reply.message])] = turn.index

        return turn


def _trace_messages(
    call: RunningCall, messages: Sequence[Message], tools: str, replies: Sequence[RemoteReply]
) -> None:
    """Adds the messages to the call's span, if there is one."""
    if (tracing := call.tracing) is not None:
        call.traced_message = TracedMessage(
            messages=tuple(messages) if tracing.contents else (),
            answers=[reply.message for reply in replies] if tracing.contents else (),
            tools=tools if tracing.contents else "",
            finish_reasons=[reply.finish_reason for reply in replies],
        )


def _keys(messages: Sequence[Message]) -> tuple[Hashable, ...]:
    return tuple(
        key_of(message, place) for message, place in zip(messages, places_of(messages), strict=True)
    )


def _with_seed(overrides: SamplingOverrides | None, seed: int) -> SamplingOverrides:
    return msgspec.structs.replace(overrides or SamplingOverrides(), seed=seed)
