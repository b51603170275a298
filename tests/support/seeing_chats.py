"""Chat formats of tiny models that see, and an engine that records what it gets."""

from __future__ import annotations

from functools import cache
from typing import Any

from tiny_vision import png, tiny_vision

from agentevo.data.message_images import ImageCollector
from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.vision.processor import VisionProcessor
from agentevo.types import Completion, SamplingParams
from agentevo.types.images import ImageFile, PromptImage, image_file

SMALL, WIDE, OTHER = (
    image_file(png(width, height, seed=seed), "image/png")
    for seed, (width, height) in enumerate(((20, 12), (40, 16), (20, 12)))
)


@cache
def seeing_chat(name: str = "qwen2_vl") -> ChatFormat:
    """The chat format of the tiny model of this type."""
    parts = tiny_vision(name)
    processor = VisionProcessor(parts.tokenizer, parts.image_processor, parts.config)
    return ChatFormat(parts.tokenizer, processor=processor)


class SeeingEngine:
    """An engine that says the same text to every prompt, and records prompts and images."""

    version = 3

    def __init__(self, chat: ChatFormat, text: str = "I see.") -> None:
        self._ids = [
            *chat.tokenizer.encode(text, add_special_tokens=False), chat.end_of_turn_id
        ]  # fmt: skip
        self.prompts: list[list[int]] = []
        self.images: list[tuple[PromptImage, ...]] = []
        self.given: list[dict[str, Any]] = []

    async def generate(
        self, prompt_ids: list[int], sampling: SamplingParams, **options: Any
    ) -> Completion:
        self.prompts.append(list(prompt_ids))
        self.images.append(tuple(options.get("images", ())))
        self.given.append(options)
        size = len(self._ids)
        return Completion(
            ids=list(self._ids),
            logprobs=[-1.0] * size,
            versions=[self.version] * size,
            finish_reason="stop",
        )

    async def release(self, session: str) -> None: ...


def seeing_conversation(
    *files: ImageFile, chat: ChatFormat | None = None, context_length: int = 100_000
) -> tuple[Conversation, SeeingEngine]:
    """A conversation whose attempt has these images, and its engine."""
    chat = seeing_chat() if chat is None else chat
    engine: Any = SeeingEngine(chat)
    images = ImageCollector()
    for file in files:
        images.add(file)

    conversation = Conversation(
        engine,
        chat,
        SamplingParams(max_new_tokens=9),
        name="attempt",
        seed=5,
        context_length=context_length,
        timeout_s=60.0,
        images=images,
    )
    return conversation, engine
