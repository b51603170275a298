"""Texts in spans: bounded, and without credentials."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.observability.tracing.texts import SpanTexts
from agentevo.types import Message, ToolCall

KEY = "q7RkZ0vUeWm3xTnY"
ENVIRONMENT = {"MY_SERVICE_KEY": KEY, "DB_PASSWORD": "hunter2hunter2", "HOME": "/home/somebody"}
TEXTS = SpanTexts(200, ENVIRONMENT)


@pytest.mark.parametrize(
    "secret",
    [
        KEY,
        "hunter2hunter2",
        "sk-abcdefghijklmnopqrstuvwxyz",
        "ghp_abcdefghijklmnopqrstuvwxyz0123",
        "hf_abcdefghijklmnopqrstuvwxyz",
        "AKIAABCDEFGHIJKLMNOP",
    ],
)
@pytest.mark.parametrize("around", ["{}", "key={} and", '{{"key": "{}"}}', "x" * 90 + " {0} " * 9])
def test_secrets_are_left_out(secret: str, around: str) -> None:
    text = around.format(secret)
    assert secret not in TEXTS.shown(text)
    chat = [
        Message("user", text),
        Message("assistant", "", tool_calls=(ToolCall("f", json.dumps({"a": text})),)),
        Message("assistant", "so", reasoning=text),
        Message("tool", text, name=text),
    ]
    assert secret not in SpanTexts(10_000, ENVIRONMENT).messages(chat)


def test_passwords_in_urls_and_headers_are_left_out() -> None:
    shown = TEXTS.shown("postgresql://me:letmein@db/x Authorization: Basic bWU6bGV0bWVpbg==")
    assert "letmein" not in shown
    assert "bWU6" not in shown


def test_what_is_no_secret_stays() -> None:
    text = "the basic understanding of skeleton_keys_in_pkgutil_iter_modules, /home/somebody"
    assert TEXTS.shown(text) == text


@pytest.mark.parametrize("place", [0, 95, 100, 150, 4000, 4300])
def test_half_a_secret_is_not_left_by_what_is_cut(place: int) -> None:
    for length in (5_000, 9_000, 50_000):
        text = "." * place + KEY + "." * (length - place)
        shown = TEXTS.shown(text)
        assert not any(KEY[i : i + 4] in shown for i in range(len(KEY) - 3))


@given(st.text(max_size=600), st.integers(16, 300))
def test_a_text_is_as_long_as_it_may_be(text: str, longest: int) -> None:
    shown = SpanTexts(longest, {}).shown(text)
    assert len(shown) <= longest + 3 * text.count("\0")
    shown.encode()


@given(st.lists(st.text(max_size=300), max_size=30))
def test_messages_are_json_of_bounded_size_and_end_with_the_newest(texts: list[str]) -> None:
    told = SpanTexts(500, {}).messages([Message("user", text) for text in texts])
    assert len(told) < 500 * 6 + 1000
    read = json.loads(told)
    if texts and texts[-1] and len(texts[-1]) < 100 and texts[-1].isprintable():
        assert read[-1]["parts"][0]["content"] == texts[-1]


def test_messages_have_the_form_of_the_conventions() -> None:
    chat = [
        Message("system", "Be brief."),
        Message("assistant", "Hm.", reasoning="Why?", tool_calls=(ToolCall("f", "{", "c1"),)),
        Message("tool", "42", tool_call_id="c1"),
    ]
    assert json.loads(SpanTexts(1000, {}).messages(chat, finish_reasons=["stop"]))[1:] == [
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "Why?"},
                {"type": "text", "content": "Hm."},
                {"type": "tool_call", "name": "f", "arguments": "{", "id": "c1"},
            ],
            "finish_reason": "stop",
        },
        {
            "role": "tool",
            "parts": [{"type": "tool_call_response", "id": "c1", "response": "42"}],
            "finish_reason": "stop",
        },
    ]


@pytest.mark.parametrize("calls", [1, 3, 5000])
def test_a_message_of_many_calls_is_as_long_as_it_may_be(calls: int) -> None:
    called = [ToolCall(f"id-{n}", "t" * 500, '{"q": "' + "x" * 900 + '"}') for n in range(calls)]
    texts = SpanTexts(2000, {})
    (told,) = json.loads(texts.messages([Message("assistant", "hm", tool_calls=called)]))
    assert len(json.dumps(told)) < 4000
    assert told["parts"][0] == {"type": "text", "content": "hm"}
    assert told["parts"][1]["type"] == "tool_call"

    if calls > 3:
        assert "further parts are left out" in told["parts"][-1]["content"]
