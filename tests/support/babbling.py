"""An engine that says anything, and conversations with it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from chat_templates import HERMES, QWEN3_THINKING, tokenizer_with

from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.tiny_tokenizer import byte_tokenizer
from agentevo.types import Completion, Message, SamplingParams, Trajectory

CHATS = {
    "tiny": ChatFormat(byte_tokenizer(512)),
    "hermes": ChatFormat(tokenizer_with(HERMES)),
    "qwen3 thinking": ChatFormat(tokenizer_with(QWEN3_THINKING)),
}
ASKED = [Message("user", text) for text in ("left?", "right?", "go on")]
SAMPLING = SamplingParams(max_new_tokens=9, temperature=0.7)


class Babbling:
    """An engine that draws random bytes, which no tokenizer would write so: what they decode to is
    mostly encoded otherwise. A request takes a while that its seed decides."""

    version = 3

    def __init__(self, chat: ChatFormat, *, pauses: bool = False) -> None:
        self.chat = chat
        self.pauses = pauses
        self.requests: list[tuple[list[int], SamplingParams]] = []
        self.failures: list[Exception | None] = []
        self.released: list[str] = []
        self.cancelled = 0

    async def generate(self, prompt: list[int], sampling: SamplingParams, **_: Any) -> Completion:
        self.requests.append((list(prompt), sampling))
        failure = self.failures.pop(0) if self.failures else None

        rng = random.Random(sampling.seed)
        try:
            for _ in range(rng.randrange(6) if self.pauses else 0):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

        if failure is not None:
            raise failure

        size = rng.randint(1, min(5, sampling.max_new_tokens))
        ids = [rng.randrange(8, 250) for _ in range(size)]
        stopped = rng.random() < 0.7
        if stopped:
            ids[-1] = self.chat.end_of_turn_id

        return Completion(
            ids=ids,
            logprobs=[-1.0] * size,
            versions=[self.version] * size,
            finish_reason="stop" if stopped else "length",
        )

    async def release(self, session: str) -> None:
        self.released.append(session)


class Saying(Babbling):
    """The same, with these answers in turns."""

    def __init__(self, chat: ChatFormat, answers: list[list[int]]) -> None:
        super().__init__(chat)
        self._answers = answers

    async def generate(self, prompt: list[int], sampling: SamplingParams, **_: Any) -> Completion:
        ids = self._answers[len(self.requests)]
        self.requests.append((list(prompt), sampling))
        is_ended = ids[-1] in self.chat.end_ids
        return Completion(
            ids=ids,
            logprobs=[-1.0] * len(ids),
            versions=[self.version] * len(ids),
            finish_reason="stop" if is_ended else "length",
        )


def conversation_on(engine: Any, **options: Any) -> Conversation:
    settings = {"name": "a", "seed": 5, "context_length": 4096, "timeout_s": 300.0} | options
    return Conversation(engine, engine.chat, SAMPLING, **settings)


def trajectory(conversation: Conversation) -> Trajectory:
    return Trajectory(id="a", task_id="t", group_id="g", turns=conversation.turns)
