"""Conversations with images: each request has the images of its whole context, at the places that
the family's processor gives them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from babbling import CHATS
from seeing_chats import OTHER, SMALL, WIDE, seeing_chat, seeing_conversation
from tiny_vision import FAMILIES, png

from agentevo.errors import BadRequestError, ImageError, ModelError, RequestTooLongError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.types import Message, TextPart, Turn, context_of
from agentevo.types.images import ImageFile, image_file

LOOK = Message("user", (TextPart("What is this?\n"), SMALL.part))
AGAIN = Message("user", (WIDE.part, TextPart("and this?")))
FILES = {file.part.sha256: file for file in (SMALL, WIDE, OTHER)}
QUICK = ("qwen2_vl", "gemma3")


def ask(conversation: Conversation, *messages: Message, **options: Any) -> Turn:
    (turn,) = asyncio.run(conversation.complete(list(messages), **options))
    return turn


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_two_turns(name: str) -> None:
    """The context of each turn is what the family's processor makes of the whole conversation, and
    the engine gets all of its images."""
    chat = seeing_chat(name)
    assert chat.processor is not None
    conversation, engine = seeing_conversation(SMALL, WIDE, chat=chat)

    first = ask(conversation, LOOK)
    history = [LOOK, first.messages[-1], AGAIN]
    second = ask(conversation, *history)

    assert second.parent == first.index and second.messages[:-1] == [AGAIN]
    for number, messages in enumerate(([LOOK], history)):
        whole = chat.processor.prompt(messages, FILES)
        assert engine.prompts[number] == whole.ids
        assert tuple(image.span for image in engine.images[number]) == whole.spans
        assert [image.file for image in engine.images[number]] == [SMALL, WIDE][: number + 1]

    fingerprint = chat.processor.fingerprint
    assert [turn.processor for turn in conversation.turns] == [fingerprint] * 2
    (span,) = second.images
    assert span.digest == WIDE.part.sha256
    start = len(context_of(conversation.turns, 1)) - len(second.prompt_ids)
    assert engine.images[1][1].span == msgspec.structs.replace(span, offset=start + span.offset)
    assert second.prompt_ids[span.offset] == chat.processor.feature_id


def test_a_turn_without_an_image_of_its_own_keeps_those_before_it() -> None:
    conversation, engine = seeing_conversation(SMALL)
    first = ask(conversation, LOOK)
    second = ask(conversation, LOOK, first.messages[-1], Message("user", "Sure?"))

    assert second.parent == 0 and second.images == () and second.processor == ""
    assert engine.images[1] == engine.images[0] and len(engine.images[0]) == 1


def test_the_same_text_with_another_image_is_another_history() -> None:
    conversation, engine = seeing_conversation(SMALL, OTHER)
    other = Message("user", (TextPart("What is this?\n"), OTHER.part))
    first = ask(conversation, LOOK)
    second = ask(conversation, other, first.messages[-1], Message("user", "Sure?"))

    assert engine.prompts[0] == engine.prompts[1][: len(engine.prompts[0])]
    assert second.parent is None
    assert [image.file for image in engine.images[1]] == [OTHER]


def test_branches_and_edited_histories() -> None:
    """Each branch has the images of its own path."""
    conversation, engine = seeing_conversation(SMALL, WIDE, OTHER)
    first = ask(conversation, LOOK)
    answer = first.messages[-1]
    for file in (WIDE, OTHER):
        ask(conversation, LOOK, answer, Message("user", (file.part,)))

    edited = [LOOK, Message("assistant", "No."), Message("user", (WIDE.part,))]
    turn = ask(conversation, *edited)

    assert [turn.parent for turn in conversation.turns] == [None, 0, 0, None]
    shown = [[image.file for image in images] for images in engine.images]
    assert shown == [[SMALL], [SMALL, WIDE], [SMALL, OTHER], [SMALL, WIDE]]
    assert len(turn.images) == 2
    for ids, images in zip(engine.prompts, engine.images, strict=True):
        for image in images:
            place = image.span.offset
            run = ids[place : place + image.span.length]
            assert set(run) == {seeing_chat().processor.feature_id}  # type: ignore[union-attr]
            assert ids[place - 1] != run[0] != ids[place + len(run)]


@pytest.mark.parametrize("name", ["qwen2_vl", pytest.param("llava", marks=pytest.mark.slow)])
def test_a_spelt_placeholder_is_text(name: str) -> None:
    chat = seeing_chat(name)
    assert chat.processor is not None
    family = chat.processor.family
    conversation, engine = seeing_conversation(SMALL, chat=chat)
    text = f"a {family.placeholder} b {family.feature} <image>"
    first = ask(conversation, Message("user", (TextPart(text), SMALL.part)))
    ask(conversation, *first.messages, Message("user", text))

    assert [len(images) for images in engine.images] == [1, 1]
    assert engine.prompts[1].count(chat.processor.feature_id) == (
        engine.prompts[0].count(chat.processor.feature_id)
    )
    assert text in chat.tokenizer.decode(first.prompt_ids)


def test_many_images() -> None:
    """200 images of three files, each decoded once."""
    chat = seeing_chat()
    conversation, engine = seeing_conversation(SMALL, WIDE, OTHER, chat=chat)
    files = [(SMALL, WIDE, OTHER)[number % 3] for number in range(200)]
    ask(conversation, Message("user", tuple(file.part for file in files)))

    (images,) = engine.images
    assert [image.file for image in images] == files
    ends = [image.span.offset + image.span.length for image in images]
    assert all(end < image.span.offset for end, image in zip(ends, images[1:], strict=False))


def test_tokens_of_images_are_counted() -> None:
    chat = seeing_chat()
    large = image_file(png(256, 256), "image/png")
    message = Message("user", (large.part,))
    conversation, engine = seeing_conversation(large, chat=chat, context_length=30)

    size = asyncio.run(conversation.count_tokens([message]))
    assert size > 30
    with pytest.raises(RequestTooLongError, match=f"{size} tokens"):
        ask(conversation, message)
    assert conversation.turns == [] and engine.prompts == []


def test_a_missing_or_wrong_image_is_refused() -> None:
    conversation, engine = seeing_conversation(WIDE)
    with pytest.raises(ImageError, match=r"missing: give its file with policy.add_image"):
        ask(conversation, LOOK)

    fresh = image_file(png(30, 30, seed=77), "image/png")
    conversation, engine = seeing_conversation(ImageFile(fresh.part, WIDE.data))
    with pytest.raises(ImageError, match="bytes are not those of the image"):
        ask(conversation, Message("user", (fresh.part,)))
    assert conversation.turns == [] and engine.prompts == []


def test_a_model_that_reads_text_only_refuses_images() -> None:
    chat = CHATS["tiny"]
    conversation, engine = seeing_conversation(SMALL, chat=chat)
    with pytest.raises(ModelError, match=r"choose one that sees, such as Qwen/Qwen2\.5-VL"):
        ask(conversation, LOOK)
    assert engine.prompts == []


def test_token_ids_and_texts_do_not_say_which_image() -> None:
    chat = seeing_chat()
    conversation, _ = seeing_conversation(SMALL)
    ask(conversation, LOOK)
    for prompt in (conversation.prompt_ids(0), "<|image_pad|>"):
        with pytest.raises(BadRequestError, match="ids do not say which image"):
            asyncio.run(conversation.complete(prompt))

    text = asyncio.run(conversation.complete(chat.first_prompt([Message("user", "Hi")])))
    assert text[0].images == ()


def test_text_alone_asks_the_engine_as_before() -> None:
    """An engine that reads text only needs no argument for images."""
    conversation, engine = seeing_conversation(SMALL)
    ask(conversation, Message("user", "Hi"))
    assert "images" not in engine.given[0]


def test_a_result_of_a_tool_may_have_an_image() -> None:
    conversation, _ = seeing_conversation(SMALL)
    first = ask(conversation, Message("user", "Look."))
    result = Message("tool", (TextPart("a screen"), SMALL.part), name="look")
    second = ask(conversation, *first.messages, result)
    assert second.parent == 0 and len(second.images) == 1


def test_images_of_concurrent_calls() -> None:
    """Calls that are made at the same time have their own images, whichever is decoded first."""
    files = [image_file(png(16 + 8 * n, 16, seed=90 + n), "image/png") for n in range(5)]
    conversation, engine = seeing_conversation(*files)

    async def all_at_once() -> None:
        calls = (conversation.complete([Message("user", (file.part,))]) for file in files)
        await asyncio.gather(*calls)

    asyncio.run(all_at_once())
    asked = {images[0].file.part.sha256 for images in engine.images}
    assert asked == {file.part.sha256 for file in files}
    for turn in conversation.turns:
        (part,) = turn.messages[0].content
        assert turn.images[0].digest == part.sha256  # type: ignore[union-attr]
