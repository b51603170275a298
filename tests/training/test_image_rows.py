"""Conversations and preference pairs with images, from files: the tokens and the images are those
that the policy gets when it plays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pictures import data_url
from seeing_chats import OTHER, SMALL, WIDE, seeing_chat
from tiny_vision import FAMILIES

from agentevo.data import RowError, RowReport, read_conversations
from agentevo.data.message_images import ImageCollector
from agentevo.errors import ConfigError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.tiny_tokenizer import byte_tokenizer
from agentevo.training.assistant_tokens import AssistantTokens, TokenRow
from agentevo.training.pair_file import pairs_of_lines, read_pair_file
from agentevo.training.supervised import conversation_sample
from agentevo.types import Message, Sample, TextPart

FILES = {file.part.sha256: file for file in (SMALL, WIDE, OTHER)}
TALK = [
    Message("user", (TextPart("What is "), SMALL.part, TextPart("this?"))),
    Message("assistant", "A dot."),
    Message("user", (WIDE.part, TextPart("And this?"))),
    Message("assistant", "A line."),
]
ROW = {
    "messages": [
        {"role": "user", "content": "What is <image>this?"},
        {"role": "assistant", "content": "A dot."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]},
        {"role": "assistant", "content": "A line."},
    ],
    "images": ["small.png", "wide.png"],
}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "What is <image>this?"},
        {"from": "gpt", "value": "A dot."},
        {"from": "human", "value": "<image>And this?"},
        {"from": "gpt", "value": "A line."},
    ],
    "images": ["small.png", "wide.png"],
}
ALL = [
    name if name in ("qwen2_vl", "gemma3") else pytest.param(name, marks=pytest.mark.slow)
    for name in FAMILIES
]


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """`written(*rows)` -> a file of these rows beside its images."""
    (tmp_path / "small.png").write_bytes(SMALL.data)
    (tmp_path / "wide.png").write_bytes(WIDE.data)

    def write(*rows: Any) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    return write


def encoded(
    path: Path, chat: ChatFormat, **options: Any
) -> tuple[list[TokenRow], RowReport, dict[str, Any]]:
    images = ImageCollector()
    report = RowReport("train")
    encoder = AssistantTokens(
        chat.tokenizer,
        **{"max_tokens": 4096, **options},
        processor=chat.processor,
        images=images.files,
    )
    rows: list[TokenRow] = []
    for conversation in read_conversations(str(path), "auto", report, images):
        try:
            rows += encoder.encode(conversation)[0]
        except RowError as error:
            report.add(conversation.where, error)
    return rows, report, images.files


def check_same(sample: Sample, other: Sample) -> None:
    assert sample.ids.tolist() == other.ids.tolist()
    assert sample.loss_mask.tolist() == other.loss_mask.tolist()
    assert sample.images == other.images and sample.processor == other.processor


@pytest.mark.parametrize("name", ALL)
def test_a_conversation_is_encoded_as_it_is_played(name: str, written: Callable[..., Path]) -> None:
    chat = seeing_chat(name)
    assert chat.processor is not None
    rows, report, files = encoded(written(ROW), chat)
    sample = conversation_sample(TALK, chat, "talk", FILES)

    (row,) = rows
    assert not report.bad and files == {file.part.sha256: file for file in (SMALL, WIDE)}
    check_same(row.sample(), sample)
    whole = chat.processor.prompt(TALK[:3], FILES)
    assert sample.ids[: len(whole.ids)].tolist() == whole.ids
    assert sample.images == whole.spans and sample.processor == chat.processor.fingerprint
    assert not sample.loss_mask[sample.ids == chat.processor.feature_id].any()


def test_forms_of_rows(written: Callable[..., Path]) -> None:
    chat = seeing_chat()
    alpaca = {"instruction": "What is this?", "output": "A dot.", "image": "small.png"}
    (shared,), _, _ = encoded(written(SHAREGPT), chat)
    check_same(shared.sample(), conversation_sample(TALK, chat, "talk", FILES))

    (single,), _, _ = encoded(written(alpaca), chat)
    asked = Message("user", (SMALL.part, TextPart("What is this?")))
    talk = [asked, Message("assistant", "A dot.")]
    check_same(single.sample(), conversation_sample(talk, chat, "", FILES))


def test_a_shortened_conversation_loses_whole_images(written: Callable[..., Path]) -> None:
    chat = seeing_chat()
    (whole,), _, _ = encoded(written(ROW), chat)
    (short,), _, _ = encoded(written(ROW), chat, max_tokens=len(whole.ids) - 1, too_long="shorten")
    assert [span.digest for span in short.images] == [WIDE.part.sha256]
    check_same(short.sample(), conversation_sample(TALK[2:], chat, "", FILES))


@pytest.mark.parametrize(
    ("row", "reason", "why"),
    [
        (ROW | {"images": ["small.png"]}, "image", "1 images, and 2 places"),
        (ROW | {"images": ["small.png", "gone.png"]}, "image", "gone.png"),
        (
            {
                "messages": [
                    {"role": "user", "content": "Draw."},
                    {"role": "assistant", "content": [{"type": "image", "image": "small.png"}]},
                ]
            },
            "image",
            "it writes text only",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a <|image_pad|> b"},
                    {"role": "assistant", "content": "no"},
                ]
            },
            "special_token",
            "has <|image_pad|> in its text",
        ),
    ],
)
def test_rows_that_are_left_out(
    row: Any, reason: str, why: str, written: Callable[..., Path], tmp_path: Path
) -> None:
    rows, report, _ = encoded(written(row), seeing_chat())

    assert rows == [] and report.counts() == {reason: 1}
    report.write(tmp_path / "bad.jsonl")
    assert why in (tmp_path / "bad.jsonl").read_text()


PAIR = {
    "prompt": [{"role": "user", "content": "<image>What is this?"}],
    "images": ["small.png"],
    "chosen": "A dot.",
    "rejected": "A line.",
}


def test_preference_pairs(written: Callable[..., Path]) -> None:
    chat = seeing_chat()
    lines = read_pair_file(written(PAIR), "dpo")
    ((pair,),) = pairs_of_lines(lines, chat, "dpo", 512)
    asked = Message("user", (SMALL.part, TextPart("What is this?")))
    for candidate, text in ((pair.chosen, "A dot."), (pair.rejected, "A line.")):
        assert candidate is not None
        (sample,) = candidate.rows
        talk = [asked, Message("assistant", text)]
        check_same(sample, conversation_sample(talk, chat, "", FILES))
    assert lines[0].images == {SMALL.part.sha256: SMALL}


def test_pairs_with_images_need_a_model_that_sees(written: Callable[..., Path]) -> None:
    path = written(PAIR)
    with pytest.raises(ConfigError, match=rf"{path.name}:1: .* choose one that sees"):
        pairs_of_lines(read_pair_file(path, "dpo"), ChatFormat(byte_tokenizer(512)), "dpo", 512)

    with pytest.raises(ConfigError, match=r"rows.jsonl:1: .*gone.png"):
        read_pair_file(written(PAIR | {"images": ["gone.png"]}), "dpo")

    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the column images .* read only text"):
        read_pair_file(path, "bradley_terry")


def test_an_answer_of_several_messages_has_images_of_its_own(written: Callable[..., Path]) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(OTHER.data)}}
    talk = [
        {"role": "assistant", "content": "A dot."},
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": "Another."},
    ]
    lines = read_pair_file(written(PAIR | {"chosen": talk}), "dpo")
    ((pair,),) = pairs_of_lines(lines, seeing_chat(), "dpo", 512)
    assert pair.chosen is not None
    shown = [[span.digest for span in sample.images] for sample in pair.chosen.rows]
    assert shown[-1] == [SMALL.part.sha256, OTHER.part.sha256]
    assert {*lines[0].images} == {*shown[-1]}
