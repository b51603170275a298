"""A conversation that is listened to: every completion of a call by its number."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chat_templates import HERMES, tokenizer_with

from agentevo.errors import EngineUnavailableError, ListenerError, StreamDivergedError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.types import Completion, Message, SamplingParams

CHAT = ChatFormat(tokenizer_with(HERMES))
ASKED = [Message("user", "left?")]


class Saying:
    """Completes each request with the next of `completions`; tells what `tells` makes of it."""

    version = 3

    def __init__(self, *completions: list[int], tells: Any = lambda ids: ids) -> None:
        self.completions = list(completions)
        self.tells = tells

    async def generate(
        self, prompt: list[int], sampling: SamplingParams, *, listen: Any = None, **_: Any
    ) -> Completion:
        ids = self.completions.pop(0)
        for token in self.tells(ids) if listen is not None else []:
            listen([token], [-token / 4])
            await asyncio.sleep(0)

        return Completion(
            ids=ids,
            logprobs=[-token / 4 for token in ids],
            versions=[3] * len(ids),
            finish_reason="length",
        )

    async def release(self, session: str) -> None: ...


def conversation_on(engine: Any, chat: ChatFormat = CHAT) -> Conversation:
    sampling = SamplingParams(max_new_tokens=9)
    return Conversation(
        engine, chat, sampling, name="a", seed=5, context_length=4096, timeout_s=300.0
    )


class Told:
    """What a conversation's listener is told, by the number of the completion."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.order: list[int] = []

    def __call__(self, number: int, ids: Any, logprobs: Any) -> None:
        self.tokens.setdefault(number, []).extend(ids)
        self.logprobs.setdefault(number, []).extend(logprobs)
        self.order.append(number)


@pytest.mark.parametrize(
    "tells", [lambda ids: ids, lambda ids: ids[:1], lambda ids: []], ids=["all", "some", "none"]
)
def test_every_completion_of_a_call_is_told_whole_by_its_number(tells) -> None:
    """What the engine has not told comes at the end."""
    told = Told()
    conversation = conversation_on(Saying([9, 8, 7], [6], [5, 4], tells=tells))
    turns = asyncio.run(conversation.complete(ASKED, n=3, listen=told))
    assert [told.tokens[number] for number in range(3)] == [
        list(turn.completion_ids) for turn in turns
    ]
    assert [told.logprobs[number] for number in range(3)] == [list(turn.logprobs) for turn in turns]


def test_completions_that_are_drawn_side_by_side_are_told_side_by_side(tiny_policy) -> None:
    loaded = tiny_policy()
    told = Told()
    engine = TorchEngine(loaded.model, loaded.tokenizer)
    conversation = conversation_on(engine, ChatFormat(loaded.tokenizer))
    turns = asyncio.run(conversation.complete([Message("user", "a")], n=2, listen=told))

    assert told.order[:4] == [0, 1, 0, 1]
    assert [told.tokens[n] for n in range(2)] == [list(turn.completion_ids) for turn in turns]

    (alone,) = asyncio.run(conversation.complete([Message("user", "a")], listen=told))
    assert told.tokens[0][len(turns[0].completion_ids) :] == list(alone.completion_ids)


def test_a_listener_that_raises_fails_the_call_and_not_the_engine() -> None:
    def listen(number: int, ids: Any, logprobs: Any) -> None:
        raise ValueError("the client has gone")

    conversation = conversation_on(Saying([9, 8], [7], tells=lambda ids: []))
    with pytest.raises(ListenerError, match="ValueError: the client has gone"):
        asyncio.run(conversation.complete(ASKED, listen=listen))
    assert conversation.broken is None and conversation.turns == []
    (turn,) = asyncio.run(conversation.complete(ASKED))
    assert list(turn.completion_ids) == [7]


def test_an_engine_that_tells_other_tokens_than_it_answers_has_failed() -> None:
    conversation = conversation_on(Saying([9, 8, 7], tells=lambda ids: [9, 1]))
    with pytest.raises(StreamDivergedError, match="token 1 was streamed as 1"):
        asyncio.run(conversation.complete(ASKED, listen=Told()))
    assert isinstance(conversation.broken, EngineUnavailableError)
    assert conversation.turns == []
