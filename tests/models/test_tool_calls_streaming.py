"""Texts that arrive in pieces: any cut gives what the whole text gives, at a linear cost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from written_calls import JSON, MARKS, OTHERS, WHOLE, texts

from agentevo.models.tool_calls import (
    ArgumentsDelta,
    CallFailed,
    CallFinished,
    CallStarted,
    ContentDelta,
    Delta,
    Parsed,
    ReasoningDelta,
    ToolCallParser,
    parser_named,
    parser_names,
)
from agentevo.models.tool_calls.text import CallText, Marks
from examples import examples


def deltas_of(parser: ToolCallParser, pieces: Sequence[str], opening: str = "") -> list[Delta]:
    stream = parser.stream(opening=opening)
    deltas = [delta for piece in pieces for delta in stream.feed(piece)]
    return [*deltas, *stream.finish()]


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("name", parser_names())
@settings(max_examples=examples(40))
@given(data=st.data())
def test_pieces_sum_up_to_the_whole(name: str, data: st.DataObject) -> None:
    parser = parser_named(name)
    text = data.draw(texts(name))
    opening = data.draw(st.sampled_from(["", "<think>\n"]))
    places = data.draw(st.lists(st.integers(0, 400), max_size=8))
    whole = parser.parse(text, opening=opening)
    for pieces in (cut(text, places), list(text)):
        deltas = deltas_of(parser, pieces, opening)
        assert Parsed.of(deltas) == whole
        check_calls(deltas)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", '{"=```json\n[{"name": "f", "arguments": {}}]\n```"'),
        ("llama", '{"{"name": "f", "parameters": {}}'),
        ("json", '[ [ {  "name": "f", "arguments": {}}]'),
        ("pythonic", "[ [f(a=1)]\n[ f(a=1)]"),
        ("json", '```json ```json {"name": "f", "arguments": {}} ```'),
    ],
)
def test_candidates_that_are_no_calls_are_left_at_the_same_place(name: str, text: str) -> None:
    parser = parser_named(name)
    for place in range(len(text)):
        assert Parsed.of(deltas_of(parser, [text[:place], text[place:]])) == parser.parse(text)
    assert Parsed.of(deltas_of(parser, list(text))) == parser.parse(text)


def check_calls(deltas: Sequence[Delta]) -> None:
    """Every call that starts ends once, and its arguments are the sum of its deltas."""
    open_calls: dict[int, tuple[str, list[str]]] = {}
    started = 0
    for delta in deltas:
        match delta:
            case CallStarted(index, name):
                assert index == started and name
                started += 1
                open_calls[index] = (name, [])
            case ArgumentsDelta(index, text):
                assert text
                open_calls[index][1].append(text)
            case CallFinished(index, call):
                name, pieces = open_calls.pop(index)
                assert (call.name, call.arguments) == (name, "".join(pieces))
                assert isinstance(json.loads(call.arguments), dict)
            case CallFailed(index, malformed):
                assert malformed.text and malformed.problem
                if index is not None:
                    assert open_calls.pop(index)[0] == malformed.name
            case ContentDelta(text) | ReasoningDelta(text):
                assert text

    assert not open_calls


@pytest.mark.parametrize("name", parser_names())
@settings(max_examples=examples(40))
@given(data=st.data())
def test_nothing_is_lost(name: str, data: st.DataObject) -> None:
    """Words are somewhere in what comes out, as long as no whole call leaves out what it does not
    mean (an id, the type of a call)."""
    pieces = data.draw(st.lists(st.sampled_from([*MARKS[name], *JSON, *OTHERS]), max_size=14))
    text = "".join(f"{piece} w{number}w " for number, piece in enumerate(pieces))
    parsed = parser_named(name).parse(text)
    kept = " ".join(
        [parsed.content, parsed.reasoning or "", *(broken.text for broken in parsed.malformed)]
    )
    kept += "".join(call.name + call.arguments for call in parsed.tool_calls)
    missing = [word for word in re.findall(r"w\d+w", text) if word not in kept]
    assert not missing or parsed.tool_calls


@pytest.mark.parametrize("name", WHOLE)
def test_a_mark_is_never_shown(name: str) -> None:
    parser = parser_named(name)
    text = f"well {WHOLE[name]}"
    if name == "harmony":
        text = f"<|channel|>commentary<|message|>well {WHOLE[name]}"
    assert parser.parse(text).content == "well"

    for pieces in (list(text), cut(text, range(0, len(text), 7))):
        shown = [d.text for d in deltas_of(parser, pieces) if isinstance(d, ContentDelta)]
        assert "".join(shown) == "well"


def test_only_what_may_be_a_mark_is_held_back() -> None:
    stream = parser_named("hermes").stream()
    assert stream.feed("hello <") == [ContentDelta("hello")]
    assert stream.feed("b") == [ContentDelta(" <b")]
    assert stream.feed(" <tool_") == []
    assert stream.feed("x") == [ContentDelta(" <tool_x")]
    assert stream.feed('\n<tool_call>{"na') == []
    assert stream.feed('me": "f", "arg') == [CallStarted(0, "f")]
    assert stream.feed('uments": {"path": "a') == [ArgumentsDelta(0, '{"path": "a')]
    assert stream.feed("/b") == [ArgumentsDelta(0, "/b")]
    assert stream.feed('"}}</tool_call>')[0] == ArgumentsDelta(0, '"}')
    assert stream.feed("\n ") == [] and stream.finish() == []

    thinking = parser_named("hermes").stream(opening="<think>\n")
    assert thinking.feed("hm ") == [ReasoningDelta("hm")]
    assert thinking.feed("so</thi") == [ReasoningDelta(" so")]
    assert thinking.feed("nk>\n\nyes") == [ContentDelta("yes")]


def test_a_call_that_breaks_after_it_started_is_void() -> None:
    stream = parser_named("hermes").stream()
    deltas = stream.feed('<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>')
    assert deltas[:2] == [CallStarted(0, "f"), ArgumentsDelta(0, '{"a": ')]
    assert isinstance(deltas[2], CallFailed) and deltas[2].index == 0
    assert stream.finish() == []


SIZE = 10_000
TOKEN = 4
LONGEST_HELD = 64
"""Characters that are looked at again with the next piece: the beginning of a mark."""
LONG = '{"text": "' + "a long \\n text " * 1_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<"), ("llama", "{"), ("json", "["), ("json", '{"name": "{'), ("llama", "[f("),
        ("hermes", "\n"), ("hermes", "<tool_call>"), ("kimi", "<|tool_call_begin|>"),
        ("harmony", "<|channel|>"), ("xml", "<function_calls> "), ("json", "```json {"),
        ("mistral", "[TOOL_CALLS] ["), ("glm", "<tool_call>f<arg_key>"), ("llama", '{"name": "f"'),
        ("json", "{  "), ("pythonic", "[f(a=1"), ("hermes", '<tool_call>{"name": "f", "x": 1'),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {LONG}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 99 + "[" + "1, " * SIZE),
        ("kimi", f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{LONG}"),
        ("qwen_coder", f"<function=f><parameter=a>{LONG}"),
        ("qwen_coder", "<function=f>" + "<parameter=a>1</parameter>" * SIZE),
        ("pythonic", f"[f(a='''{LONG}"), ("pythonic", "[f(a=[" + "1, " * SIZE),
        ("json", '{"name": "f", "arguments": {"a": ' + "1" * 900 + "}}"),
    ],
)  # fmt: skip
def test_the_cost_is_linear(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Every character is looked at a few times, as a whole and token by token."""
    num_looks = 0
    find = Marks.find

    def count_looks(
        marks: Marks, text: CallText, *, at_start: bool = False
    ) -> regex.Match[str] | None:
        nonlocal num_looks
        match = find(marks, text, at_start=at_start)
        to_the_end = text.at + 1 if at_start else len(text.buffer)
        num_looks += (match.end() if match else to_the_end) - text.at
        return match

    monkeypatch.setattr(Marks, "find", count_looks)
    repeated = (text * (SIZE // len(text) + 1))[:SIZE]
    parser_named(name).parse(repeated)
    assert SIZE // 2 <= num_looks <= 5 * SIZE

    stream = parser_named(name).stream()
    for piece in cut(repeated, range(0, SIZE, TOKEN)):
        stream.feed(piece)
        assert len(stream._text.buffer) <= LONGEST_HELD
    stream.finish()
    assert num_looks <= 12 * SIZE
