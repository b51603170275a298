"""Texts of megabytes: refused by their length before anything is encoded, and what may fit is
encoded beside the event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from agentevo.agents import Policy
from agentevo.errors import BadRequestError, RequestTooLongError
from agentevo.inference.conversations.conversation import MAX_COMPLETIONS, Conversation
from agentevo.models.chat import chat_format as chat_module
from agentevo.types import Message, SamplingParams, ToolCall

USER = Message("user", "Go on.")


@pytest.fixture
def policy(loaded, chat, scripted_engine):
    def make(context_length: int = 256) -> Policy:
        engine = scripted_engine(loaded.tokenizer, chat.end_of_turn_id, ["left"] * 3)
        return Policy(
            Conversation(
                engine,
                chat,
                SamplingParams(max_new_tokens=2),
                name="a",
                seed=1,
                context_length=context_length,
                timeout_s=300.0,
            )
        )

    return make


def test_the_longest_token_bounds_what_can_fit(loaded, chat):
    assert chat.longest_token == max(map(len, loaded.tokenizer.get_vocab()))


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([Message("user", "Go on. " * 10**6)], {}),
        ([USER, Message("assistant", "", reasoning="Go on. " * 10**6), USER], {}),
        ([USER, Message("assistant", "", (ToolCall("f", "a" * 10**7),)), USER], {}),
        ([USER], {"tools": [{"function": {"name": "f", "description": "a" * 10**7}}]}),
        ([1] * 10**6, {}),
    ],
)
def test_what_can_not_fit_is_refused_before_it_is_encoded(
    policy, chat, monkeypatch, prompt, options
):
    def encode(text: str) -> list[int]:
        raise AssertionError("it is encoded")

    monkeypatch.setattr(chat, "_encode", encode)
    with pytest.raises(RequestTooLongError, match="context is 256: shorten"):
        asyncio.run(policy().generate(prompt, **options))


def test_a_continuation_that_can_not_fit_is_refused(policy):
    async def talk() -> None:
        one = policy()
        reply = await one.generate([USER])
        with pytest.raises(RequestTooLongError, match="characters added"):
            await one.generate([USER, reply.message, Message("user", "Go on. " * 10**6)])
        await one.generate([USER, reply.message, USER])

    asyncio.run(talk())


def test_long_texts_are_encoded_beside_the_loop_and_not_remembered(policy, chat, monkeypatch):
    """Everything else goes on, and limits are heeded."""
    monkeypatch.setattr(chat_module, "LONG_TEXT", 100)
    inner = chat._compute_first_prompt
    threads = []
    ticks = []
    over = threading.Event()

    def slow(*arguments):
        threads.append(threading.current_thread())
        before = len(ticks)
        ends = time.monotonic() + 300
        while len(ticks) < before + 10 and time.monotonic() < ends and not over.is_set():
            time.sleep(0.01)

        return inner(*arguments)

    monkeypatch.setattr(chat, "_compute_first_prompt", slow)

    async def tick() -> None:
        while True:
            ticks.append(1)
            await asyncio.sleep(0.01)

    async def talk() -> None:
        ticking = asyncio.create_task(tick())
        long = [Message("user", "Go on. " * 30)]
        await policy(4096).generate(long)
        second = asyncio.create_task(policy(4096).generate(long))
        while len(threads) < 2:
            await asyncio.sleep(0.01)

        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        over.set()
        ticking.cancel()

    asyncio.run(talk())
    assert len(threads) == 2 and threading.main_thread() not in threads
    assert len(ticks) > 10


def test_copies_of_turns_are_given_out(policy):
    async def talk() -> None:
        one = policy()
        await one.generate([USER])
        for turn in one.turns:
            turn.completion_ids.append(1)
            turn.logprobs[0] = 7.0
            turn.messages.clear()

        (turn,) = one.turns
        assert len(turn.completion_ids) == len(turn.logprobs) and turn.messages
        assert turn.logprobs[0] != 7.0

    asyncio.run(talk())


@pytest.mark.parametrize(
    "options",
    [
        {"n": MAX_COMPLETIONS + 1},
        {"sampling": {"temperature": 1e-300}},
        {"sampling": {"seed": 2**80}},
        {"sampling": {"top_k": 2**70}},
        {"stop": ["a"] * 1000},
        {"stop": "a" * 10**6},
    ],
)
def test_what_would_break_an_engine_is_the_agents_own_mistake(policy, options):
    one = policy()
    with pytest.raises(BadRequestError):
        asyncio.run(one.generate([USER], **options))
    assert one.conversation.broken is None
