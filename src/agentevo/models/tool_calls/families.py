"""Which parser reads what a model writes: by the notation that its chat template shows."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from agentevo.errors import UnknownNameError
from agentevo.models.tool_calls.harmony import read_harmony
from agentevo.models.tool_calls.json_objects import read_blocks, read_json
from agentevo.models.tool_calls.llama import read_llama, read_pythonic
from agentevo.models.tool_calls.named_json import (
    CALL_BEGIN,
    KIMI_BEGIN,
    TOOL_CALLS,
    read_deepseek,
    read_kimi,
    read_mistral,
)
from agentevo.models.tool_calls.parser import HARMONY, THOUGHTS, Read, ToolCallParser
from agentevo.models.tool_calls.tags import DSML, XML, read_glm, read_qwen_coder
from agentevo.registry import nearest

_READERS: dict[str, Read] = {
    HARMONY: read_harmony,
    "kimi": read_kimi,
    "dsml": DSML.read,
    "deepseek": read_deepseek,
    "mistral": read_mistral,
    "glm": read_glm,
    "qwen_coder": read_qwen_coder,
    "hermes": partial(read_blocks, "<tool_call>", "</tool_call>"),
    "phi": partial(read_blocks, "<|tool_call|>", "<|/tool_call|>"),
    "nemotron": partial(read_blocks, "<TOOLCALL>", "</TOOLCALL>"),
    "xml": XML.read,
    "pythonic": read_pythonic,
    "llama": read_llama,
    "json": read_json,
}
_SHOWN_BY = (
    (HARMONY, r"<\|channel\|>"),
    ("kimi", r"<\|tool_call_argument_begin\|>"),
    ("dsml", r"｜DSML｜"),
    ("deepseek", r"<｜tool▁calls▁begin｜>|<｜tool▁sep｜>"),
    ("mistral", r"\[TOOL_CALLS\]"),
    ("glm", r"<arg_key>"),
    ("qwen_coder", r"<function="),
    ("hermes", r"<tool_call>"),
    ("phi", r"<\|/tool_call\|>"),
    ("nemotron", r"<TOOLCALL>"),
    ("xml", r"<invoke\b"),
    ("pythonic", r"<\|tool_call_start\|>|\[func\w*\("),
    ("llama", r"<\|python_(?:tag|start)\|>|<\|start_header_id\|>|<\|header_start\|>"),
)
"""Parsers by what their templates say, the first that is found. Others are read as `json`."""
_OBJECT = r'\{[ \t\n\r]*"(?:(?:name|arguments|parameters|type|id)"|[napti][a-z]*\\)'
"""A key may have escapes in place of letters."""
_MARKED = r"<\|(?:python_tag|python_start|tool_call_start)\|>"
_EXPRESSION = r"\[[^!-\-/:-@\[-\^`{-~]*\("
"""Words, dots and white space between the brackets. These three are written so that a grammar of
texts without them stays cheap: `\\w` would not, nor one alternative for each mark."""
_BEGINS = {
    "kimi": re.escape(KIMI_BEGIN),
    "deepseek": re.escape(CALL_BEGIN),
    "mistral": re.escape(TOOL_CALLS),
    "hermes": "<tool_call>",
    "phi": re.escape("<|tool_call|>"),
    "nemotron": "<TOOLCALL>",
    "llama": "|".join([_MARKED, _OBJECT, _EXPRESSION]),
    "json": _OBJECT,
}
"""See ToolCallParser.begins; of the families whose calls can be prescribed."""
_PARSERS = {
    name: ToolCallParser(name, read, begins=_BEGINS.get(name, ""))
    for name, read in _READERS.items()
}


def parser_names() -> list[str]:
    return sorted(_PARSERS)


def parser_named(name: str) -> ToolCallParser:
    """The parser of that name, which knows every mark of a thought."""
    if name not in _PARSERS:
        guess = nearest(name, parser_names())
        hint = f"did you mean {guess!r}? " if guess else ""
        raise UnknownNameError(
            f"no tool call parser is called {name!r}: {hint}known parsers: "
            f"{', '.join(parser_names())}"
        )

    return replace(_PARSERS[name], thoughts=tuple(THOUGHTS))


def find_parser(chat_template: str) -> ToolCallParser:
    """The parser for models with this chat template."""
    name = next((name for name, shown in _SHOWN_BY if re.search(shown, chat_template)), "json")
    others = tuple(mark for mark in THOUGHTS if mark != "<think>" and mark in chat_template)
    return replace(_PARSERS[name], thoughts=("<think>", *others))
