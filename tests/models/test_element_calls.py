"""Calls of MiniMax M3, whose parameters are elements that may hold elements."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_templates import tokenizer_with
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.tool_calls import Parsed, find_parser, parser_named
from agentevo.models.tool_calls.elements import SEPARATOR as S
from agentevo.types import Message, ToolCall
from examples import examples

TEMPLATE = (
    "{%- macro element(v) -%}"
    "{%- if v is mapping -%}{%- for k, i in v.items() -%}"
    "{{- S + '<' + k + '>' -}}{{- element(i) -}}{{- S + '</' + k + '>' -}}{%- endfor -%}"
    "{%- elif v is iterable and v is not string -%}{%- for i in v -%}"
    "{{- S + '<item>' -}}{{- element(i) -}}{{- S + '</item>' -}}{%- endfor -%}"
    "{%- else -%}{{- v if v is string else v | tojson -}}{%- endif -%}{%- endmacro -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- if m.role == 'assistant' and m.reasoning_content -%}"
    "{{- '<mm:think>' + m.reasoning_content + '</mm:think>' -}}{%- endif -%}"
    "{{- m.content or '' -}}"
    "{%- if m.tool_calls -%}{{- S + '<tool_call>\n' -}}{%- for c in m.tool_calls -%}"
    "{{- S + '<invoke name=\"' + c.function.name + '\">' -}}"
    "{{- element(c.function.arguments) -}}{{- S + '</invoke>\n' -}}{%- endfor -%}"
    "{{- S + '</tool_call>' -}}{%- endif -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
).replace("S +", f"'{S}' +")
CHAT = ChatFormat(tokenizer_with(TEMPLATE))
POINT = {"type": "object", "properties": {"x": {"type": "number"}, "note": {"type": "string"}}}
PROPERTIES = {
    "text": {"type": "string"},
    "number": {"type": "number"},
    "flag": {"type": ["boolean", "null"]},
    "tags": {"type": "array", "items": {"type": "string"}},
    "points": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/point"}}]},
    "nested": {
        "type": "object",
        "properties": {"unit": {"type": "string"}, "point": {"$ref": "#/$defs/point"}},
        "additionalProperties": {"type": "array", "items": {"type": "integer"}},
    },
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"point": POINT}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]

texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=8).filter(
    lambda text: "]" not in text
) | st.sampled_from(["1", "null", "</a>", '{"a": 1}', " a ", "a\nb", "<item>"])
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
points = st.fixed_dictionaries({}, optional={"x": numbers, "note": texts})
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "number": numbers,
        "flag": st.booleans() | st.none(),
        "tags": st.lists(texts, max_size=3),
        "points": st.lists(points, max_size=2) | st.none(),
        "nested": st.fixed_dictionaries(
            {}, optional={"unit": texts, "point": points, "other": st.lists(st.integers())}
        ),
    },
)


def called(parsed: Parsed) -> list[tuple[str, Any]]:
    assert parsed.malformed == ()
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


@settings(max_examples=examples(60))
@given(
    calls=st.lists(arguments, max_size=2),
    content=st.sampled_from(["", "well", "a < b, {x: [1]}"]),
    reasoning=st.none() | st.just("I add.\nThen I look."),
    cut=st.integers(0, 400),
)
def test_what_a_template_writes_is_read_back(
    calls: list[dict[str, Any]], content: str, reasoning: str | None, cut: int
) -> None:
    written = tuple(ToolCall("add", json.dumps(given), "call00001") for given in calls)
    message = Message("assistant", content, written, reasoning=reasoning)
    text = CHAT.text(CHAT.completion(message))
    assert CHAT.parser.name == "minimax_m3"
    parsed = CHAT.parser.parse(text, tools=TOOLS)
    assert called(parsed) == [("add", given) for given in calls]
    assert (parsed.content, parsed.reasoning) == (content, reasoning)

    stream = CHAT.parser.stream(tools=TOOLS)
    deltas = [*stream.feed(text[:cut]), *stream.feed(text[cut:]), *stream.finish()]
    assert Parsed.of(deltas) == parsed


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<a>1S</a>", {"a": 1}),
        ("<a>S<item>xS</item>S<item>2S</item>S</a>", {"a": ["x", 2]}),
        ("<a>S<b>S<c>trueS</c>S</b>S</a>", {"a": {"b": {"c": True}}}),
        ("<a>S<item>1S</item>S<b>2S</b>S</a>", {"a": {"item": 1, "b": 2}}),
        ("<$top>S</$top>", {"$top": ""}),
    ],
)
def test_without_a_schema_the_form_decides(body: str, expected: dict[str, Any]) -> None:
    text = f'S<tool_call>\nS<invoke name="f">S{body}S</invoke>\nS</tool_call>'
    assert called(parser_named("minimax_m3").parse(text.replace("S", S))) == [("f", expected)]


def nested_call(parameters: dict[str, Any], body: str) -> list[tuple[str, Any]]:
    text = f'S<tool_call>\nS<invoke name="f">S{body}S</invoke>\nS</tool_call>'.replace("S", S)
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return called(parser_named("minimax_m3").parse(text, tools=tools))


def test_a_nested_value_has_the_type_of_its_own_schema() -> None:
    number = {"type": "object", "properties": {"n": {"type": "integer"}}}
    parameters = {
        "type": "object",
        "allOf": [{"properties": {"a": number}, "additionalProperties": {"type": "string"}}],
    }
    body = "<a>S<n>1S</n>S</a>S<b>1S</b>"
    assert nested_call(parameters, body) == [("f", {"a": {"n": 1}, "b": "1"})]


@pytest.mark.parametrize("kind", [[{"x": 1}], [["object"]], {"x": 1}, 7, [None]])
def test_a_type_that_is_no_type_allows_an_object(kind: Any) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": kind}}}
    assert nested_call(parameters, "<a>S<b>1S</b>S</a>") == [("f", {"a": {"b": 1}})]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<a>xS<b>1S</b>S</a>", "text beside its elements"),
        ("<a>S<b>1S</b>S<b>2S</b>S</a>", "the element 'b' twice"),
        ("<a>1S</a>S<a>2S</a>", "the parameter 'a' twice"),
        ("<a>1S</b>", f"it needs {S}</a>"),
        ("<a>1", f"it needs {S}</a>"),
        ("a", "needs a parameter"),
        ("<a>S" * 101, "more than 100 levels"),
    ],
)
def test_malformed_elements_say_what_is_wrong(body: str, problem: str) -> None:
    text = f'S<tool_call>\nS<invoke name="f">S{body}S</invoke>\nS</tool_call>done'
    parsed = parser_named("minimax_m3").parse(text.replace("S", S))
    (malformed,) = parsed.malformed
    assert problem in malformed.problem and malformed.name == "f"
    assert (parsed.content, parsed.tool_calls) == ("done", ())


def test_a_model_that_does_not_think_may_end_a_thought_first() -> None:
    parser = find_parser(TEMPLATE)
    assert "<mm:think>" in parser.thoughts
    assert parser.parse("</mm:think>two").content == "two"
    assert parser.parse("two</mm:think>").content == "two</mm:think>"
    opened = parser.parse("so</mm:think>two", opening="<mm:think>")
    assert (opened.reasoning, opened.content) == ("so", "two")
