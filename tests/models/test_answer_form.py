"""The grammar of an answer: every family's own way to call a tool is of it, and JSON is."""

from __future__ import annotations

import copy
import json
from functools import cache

import pytest
from constrained import tiny_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import soak
from tool_call_templates import TEMPLATES

from agentevo.errors import BadRequestError, GrammarError
from agentevo.models.chat import answer_form
from agentevo.models.chat.answer_form import ANY_OBJECT, AnswerForm, grammar_of
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.grammar import Grammars
from agentevo.types import Message, ToolCall
from examples import examples

ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": one} for one in (ADD, {"name": "now"})]
CALLS = (ToolCall("add", '{"a": 3, "b": "y"}', "c1"), ToolCall("now", "{}", "c2"))
ASK = [Message("user", "Go.")]
JSON_BEHIND_A_NAME = {
    "hermes",
    "llama",
    "mistral with arguments",
    "deepseek",
    "deepseek 3.1",
    "kimi",
    "json",
}
ONE_CALL_ALONE = {"kimi"}
"""Families that number their calls."""


def chat_of(name: str) -> ChatFormat:
    tokenizer = copy.deepcopy(tiny_policy().tokenizer)
    if name != "tiny":
        tokenizer.chat_template = TEMPLATES[name]
        marks = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]"]
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
        tokenizer.eos_token = "<|im_end|>"
    return ChatFormat(tokenizer)


def reads(chat: ChatFormat, grammar: str, text: str) -> bool:
    """Whether the text, ended, is of the grammar."""
    state = Grammars(chat.tokenizer, len(chat.tokenizer)).begin(grammar, chat.end_ids)
    try:
        for token in [*chat.tokenizer.encode(text, add_special_tokens=False), chat.end_of_turn_id]:
            state.mask()
            state.take(token)
    except GrammarError:
        return False

    return True


@pytest.mark.parametrize("name", sorted(JSON_BEHIND_A_NAME))
def test_a_required_call_is_written_as_the_family_writes_it(name):
    chat = chat_of(name)
    one, two = (chat._written(Message("assistant", "", CALLS[:n])).strip() for n in (1, 2))
    assert [call.name for call in chat.parser.parse(two, tools=TOOLS).tool_calls] == ["add", "now"]

    grammar = grammar_of(AnswerForm(calls="required"), chat, TOOLS, ASK)
    assert reads(chat, grammar, one)
    assert reads(chat, grammar, two) == (name not in ONE_CALL_ALONE)
    assert not reads(chat, grammar, "I can't.")
    assert not reads(chat, grammar, one.replace("3", '"3"'))

    alone = grammar_of(AnswerForm(calls="required", parallel=False), chat, TOOLS, ASK)
    assert reads(chat, alone, one) and not reads(chat, alone, two)

    now = grammar_of(AnswerForm(calls="required", tool="now"), chat, TOOLS, ASK)
    assert not reads(chat, now, one)
    assert reads(chat, now, chat._written(Message("assistant", "", CALLS[1:])).strip())


@pytest.mark.parametrize("more", [{}, {"additionalProperties": True}, {"allOf": [{}]}])
def test_a_call_has_a_parameter_without_a_name_only_if_the_schema_says_so(more):
    chat = chat_of("hermes")
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    grammar = grammar_of(AnswerForm(calls="required"), chat, tools, ASK)
    for arguments, is_named in (('{"a": 3}', True), ('{"a": 3, "c": 4}', False)):
        call = ToolCall("add", arguments, "c1")
        text = chat._written(Message("assistant", "", (call,))).strip()
        assert reads(chat, grammar, text) == (is_named or bool(more))


def test_a_template_without_a_place_for_calls_writes_plain_json():
    tokenizer = copy.deepcopy(tiny_policy().tokenizer)
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content + '<|end|>' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )
    chat = ChatFormat(tokenizer)
    text = '{"name": "add", "arguments": {"a": 3, "b": "y"}}'
    assert [call.name for call in chat.parser.parse(text, tools=TOOLS).tool_calls] == ["add"]
    assert reads(chat, grammar_of(AnswerForm(calls="required"), chat, TOOLS, ASK), text)


@pytest.mark.parametrize("name", ["qwen_coder", "glm", "pythonic", "xml", "dsml"])
def test_families_whose_calls_are_no_json_are_refused_and_may_still_answer_in_json(name):
    chat = chat_of(name)
    with pytest.raises(BadRequestError, match="can't be prescribed"):
        grammar_of(AnswerForm(calls="required"), chat, TOOLS, ASK)
    assert reads(chat, grammar_of(AnswerForm(schema=ANY_OBJECT), chat, TOOLS, ASK), '{"a": 1}')


def test_a_thought_may_come_first_and_must_where_the_prompt_opens_one():
    chat = chat_of("hermes")
    form = AnswerForm(schema=ADD["parameters"])
    answer = '{"a": 3, "b": "y"}'
    free = grammar_of(form, chat, None, ASK)
    chat.opening = "<think>\n"
    opened = grammar_of(form, chat, None, ASK)
    chat.opening = "<think>\n\n</think>\n\n"
    closed = grammar_of(form, chat, None, ASK)
    thought = "so\nthree</think>\n\n"
    assert reads(chat, free, answer) and reads(chat, free, "<think>" + thought + answer)
    assert reads(chat, opened, thought + answer) and not reads(chat, opened, answer)
    assert reads(chat, closed, answer) and not reads(chat, closed, "<think>" + thought + answer)


def test_with_tools_an_answer_in_json_may_be_a_call_instead():
    chat = chat_of("hermes")
    call = chat._written(Message("assistant", "", CALLS[:1])).strip()
    grammar = grammar_of(AnswerForm(schema=ADD["parameters"]), chat, TOOLS, ASK)
    assert reads(chat, grammar, call) and reads(chat, grammar, '{"a":3,"b":"y"}')
    assert not reads(chat, grammar, '{"a":3}')


@pytest.mark.parametrize(
    ("form", "tools", "why"),
    [
        (AnswerForm(calls="required"), None, "no tools"),
        (AnswerForm(calls="required", tool="gone"), TOOLS, "'gone'"),
    ],
)
def test_a_call_of_nothing_is_refused(form, tools, why):
    with pytest.raises(BadRequestError, match=why):
        grammar_of(form, chat_of("tiny"), tools, ASK)


def test_a_schema_s_own_settings_for_the_library_do_not_count():
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    grammar = grammar_of(AnswerForm(schema=schema), chat_of("tiny"), None, ASK)
    assert json.loads(grammar.partition("%json ")[2].removesuffix(")"))["x-guidance"] == {
        "whitespace_flexible": False,
        "item_separator": ", ?",
        "key_separator": ": ?",
    }


STRICT = [{"type": "function", "function": one | {"strict": True}} for one in (ADD,)]
MIXED = [*STRICT, {"type": "function", "function": {"name": "now"}}]
BREAKS = [
    '<tool_call>{"arguments": {}, "name": "add"}</tool_call>',
    '<tool_call>{"name": "add", "parameters": {}}',
    "[TOOL_CALLS]add{}",
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": "x"}}]',
    "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "<|tool_call_begin|>functions.add:7<|tool_call_argument_begin|>{}<|tool_call_end|>",
    '{"name": "add", "arguments": {}}',
    '[{ "parameters": {}, "name": "add"}]',
    '{"type": "function", "name": "add", "arguments": {}}',
    '{"n\\u0061me": "add", "arguments": {}}',
    '<|python_tag|>{"name": "add", "parameters": {}}',
    "<|python_tag|>add.call(a=1)",
    "<|python_start|>[add()]<|python_end|>",
    "[add(a=1)]",
    "[\u00a0add (a=1)]",
]
"""Calls of `add` that don't fit its schema, each in some family's notation."""


def fits(call):
    arguments = json.loads(call.arguments)
    return set(arguments) == {"a", "b"} and isinstance(arguments["a"], int)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek", *soak(*sorted({*JSON_BEHIND_A_NAME} - {"deepseek"}))])
def test_a_strict_tool_is_called_by_its_schema_or_not_at_all(name):
    chat = chat_of(name)
    grammar = grammar_of(None, chat, MIXED, ASK)
    one, two = (chat._written(Message("assistant", "", CALLS[:n])).strip() for n in (1, 2))
    free = chat._written(Message("assistant", "", (ToolCall("now", '{"z": [1]}', "c1"),))).strip()
    texts = ["", "I can't.", 'It is {"x": 1} [1] [a](b).', one, free, f"So: {one}", f"So: {free}"]
    assert all(reads(chat, grammar, text) for text in texts)
    assert reads(chat, grammar, two) == (name not in ONE_CALL_ALONE)
    assert not reads(chat, grammar, one.replace("3", '"3"'))
    assert not reads(chat, grammar, f"So: {one} {one.replace('3', '3.5')}")

    for text in BREAKS:
        for whole in (text, f"So:\n{text}", f"{one}\n{text}", f"<think>so</think>\n{text}"):
            calls = chat.parser.parse(whole, tools=MIXED).tool_calls
            wrong = [call for call in calls if call.name == "add" and not fits(call)]
            assert not wrong or not reads(chat, grammar, whole), whole


kept_chat_of = cache(chat_of)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(sorted(JSON_BEHIND_A_NAME)),
    st.lists(
        st.sampled_from(
            [
                "ONE",
                "TWO",
                "FREE",
                "<think>",
                "</think>",
                "\n",
                " ",
                "x",
                "; ",
                "[",
                "]",
                "{",
                "}",
                '"name"',
                ": ",
                '"add"',
                '"arguments"',
                "{}",
                ", ",
                "add(",
                "a=1)",
                "```",
                *BREAKS,
            ]
        ),
        max_size=8,
    ),
)
def test_no_text_of_the_grammar_has_a_call_that_does_not_fit(name, pieces):
    chat = kept_chat_of(name)
    said = {
        "ONE": chat._written(Message("assistant", "", CALLS[:1])).strip(),
        "TWO": chat._written(Message("assistant", "", CALLS)).strip(),
        "FREE": chat._written(Message("assistant", "", CALLS[1:])).strip(),
    }
    text = "".join(said.get(piece, piece) for piece in pieces)
    if reads(chat, grammar_of(None, chat, MIXED, ASK), text):
        calls = chat.parser.parse(text, tools=MIXED).tool_calls
        assert all(fits(call) for call in calls if call.name == "add")


def test_where_calls_may_not_be_parallel_one_strict_call_comes_at_most():
    chat = chat_of("hermes")
    form = AnswerForm(parallel=False)
    grammar = grammar_of(form, chat, MIXED, ASK)
    one, two = (chat._written(Message("assistant", "", CALLS[:n])).strip() for n in (1, 2))
    assert reads(chat, grammar, f"So {one}.") and reads(chat, grammar, "No.")
    assert not reads(chat, grammar, two) and not reads(chat, grammar, f"{one} {one}")


@pytest.fixture
def told(monkeypatch):
    """What is told to people."""
    lines = []
    answer_form._note_once.cache_clear()
    monkeypatch.setattr(answer_form, "to_stderr", lines.append)
    yield lines
    answer_form._note_once.cache_clear()


@pytest.mark.parametrize("name", ["qwen_coder", "glm", "pythonic", "xml", "dsml", "mistral"])
def test_strict_has_no_effect_in_a_notation_that_can_t_be_prescribed(name, told):
    """Clients send it unasked: they have to work with every family."""
    assert [grammar_of(None, chat_of(name), MIXED, ASK) for _ in range(2)] == ["", ""]
    (line,) = told
    assert line.startswith("`strict` of tools has no effect: ") and "can't be prescribed" in line


def test_strict_has_no_effect_without_the_package(told, monkeypatch):
    monkeypatch.setattr(answer_form, "find_spec", lambda name: None)
    assert grammar_of(None, chat_of("hermes"), MIXED, ASK) == ""
    assert "pip install 'agentevo[constrained]'" in told[0]


def test_json_comes_before_a_strict_tool_where_nothing_marks_a_call(told):
    form = AnswerForm(schema=ANY_OBJECT)
    free = [{"type": "function", "function": ADD}, MIXED[1]]
    assert grammar_of(form, chat_of("llama"), MIXED, ASK) == grammar_of(
        form, chat_of("llama"), free, ASK
    )
    assert "an answer in JSON could be a call" in told[0]
    assert grammar_of(form, chat_of("hermes"), MIXED, ASK)
    assert len(told) == 1
