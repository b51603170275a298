"""Chooses a model's output parser by the notation in its chat template."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from agentevo.errors import UnknownNameError
from agentevo.models.tool_calls.elements import SEPARATOR, read_elements
from agentevo.models.tool_calls.gemma import FUNCTION_GEMMA_CALLS, GEMMA_CALLS
from agentevo.models.tool_calls.harmony import read_harmony
from agentevo.models.tool_calls.json_notation import read_blocks, read_json
from agentevo.models.tool_calls.llama import read_llama, read_pythonic
from agentevo.models.tool_calls.named_json import DEEPSEEK, KIMI, MISTRAL
from agentevo.models.tool_calls.parser import HARMONY, THOUGHTS, ToolCallParser
from agentevo.models.tool_calls.tags import DSML, GLM_CALLS, QWEN_CODER, XML
from agentevo.runtime.registry import nearest

GEMMA = "gemma"
GLM = "glm"
_OBJECT = r'\{[ \t\n\r]*"(?:(?:name|arguments|parameters|type|id)"|[napti][a-z]*\\)'
"""A key may have escapes instead of letters."""
_MARKED = r"<\|(?:python_tag|python_start|tool_call_start)\|>"
_EXPRESSION = r"\[[^!-\-/:-@\[-\^`{-~]*\("
"""Words, dots and white space between the brackets. These three patterns keep a grammar of texts
without them cheap. `\\w`, or one alternative for each mark, would not."""
_PARSERS = (
    ToolCallParser(HARMONY, read_harmony, shown_by=r"<\|channel\|>"),
    ToolCallParser(
        "kimi",
        KIMI.read,
        shown_by=r"<\|tool_call_argument_begin\|>",
        begins=re.escape(KIMI.begin),
    ),
    ToolCallParser("minimax_m3", read_elements, shown_by=re.escape(SEPARATOR)),
    ToolCallParser("dsml", DSML.read, shown_by="｜DSML｜"),
    ToolCallParser(
        "deepseek",
        DEEPSEEK.read,
        shown_by="<｜tool▁calls▁begin｜>|<｜tool▁sep｜>",
        begins=re.escape(DEEPSEEK.begin),
    ),
    ToolCallParser(
        "mistral", MISTRAL.read, shown_by=r"\[TOOL_CALLS\]", begins=re.escape(MISTRAL.begin)
    ),
    ToolCallParser(GEMMA, GEMMA_CALLS.read, shown_by=r"<\|tool_call>"),
    ToolCallParser("function_gemma", FUNCTION_GEMMA_CALLS.read, shown_by="<start_function_call>"),
    ToolCallParser(GLM, GLM_CALLS.read, shown_by="<arg_key>"),
    ToolCallParser("qwen_coder", QWEN_CODER.read, shown_by="<function="),
    ToolCallParser(
        "hermes",
        partial(read_blocks, "<tool_call>", "</tool_call>"),
        shown_by="<tool_call>",
        begins="<tool_call>",
    ),
    ToolCallParser(
        "phi",
        partial(read_blocks, "<|tool_call|>", "<|/tool_call|>"),
        shown_by=r"<\|/tool_call\|>",
        begins=re.escape("<|tool_call|>"),
    ),
    ToolCallParser(
        "nemotron",
        partial(read_blocks, "<TOOLCALL>", "</TOOLCALL>"),
        shown_by="<TOOLCALL>",
        begins="<TOOLCALL>",
    ),
    ToolCallParser("xml", XML.read, shown_by=r"<invoke\b"),
    ToolCallParser("pythonic", read_pythonic, shown_by=r"<\|tool_call_start\|>|\[func\w*\("),
    ToolCallParser(
        "llama",
        read_llama,
        shown_by=r"<\|python_(?:tag|start)\|>|<\|start_header_id\|>|<\|header_start\|>",
        begins="|".join([_MARKED, _OBJECT, _EXPRESSION]),
    ),
    ToolCallParser("json", read_json, shown_by="", begins=_OBJECT),
)
"""The first parser whose notation is in the template is chosen. `json` reads the calls of all other
templates."""


def parser_names() -> list[str]:
    return sorted(parser.name for parser in _PARSERS)


def parser_named(name: str) -> ToolCallParser:
    """The parser of that name, which recognises the thoughts of all families."""
    parser = next((parser for parser in _PARSERS if parser.name == name), None)
    if parser is None:
        guess = nearest(name, parser_names())
        hint = f"did you mean {guess!r}? " if guess else ""
        raise UnknownNameError(
            f"no tool call parser is called {name!r}: {hint}known parsers: "
            f"{', '.join(parser_names())}"
        )

    return replace(parser, thoughts=tuple(THOUGHTS))


def find_parser(chat_template: str) -> ToolCallParser:
    """The parser for models with this chat template."""
    parser = next(p for p in _PARSERS if re.search(p.shown_by, chat_template))
    extra_thoughts = tuple(mark for mark in THOUGHTS if mark != "<think>" and mark in chat_template)
    return replace(parser, thoughts=("<think>", *extra_thoughts))
