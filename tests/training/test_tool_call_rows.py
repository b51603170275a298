"""Rows with tool calls, for templates that take calls in several ways."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from chat_templates import R1, R1_DISTIL, R1_TEXT, STRICT, tokenizer_with

from agentevo.data import ChatRow, RowError, RowReport, read_conversations
from agentevo.training.assistant_tokens import AssistantTokens

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def row_of_calls(folder: Path, **call: Any) -> ChatRow:
    """As a file of OpenAI's chats has it: a message of calls has no content."""
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], **call},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    report = RowReport("conversation")
    (row,) = read_conversations(str(path), "auto", report)
    return row


def pieces(template: str, conversation: ChatRow) -> list[list[tuple[str, bool]]]:
    """Each sample as (text, trained) pieces."""
    tokenizer = tokenizer_with(template)
    rows, _ = AssistantTokens(tokenizer, max_tokens=512).encode(conversation)
    return [
        [
            (tokenizer.decode([token for token, _ in run]), trained)
            for trained, run in groupby(
                zip(row.ids.tolist(), row.mask.tolist(), strict=True), key=lambda pair: pair[1]
            )
        ]
        for row in rows
    ]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (R1, '<call>add {"a": 1}</call>'),
        (R1_DISTIL, '<call>add {"a": 1}</call>'),
        (R1_TEXT, '<calls><call>function<sep>add\n{"a": 1}</call></calls>'),
    ],
    ids=["r1", "r1 distil", "r1 text"],
)
def test_calls_as_deepseek_r1_takes_them(template, said, tmp_path):
    row = row_of_calls(tmp_path)
    conversation = ChatRow(row.where, row.messages[:4])
    first, second = pieces(template, conversation)
    start = "<|begin|><|User|>1+1<|Assistant|>"
    assert first == [
        (f"{start}<think>\n", False),
        (f"\n</think>\n\n{said}<|im_end|>", True),
    ]
    assert second == [
        (f"{start}{said}<|im_end|><result>2</result>", False),
        ("two<|im_end|>", True),
    ]


def test_calls_that_the_template_does_not_write_are_refused_with_their_message(tmp_path):
    beside = row_of_calls(tmp_path, content="Let me see.")
    for template, expected in (
        (R1_DISTIL, "leaves out tool_calls beside a content (message 2)"),
        (R1_TEXT, "message 6: the template does not begin it with"),
    ):
        with pytest.raises(RowError) as caught:
            pieces(template, beside)
        assert expected in caught.value.detail


def test_a_template_that_refuses_results_without_a_call_takes_them_with_one(tmp_path):
    ((_, call, _, answer, _, again),) = pieces(STRICT, row_of_calls(tmp_path))
    assert (
        call[0]
        == again[0]
        == ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|eom|>')
    )
    assert answer == ("two<|im_end|>", True)
