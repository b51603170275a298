"""Messages in OpenAI's form, and as the store keeps them."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.data.messages import messages_of, tools_of
from agentevo.errors import BadRequestError
from agentevo.types import ImagePart, Message, TextPart, ToolCall

text = st.text(max_size=8)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
parts = st.builds(TextPart, text) | st.builds(ImagePart, digests, st.just("image/jpeg"))
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=text | st.lists(parts, max_size=3).map(tuple),
    tool_calls=st.lists(st.builds(ToolCall, text, text, text), max_size=2).map(tuple),
    tool_call_id=st.none() | text,
    name=st.none() | text,
    reasoning=st.none() | text,
)


@pytest.mark.slow
@given(st.lists(messages, max_size=4))
def test_messages_are_what_was_stored(stored):
    again = msgspec.json.decode(msgspec.json.encode(stored), type=list[Message])
    assert again == stored
    assert [hash(message) for message in again] == [hash(message) for message in stored]


def test_a_message_of_text_is_stored_as_it_always_was():
    old = b'[{"role":"user","content":"hi"},{"role":"assistant","content":""}]'
    decoded = msgspec.json.decode(old, type=list[Message])
    assert decoded == [Message("user", "hi"), Message("assistant", "")]
    assert msgspec.json.encode(decoded) == old


def test_a_pixel_is_no_part_of_a_message():
    with pytest.raises(msgspec.ValidationError, match="sha256"):
        msgspec.convert({"type": "image", "sha256": "data:image/png;base64,AAAA"}, ImagePart)


def test_openais_form():
    arguments = '{"b":1, "a": "x"}'
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    given_ = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": [{"type": "image", "sha256": "0" * 64}], "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        Message("user", "as it is"),
    ]
    assert messages_of(given_) == [
        Message("system", "ab"),
        Message("user", (ImagePart("0" * 64),), name="Ada"),
        Message("assistant", "", (ToolCall("add", arguments, "c1"),), reasoning="hm"),
        Message("tool", "2", tool_call_id="c1", name="add"),
        Message("user", "as it is"),
    ]

    call["function"] = {"name": "add", "arguments": {"a": "ü"}}
    assert messages_of(given_)[2].tool_calls == (ToolCall("add", '{"a": "ü"}', "c1"),)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "tool", "content": 2}, "content is a int"),
        ({"role": "user", "content": [3]}, "message 1, part 1 is of type 'int'"),
        ({"role": "user", "content": [{"type": "image", "sha256": "xy"}]}, "part 1: .*sha256"),
        ({"role": "user", "content": "", "tool_calls": [{"name": "x"}]}, "of the assistant"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "x", "arguments": 1}]},
            "the arguments of x are a int",
        ),
        ({"role": "assistant", "content": "", "reasoning": 1}, "reasoning is a int, not a text"),
    ],
)
def test_what_is_no_message_says_why(message, said):
    with pytest.raises(BadRequestError, match=said):
        messages_of([message])


def test_tools_are_functions_with_names_that_json_can_say():
    add = {"type": "function", "function": {"name": "add"}}
    assert json.loads(json.dumps(tools_of([add]))) == [add]
    for wrong, said in (
        ({"name": "add"}, "tools is a dict"),
        ([add, {"function": {}}], "tool 2 has no function with a name"),
        ([{"function": {"name": "add", "x": {1}}}], "can't be written as JSON"),
    ):
        with pytest.raises(BadRequestError, match=said):
            tools_of(wrong)
