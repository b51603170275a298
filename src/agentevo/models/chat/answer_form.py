"""Turns the required form of an answer into a grammar: JSON by a schema, or calls of tools in the
notation of the model's family. The answer may begin with a thought if the family thinks, and must
if the prompt has opened one.

If a tool's function is `strict` (a term of OpenAI's API), every call must fit its schema: in such
an answer, no text can begin like a call unless it is a fitting call. Several clients set `strict`
by default. So if it can't be enforced, the answer is free, and a note reports it once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, cast

from agentevo.errors import BadRequestError
from agentevo.models.tool_calls.parser import HARMONY, THOUGHTS
from agentevo.runtime.console import to_stderr

if TYPE_CHECKING:
    from agentevo.models.chat.call_notation import CallNotation
    from agentevo.models.chat.chat_format import ChatFormat
    from agentevo.types import Message

Schema = Mapping[str, Any] | bool
ANY_OBJECT: Schema = {"type": "object"}
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Options for JSON on one line, so that a policy can't sample endless white space."""
BARE = ("json", "llama")
"""The parsers of notations without marks, in which any JSON object may be a call."""
_SPACE = r"/[ \n]{0,2}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The requirements of a request on the form of its answer."""

    schema: Schema | None = None
    """The JSON schema of the answer."""
    calls: Literal["auto", "none", "required"] = "auto"
    """`required`: the answer is at least one call of a tool. `none`: nothing in the answer is read
    as a call."""
    tool: str | None = None
    """The only tool that may be called."""
    parallel: bool = True
    """Whether the answer may have several calls."""
    strict: bool = False
    """`strict` of OpenAI's API: asks a remote model's server to enforce the schema. A policy always
    has to follow it."""


def grammar_of(
    form: AnswerForm | None,
    chat: ChatFormat,
    tools: Sequence[Mapping[str, Any]] | None,
    prompt: Sequence[Message] | Sequence[int] | str,
) -> str:
    """The grammar (see SamplingParams) of an answer of this form to this prompt. Empty if any text
    is allowed. Raises BadRequestError if this model's family has no notation for the form."""
    form = form or AnswerForm()
    tools = () if form.calls == "none" else tools or ()
    strict = _can_enforce(form, chat, tools)
    if form.schema is None and form.calls != "required" and not strict:
        return ""

    if chat.parser.name == HARMONY:
        raise BadRequestError(
            "this model writes its answers in channels, which can't be constrained to a form: "
            "ask for the form in the prompt"
        )

    rules = []
    ways = []
    if form.calls == "auto" and form.schema is None:
        ways.append("text")
        rules += _text_with_calls(form, chat, tools)
    elif form.calls != "required":
        ways.append(_json(cast("Schema", form.schema)))

    if form.calls == "required" or (tools and form.schema is not None):
        calls = _calls(form, chat, tools)
        if calls:
            ways.append("calls")
            rules += calls

    thought = _thought(chat, opening_after(chat, prompt), rules)
    return "\n".join([f"start: {thought}({' | '.join(ways)})", *rules])


def problem_of_calls(chat: ChatFormat) -> str | None:
    """Why this model's sampling can't be constrained to calls of tools. None if it can."""
    name = chat.parser.name
    if name == HARMONY or chat.call_notation is None:
        return f"the notation of this model's tool calls ({name}) can't be prescribed"
    if find_spec("llguidance") is None:
        return "the package llguidance is missing: pip install 'agentevo[constrained]'"
    return None


def _can_enforce(form: AnswerForm, chat: ChatFormat, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are strict tools and their schemas can be enforced."""
    if not any(map(is_strict, tools)):
        return False

    name = chat.parser.name
    problem = problem_of_calls(chat)
    if problem is None and _begin_of_call(chat) is None:
        problem = f"the notation of this model's tool calls ({name}) can't be prescribed"
    elif problem is None and form.schema is not None and form.calls == "auto" and name in BARE:
        problem = f"in the notation of this model ({name}) an answer in JSON could be a call"
    if problem is None:
        return True

    _note_once(f"`strict` of tools has no effect: {problem}")
    return False


@cache
def _note_once(line: str) -> None:
    to_stderr(line)


def _begin_of_call(chat: ChatFormat) -> re.Match[str] | None:
    """The match of a call's beginning in the text before its name, or None."""
    notation = chat.call_notation
    begins = chat.parser.begins
    return re.search(begins, notation.before_name) if notation is not None and begins else None


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether every call of the tool has to fit its schema."""
    return tool["function"].get("strict") is True


def opening_after(chat: ChatFormat, prompt: Sequence[Message] | Sequence[int] | str) -> str:
    """The part of a prompt (messages or ids) that is in the assistant's place. Empty for a plain
    text."""
    if isinstance(prompt, str):
        return ""
    if prompt and isinstance(prompt[0], int):
        return chat.opening_of(cast("Sequence[int]", prompt))
    return chat.opening_after(cast("Sequence[Message]", prompt))


def _json(schema: Schema) -> str:
    plain = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    try:
        return "%json " + json.dumps({**plain, "x-guidance": _WRITTEN}, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise BadRequestError(f"the schema can't be written as JSON: {error}") from error


def _calls(form: AnswerForm, chat: ChatFormat, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rule `calls` and the rules that it needs. Empty if calls are optional and the family's
    notation is unknown."""
    functions = [tool["function"] for tool in tools]
    allowed = [f for f in functions if form.tool is None or f["name"] == form.tool]
    if not allowed:
        missing = "there are no tools" if form.tool is None else f"no tool is called {form.tool!r}"
        raise BadRequestError(f"a call is required, and {missing}: give it among `tools`")

    notation = chat.call_notation
    if notation is None:
        if form.calls == "auto":
            return []
        raise BadRequestError(
            f"the notation of this model's tool calls ({chat.parser.name}) can't be prescribed: "
            'use tool_choice "auto"'
        )

    more_calls = ""
    if form.parallel and form.tool is None and notation.between is not None:
        more_calls = f" ({_text(notation.between, chat)} call)*"

    return [
        f"calls: {_text(notation.before_name, chat)} call{more_calls} "
        f"{_text(notation.after, chat)}",
        *_each_call([(function, True) for function in allowed], notation, chat),
    ]


def _text_with_calls(
    form: AnswerForm, chat: ChatFormat, tools: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The rule `text` and the rules that it needs: texts in which nothing begins like a call, and
    calls."""
    notation = chat.call_notation
    begins = chat.parser.begins
    call_begin = _begin_of_call(chat)
    assert notation is not None and begins and call_begin is not None, "see _enforced"

    other_tokens = sorted(
        token
        for text, token in chat.added_tokens.items()
        if token not in chat.end_ids and not re.search(begins, text)
    )
    through, rules = _through(
        notation.before_name[call_begin.start() :], chat, "begun", text="PLAIN"
    )

    calls = " call"
    if form.parallel and notation.between is not None:
        calls = f" call ({_text(notation.between, chat)} call)*"

    lead = f"(PLAIN <[{','.join(map(str, other_tokens))}]>)*" if other_tokens else ""
    segment = f"{lead} {through}{calls} {_text(notation.after, chat)}"
    return [
        f"text: ({segment}){'*' if form.parallel else '?'} {lead} PLAIN",
        f"PLAIN: /(?s:.*)/ & ~/(?s:.*)({begins.replace('/', chr(92) + '/')})(?s:.*)/",
        *rules,
        *_each_call([(tool["function"], is_strict(tool)) for tool in tools], notation, chat),
    ]


def _through(mark: str, chat: ChatFormat, name: str, *, text: str) -> tuple[str, list[str]]:
    """Terms for any `text` (a terminal) up to and including the first mark, and the rule `name`
    that they need."""
    token = next((t for t in chat.added_tokens if mark.startswith(t)), None)
    first = min(
        (place for t in chat.added_tokens if (place := mark.find(t)) > 0), default=len(mark)
    )
    plain = mark[:first] if token is None else token
    rest = _text(mark[len(plain) :], chat)
    rules = [f"{name}[lazy]: {text} {json.dumps(plain, ensure_ascii=False)}"]
    if token is None:
        return f"{name} {rest}", rules

    return f"({name} | {text} <[{chat.added_tokens[token]}]>) {rest}", rules


def _each_call(
    functions: Sequence[tuple[Mapping[str, Any], bool]], notation: CallNotation, chat: ChatFormat
) -> list[str]:
    """The rule `call` and one rule for each function. The arguments follow its schema; without
    `by_schema` they are any object."""
    each = [f"call_{number}" for number in range(len(functions))]
    return [
        f"call: {' | '.join(each)}",
        *(
            f"{rule}: {_one_call(function, notation, chat, by_schema=by_schema)}"
            for rule, (function, by_schema) in zip(each, functions, strict=True)
        ),
    ]


def _one_call(
    function: Mapping[str, Any], notation: CallNotation, chat: ChatFormat, *, by_schema: bool
) -> str:
    schema = function.get("parameters") if by_schema else None
    name = json.dumps(str(function["name"]), ensure_ascii=False)
    arguments = _json(_close(schema) if isinstance(schema, Mapping) and schema else ANY_OBJECT)
    return f"{name} {_text(notation.before_arguments, chat)} {arguments}"


def _close(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without parameters that it does not name, unless it says that there may be some:
    most tools leave `additionalProperties` out, and mean false."""
    is_open = "additionalProperties" in schema or "patternProperties" in schema
    if is_open or "properties" not in schema or {"$ref", "allOf", "anyOf", "oneOf"} & set(schema):
        return schema
    return {**schema, "additionalProperties": False}


def _thought(chat: ChatFormat, opening: str, rules: list[str]) -> str:
    """The optional or required thought before the answer. Adds the rule that it needs."""
    mark = next((m for m in chat.parser.thoughts if opening.rstrip().endswith(m)), None)
    begin = ""
    if mark is None:
        template = str(chat.tokenizer.get_chat_template())
        mark = next((m for m in chat.parser.thoughts if m in template), None)
        if mark is None or opening:
            return ""
        begin = _text(mark, chat)

    thought, below = _through(THOUGHTS[mark], chat, "thought", text="/(?s:.*)/")
    rules += below
    return f"({begin} {thought} {_SPACE})? " if begin else f"{thought} {_SPACE} "


def _text(text: str, chat: ChatFormat) -> str:
    """A text as terminals of a grammar. A part that is a special token may also be that token."""
    terminals = []
    while text:
        matches = [
            (place, -len(token), token, number)
            for token, number in chat.added_tokens.items()
            if (place := text.find(token)) >= 0
        ]
        if not matches:
            terminals.append(json.dumps(text, ensure_ascii=False))
            break

        place, _, token, number = min(matches)
        if place:
            terminals.append(json.dumps(text[:place], ensure_ascii=False))

        terminals.append(f"({json.dumps(token, ensure_ascii=False)} | <[{number}]>)")
        text = text[place + len(token) :]

    return " ".join(terminals) or '""'
