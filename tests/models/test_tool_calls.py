"""Tool calls and reasoning out of whole texts, by family."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_templates import HERMES, PHI3, QWEN3_THINKING, tokenizer_with
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_call_templates import TEMPLATES

from agentevo.errors import UnknownNameError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.chat.chat_template import ChatTemplate
from agentevo.models.chat.model_template import template_text
from agentevo.models.tiny_tokenizer import CHAT_TEMPLATE
from agentevo.models.tool_calls import find_parser, parser_named, parser_names
from agentevo.types import Message, ToolCall
from examples import examples

SCHEMAS = {
    "text": {"type": "string"},
    "number": {"type": "number"},
    "flag": {"type": ["boolean", "null"]},
    "items": {"type": "array"},
    "nested": {"anyOf": [{"type": "object"}, {"type": "null"}]},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": SCHEMAS}},
    }
    for name in ("add", "look_up", "fs.read")
]
QUESTION = Message("user", "1+1?")
RENDERED = {name: ChatTemplate(tokenizer_with(text)) for name, text in TEMPLATES.items()}
PARSERS = {name: find_parser(text) for name, text in TEMPLATES.items()}
PARSERS["json"] = parser_named("json")

plain = st.text(st.characters(codec="utf-8", exclude_characters="<>\r"), max_size=8)
marked = plain | st.sampled_from(['{"name": "x"}', "</tool_call>", "a\nb", '"', "[f(a=1)]", "\\"])
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | marked,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(plain, inner, max_size=2),
    max_leaves=4,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": marked,
        "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans() | st.none(),
        "items": st.lists(values, max_size=2),
        "nested": st.dictionaries(plain, values, max_size=2) | st.none(),
    },
)
words = st.sampled_from(["", "well", "I add them.\nThen I look.", "a < b, {x: [1]}"])


def rendered(name: str, message: Message) -> str:
    """What the family's template writes for the message, without its end."""
    template = RENDERED[name]
    prompt = template.render([QUESTION], prompt=True)
    whole = template.render([QUESTION, message], prompt=False)
    assert whole.startswith(prompt)
    return whole.removeprefix(prompt).removesuffix("<|im_end|>\n")


def as_written(calls: tuple[ToolCall, ...]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(30))
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["add", "look_up", "fs.read"]), arguments), max_size=3
    ),
    content=words,
    reasoning=st.none() | words.filter(bool),
)
def test_what_a_template_writes_is_read_back(
    name: str, calls: list[tuple[str, dict[str, Any]]], content: str, reasoning: str | None
) -> None:
    message = Message(
        "assistant",
        content,
        tuple(ToolCall(tool, json.dumps(given), "call00001") for tool, given in calls),
        reasoning=reasoning,
    )
    parsed = PARSERS[name].parse(rendered(name, message), tools=TOOLS)
    assert parsed.malformed == ()
    assert as_written(parsed.tool_calls) == calls
    assert (parsed.content, parsed.reasoning) == (content, reasoning)


def test_the_template_chooses_the_parser() -> None:
    for name, template in TEMPLATES.items():
        assert find_parser(template).name == name.split(" ")[0], name
    for template in (HERMES, QWEN3_THINKING, CHAT_TEMPLATE, template_text("hermes")):
        assert find_parser(template).name == "hermes"

    assert find_parser(PHI3).name == "json"
    assert find_parser("{{ '<|start_header_id|>' }}").name == "llama"
    assert find_parser("[func_name1(params_name1=params_value1)]").name == "pythonic"
    assert "[THINK]" in find_parser(TEMPLATES["mistral"]).thoughts
    assert parser_named("glm").name == "glm" and "glm" in parser_names()

    with pytest.raises(UnknownNameError, match=r"'hermez': did you mean 'hermes'\? known parsers"):
        parser_named("hermez")


ONE = '{"a": 1}'


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f'a<tool_call>{{"name": "f", "arguments": {ONE}}}</tool_call>b', "ab", [ONE]),
        ("hermes", f'<tool_call>{{"arguments": {ONE}, "name": "f"}}', "", [ONE]),
        ("hermes", '<tool_call>{"name": "f"}\n{"name": "f"}</tool_call>', "", ["{}", "{}"]),
        ("hermes", '<tool_call>{"name": "f", "arguments":{ "a":1 } }', "", ['{ "a":1 }']),
        ("hermes", '<tool_call>{"name": "f", "parameters": {}}<tool_call>{"name": "f"}', "",
         ["{}", "{}"]),
        ("phi", '<|tool_call|>[{"name": "f"}, {"name": "f"}]<|/tool_call|>', "", ["{}", "{}"]),
        ("nemotron", f'<TOOLCALL>[{{"name": "f", "arguments": {ONE}}}]</TOOLCALL>', "", [ONE]),
        ("mistral", f'[TOOL_CALLS]f[CALL_ID]12[ARGS]{ONE}[TOOL_CALLS]f{{}}', "", [ONE, "{}"]),
        ("llama", f'<|python_tag|>{{"name": "f", "parameters": {ONE}}}', "", [ONE]),
        ("llama", f'{{"type": "function", "name": "f", "parameters": {ONE}}}', "", [ONE]),
        ("llama", "<|python_tag|>f.call(a=1)", "", [ONE]),
        ("llama", "[f(a=1), f()]", "", [ONE, "{}"]),
        ("llama", f'<|python_start|>{{"name": "f", "parameters": {ONE}}}<|python_end|>', "", [ONE]),
        ("llama", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama", '{"name": "f"}', '{"name": "f"}', []),
        ("llama", '{"name": "f", "para', '{"name": "f", "para', []),
        ("llama", "see [f()](https://x) or\n[a](b)", "see [f()](https://x) or\n[a](b)", []),
        ("pythonic", "[f(1)] [f(a==1)]", "[f(1)] [f(a==1)]", []),
        ("pythonic", "[f(), f(), ]", "", ["{}", "{}"]),
        ("pythonic", "I call\n[f(a=1,)]", "I call", [ONE]),
        ("pythonic", "[f(a='it\\'s', b=\"\"\"x\"y\"\"\", c=(1,), d=(2))]", "",
         ['{"a": "it\'s", "b": "x\\"y", "c": [1], "d": 2}']),
        ("pythonic", "[f(e=[True, null,], g={'k': 0x10})]", "",
         ['{"e": [true, null], "g": {"k": 16}}']),
        ("pythonic", "[f(a='\\u00e9\\x41\\101\\q\\\n')]", "", ['{"a": "éAA\\\\q"}']),
        ("kimi", f"<|tool_call_begin|>f<|tool_call_argument_begin|>{ONE}", "", [ONE]),
        ("deepseek", f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f{ONE}", "", [ONE]),
        ("deepseek", f"<｜tool▁call▁begin｜>f{ONE}<｜tool▁call▁end｜>", "", [ONE]),
        ("kimi", f"<|tool_call_begin|>functions.f:0{ONE}<|tool_call_end|>", "", [ONE]),
        ("qwen_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", "", [ONE]),
        ("qwen_coder", "<function=f><parameter=a>1</parameter></function> </tool_call>", "", [ONE]),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "", [ONE]),
        ("dsml", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{"a": 1}\n</｜DSML｜invoke>\n'
         "</｜DSML｜tool_calls>", "", [ONE]),
        ("dsml", '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" '
         'string="false">1</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>', "", [ONE]),
        ("dsml", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">1'
         "</｜DSML｜parameter></｜DSML｜invoke>", "", ['{"a": "1"}']),
        ("gemma", '<|tool_call>call:f{city:<|"|>Paris, "FR"<|"|>,n:-1.5e3}<tool_call|>', "",
         ['{"city": "Paris, \\"FR\\"", "n": -1.5e3}']),
        ("gemma", '<|tool_call>call:f{a: [true, {k: null}, []], "b": "x\\"y", <|"|>c<|"|>:{}}'
         "<tool_call|> then<|tool_call>call:f{}<tool_call|>", "then",
         ['{"a": [true, {"k": null}, []], "b": "x\\"y", "c": {}}', "{}"]),
        ("gemma", "<|tool_call>call:f{a:red fish}<tool_call|>", "", ['{"a": "red fish"}']),
        ("gemma", f"<|tool_call>call:f{{a:{'9' * 5000}}}<tool_call|>", "",
         [f'{{"a": "{"9" * 5000}"}}']),
        ("function_gemma", "<start_function_call>call:f{a:<escape>London<escape>}"
         "<end_function_call>", "", ['{"a": "London"}']),
        ("xml", "<tool_calls><invoke name='f'><parameter name='a'>1</parameter></invoke>x",
         "x", [ONE]),
        ("xml", "<tool_calls> and <function_calls>", "<tool_calls> and <function_calls>", []),
        ("json", f'```json\n{{"name": "f", "arguments": {ONE}}}\n```', "", [ONE]),
        ("json", f'[{{"name": "f", "arguments": {ONE}}}]', "", [ONE]),
        ("json", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
        ("harmony", f"<|channel|>commentary to=f <|constrain|>json<|message|>{ONE}<|call|>", "",
         [ONE]),
        ("harmony", "Just text.", "Just text.", []),
    ],
)  # fmt: skip
def test_forms_that_models_write(name: str, text: str, content: str, calls: list[str]) -> None:
    parsed = parser_named(name).parse(text)
    assert (parsed.content, parsed.malformed) == (content, ())
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [
        ("f", arguments) for arguments in calls
    ]


@pytest.mark.parametrize("name", parser_names())
@pytest.mark.parametrize("text", ["", " ", "plain\n", " a <b {c} [d] `e` \n\n", "Grüße, 你好"])
def test_a_text_without_marks_is_its_own_content(name: str, text: str) -> None:
    parsed = parser_named(name).parse(text)
    assert parsed.content == text
    assert (parsed.reasoning, parsed.tool_calls, parsed.malformed) == (None, (), ())


@pytest.mark.parametrize(
    ("name", "text", "problem", "tool"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', "a comma or", "f"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "an object as", "f"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "an object as", "f"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "it has no name", ""),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', "name is empty", ""),
        ("hermes", '<tool_call>{"name": 1}</tool_call>', "a text as the name", ""),
        ("hermes", '<tool_call>{"name": "f", "name": "g"}</tool_call>', "name twice", "f"),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', "no text in Unicode", ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
         "inside a string", "f"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "a value", "f"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', "a key", "f"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>',
         "escape", "f"),
        ("hermes", '<tool_call>{"name": "f"}}</tool_call>', "text behind its JSON", "f"),
        ("hermes", '<tool_call>{"name": "f", "argum', "the text ends inside", "f"),
        ("hermes", "<tool_call>f(1)</tool_call>", "an object with name and arguments", ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 200, "nested",
         "f"),
        ("mistral", "[TOOL_CALLS]", "the text ends inside", ""),
        ("mistral", "[TOOL_CALLS]f[ARGS]null", "an object as", "f"),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}', "the text ends inside", "f"),
        ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_end|>", "an object as", "f"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f<｜tool▁call▁end｜>",
         "an object as", "f"),
        ("qwen_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>",
         "the text ends inside", "f"),
        ("qwen_coder", "<tool_call>f</tool_call>", "needs <function=", ""),
        ("qwen_coder", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter>",
         "parameter 'a' twice", "f"),
        ("deepseek", "<｜tool▁call▁begin｜>f g<｜tool▁sep｜>h\n{}<｜tool▁call▁end｜>",
         "the name of a tool, not", ""),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f<g\n{}", "'<' in it", ""),
        ("glm", "<tool_call>f", "the text ends inside", ""),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>1</tool_call>", "needs <arg_value>", "f"),
        ("dsml", '<｜DSML｜invoke name="f">{"a": }</｜DSML｜invoke>', "a value", "f"),
        ("gemma", "<|tool_call>f{}<tool_call|>", "needs call:", ""),
        ("gemma", "<|tool_call>call:f<tool_call|>", "no arguments", ""),
        ("gemma", "<|tool_call>call:f{a:1,a:2}<tool_call|>", "'a' twice", "f"),
        ("gemma", "<|tool_call>call:f{a}<tool_call|>", "a colon", "f"),
        ("gemma", '<|tool_call>call:f{a:<|"|>x}<tool_call|>', "the text ends inside", "f"),
        ("gemma", "<|tool_call>call:f{a:" + "[" * 200, "nested", "f"),
        ("gemma", '<|tool_call>call:f{a:"\\x"}<tool_call|>', "escape", "f"),
        ("gemma", "<|tool_call>call:f{}x<tool_call|>", "text behind", "f"),
        ("xml", "<invoke><parameter name='a'>1</parameter></invoke>", 'needs name="..."', ""),
        ("pythonic", "[f(a=1, a=2)]", "'a' twice", "f"),
        ("pythonic", "[f(a=b)]", "a value", "f"),
        ("pythonic", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "arguments with names", "f"),
        ("pythonic", "[f(a={1: 2})]", "a text as the key", "f"),
        ("llama", '{"name": "f", "parameters": {"a": }}', "a value", "f"),
        ("llama", "<|python_tag|>print(1)", "arguments with names", "print"),
        ("json", '{"name": "f", "arguments": {"a"', "the text ends inside", "f"),
        ("harmony", " to=functions.f<|channel|>commentary<|message|>x", "an object as", "f"),
        ("harmony", "<|channel|>commentary to=functions.f <|constr", "the text ends inside", "f"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_malformed(name: str, text: str, problem: str, tool: str) -> None:
    parsed = parser_named(name).parse(text)
    assert (parsed.tool_calls, parsed.content) == ((), "")
    (broken,) = parsed.malformed
    assert (broken.text, broken.name) == (text, tool)
    assert problem in broken.problem and "character" in broken.problem


def test_calls_beside_a_malformed_one_are_kept() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    bad = '<tool_call>{"name": "f", "arguments": }</tool_call>'
    parsed = parser_named("hermes").parse(f"a\n{good}\n{bad}\nb\n{good}")
    assert [call.name for call in parsed.tool_calls] == ["f", "f"]
    assert [broken.text for broken in parsed.malformed] == [bad]
    assert parsed.content == "a\n\n\nb"

    missing_end = bad.removesuffix("</tool_call>")
    parsed = parser_named("hermes").parse(missing_end + good)
    assert [broken.text for broken in parsed.malformed] == [missing_end]
    assert len(parsed.tool_calls) == 1


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("mistral", '[TOOL_CALLS] [{"name": "f"}', ", {}]"),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}', ","),
        ("json", '[{"name": "f", "arguments": {}}', ", 1]"),
        ("pythonic", "[f(a=1)", ", 2]"),
        ("llama", "<|python_start|>[f()", ",<|python_end|>"),
    ],
)
def test_a_list_may_break_after_its_first_call(name: str, good: str, bad: str) -> None:
    parsed = parser_named(name).parse(good + bad)
    assert [call.name for call in parsed.tool_calls] == ["f"]
    assert [broken.text for broken in parsed.malformed] == [bad]
    assert parsed.content == ""


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("opening", "text", "reasoning", "content", "num_calls"),
    [
        ("", "<think>\nhm\n</think>\n\nyes", "hm", "yes", 0),
        ("", "\n<think>hm</think>yes", "hm", "yes", 0),
        ("<think>\n", "hm\n</think>\n\nyes", "hm", "yes", 0),
        ("<think>\n", "<think>\nhm\n</think>\n\nyes", "hm", "yes", 0),
        ("<think>\n", f"maybe {CALL}?\n</think>\n{CALL}", f"maybe {CALL}?", "", 1),
        ("<think>\n", f"cut off by the limit {CALL}", f"cut off by the limit {CALL}", "", 0),
        ("<think>\n\n</think>\n\n", "yes", None, "yes", 0),
        ("</think>", f"yes {CALL}", None, "yes", 1),
        ("", "<think>\n\n</think>\n\nyes", None, "yes", 0),
        ("", "<think>a</think><think>b</think>yes", "a\n\nb", "yes", 0),
        ("", "yes <think>no</think>", None, "yes <think>no</think>", 0),
        ("", "<thin", None, "<thin", 0),
        ("[THINK]", "hm[/THINK]yes", "hm", "yes", 0),
        ("", "<|channel>thought\nhm\n<channel|>yes", "hm", "yes", 0),
        ("<|channel>thought\n", "hm<channel|>yes", "hm", "yes", 0),
    ],
)
def test_thoughts(
    opening: str, text: str, reasoning: str | None, content: str, num_calls: int
) -> None:
    parsed = parser_named("hermes").parse(text, opening=opening)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    assert (len(parsed.tool_calls), parsed.malformed) == (num_calls, ())


def test_channels_of_harmony() -> None:
    parser = find_parser(TEMPLATES["harmony"])
    text = (
        '<|channel|>analysis<|message|>hm, to=functions.g {"a"}<|end|><|start|>assistant'
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.look_up <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    parsed = parser.parse(text)
    assert (parsed.reasoning, parsed.content) == ('hm, to=functions.g {"a"}', "I look.")
    assert parsed.tool_calls == (ToolCall("look_up", '{"a": 1}'),)
    assert parser.parse("cut", opening="<|channel|>analysis<|message|>").reasoning == "cut"

    broken_off = "<|channel|>what<|start|>assistant<|channel|>final<|message|>Two.<|channel|>fin"
    assert parser.parse(broken_off).content == "what\n\nTwo.<|channel|>fin"
    assert parser.parse("<|channel|>ana").content == ""

    final = parser.parse("<|channel|>final<|message|>Two.\n")
    assert (final.content, final.reasoning) == ("Two.\n", None)


def test_without_calls_they_are_content() -> None:
    parsed = parser_named("hermes").parse(f"<think>hm</think>{CALL}", calls=False)
    assert (parsed.content, parsed.reasoning, parsed.tool_calls) == (CALL, "hm", ())
    parsed = parser_named("harmony").parse(" to=f<|channel|>commentary<|message|>{}", calls=False)
    assert (parsed.content, parsed.tool_calls) == ("{}", ())


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (None, "12", "12"),
        (None, "007", '"007"'),
        (None, "True", '"True"'),
        (None, '{"a": 1}', '{"a": 1}'),
        (None, "x", '"x"'),
        ({"type": "string"}, "12", '"12"'),
        ({"type": "string"}, " a\nb ", '" a\\nb "'),
        ({"type": "integer"}, " 12\n", "12"),
        ({"type": "number"}, "12", "12"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "integer"}, "many", '"many"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", "12"),
        ({"type": "array"}, "[1, NaN]", '"[1, NaN]"'),
        ({"type": "object"}, "{" * 100_000, json.dumps("{" * 100_000)),
        ({"type": "integer"}, "1" * 5000, "1" * 5000),
    ],
)
def test_bare_parameters_follow_the_schema(
    schema: dict[str, Any] | None, value: str, expected: str
) -> None:
    properties = {} if schema is None else {"a": schema}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    ]
    text = f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>"
    (call,) = parser_named("qwen_coder").parse(text, tools=tools).tool_calls
    assert call.arguments == f'{{"a": {expected}}}'


FILTER = {"type": "object", "properties": {"year": {"type": "integer"}}}
DEFINED = {
    "$defs": {
        "Filter": FILTER,
        "Title": {"type": "string"},
        "Level": {"enum": [1, 5]},
        "Year": {"enum": ["2024", "2025"]},
        "a/b c": {"type": "string"},
        "Again": {"$ref": "#/$defs/Again"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"$ref": "#/$defs/Title"}, "2024", '"2024"'),
        ({"$ref": "#/$defs/Filter"}, '{"year": 1}', '{"year": 1}'),
        ({"anyOf": [{"$ref": "#/$defs/Filter"}, {"type": "null"}]}, '{"y": 1}', '{"y": 1}'),
        ({"anyOf": [{"$ref": "#/$defs/Filter"}, {"type": "null"}]}, "None", "null"),
        ({"anyOf": [{"$ref": "#/$defs/Filter"}, {"type": "null"}]}, "[1]", '"[1]"'),
        ({"oneOf": [{"$ref": "#/$defs/Title"}, {"type": "null"}]}, "2024", '"2024"'),
        ({"allOf": [{"$ref": "#/$defs/Title"}], "default": "x"}, "2024", '"2024"'),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": ["string", "null"]}]}, "5", '"5"'),
        ({"enum": ["2024", "2025"]}, "2024", '"2024"'),
        ({"enum": [1, 5]}, "5", "5"),
        ({"enum": [1, 5]}, "1.0", "1.0"),
        ({"enum": ["5", 6, None, True]}, "5", '"5"'),
        ({"enum": ["5", 6, None, True]}, "6", "6"),
        ({"enum": ["5", 6, None, True]}, "True", "true"),
        ({"enum": ["5", 6, None, True]}, "1", '"1"'),
        ({"const": "7"}, "7", '"7"'),
        ({"const": 7}, "7", "7"),
        ({"const": None}, "null", "null"),
        ({"$ref": "#/$defs/Level"}, "5", "5"),
        ({"$ref": "#/$defs/Year"}, "2024", '"2024"'),
        ({"$ref": "#/$defs/a~1b%20c"}, "5", '"5"'),
        ({"$ref": "#/$defs/Again"}, "5", "5"),
        ({"$ref": "#/$defs/Loop"}, "5", "5"),
        ({"$ref": "#/$defs/None"}, "5", "5"),
        ({"$ref": "https://example.com/schema.json"}, "5", "5"),
        ({"type": "integer", "nullable": True}, "null", "null"),
        ({}, "True", '"True"'),
    ],
)
@pytest.mark.parametrize("where", ["properties", "root", "all", "choices", "additional"])
def test_a_schema_is_followed_wherever_it_says_something(
    schema: dict[str, Any], value: str, expected: str, where: str
) -> None:
    properties = {"type": "object", "properties": {"a": schema}}
    parameters: dict[str, Any] = {
        "properties": properties,
        "root": {"$ref": "#/$defs/Arguments", "type": "object", "properties": {}},
        "all": {"type": "object", "allOf": [properties]},
        "choices": {"anyOf": [properties, {**properties, "required": ["a"]}]},
        "additional": {"type": "object", "properties": {}, "additionalProperties": schema},
    }[where] | {"$defs": {**DEFINED["$defs"], "Arguments": properties}}
    texts = {
        "qwen_coder": f"<function=f><parameter=a>{value}</parameter></function>",
        "glm": f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>",
        "xml": f'<invoke name="f"><parameter name="a">{value}</parameter></invoke>',
        "dsml": f'<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">{value}'
        "</｜DSML｜parameter></｜DSML｜invoke>",
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for name, text in texts.items():
        (call,) = parser_named(name).parse(text, tools=tools).tool_calls
        assert call.arguments == f'{{"a": {expected}}}', name


def test_marks_that_are_special_tokens_reach_the_parser() -> None:
    tokenizer = tokenizer_with(TEMPLATES["kimi"])
    special = ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    chat = ChatFormat(tokenizer)
    said = chat.completion(Message("assistant", "well", (ToolCall("add", ONE),)))
    assert set(tokenizer.convert_tokens_to_ids(special)) < set(said)

    parsed = PARSERS["kimi"].parse(chat.text(said))
    assert (parsed.content, parsed.tool_calls) == ("well", (ToolCall("add", ONE),))


def test_tools_without_parameters_are_no_hindrance() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}

    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": deep}}}},
        {"type": "function", "function": {"name": "g", "parameters": True}},
    ]
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert parser_named("glm").parse(text, tools=tools).tool_calls[0].arguments == ONE

    tools = [
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g", "parameters": {"properties": None}}},
    ]
    assert parser_named("glm").parse("<tool_call>f</tool_call>", tools=tools).tool_calls
