"""Texts as models write them, in every notation of tool calls: whole ones, and pieces of them."""

from __future__ import annotations

from hypothesis import strategies as st

MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "phi": ["<|tool_call|>", "<|/tool_call|>"],
    "gemma": [
        "<|tool_call>", "call:f{", "a:", '<|"|>', "[", "]", "}<tool_call|>", "<|channel>thought",
        "<channel|>",
    ],
    "function_gemma": [
        "<start_function_call>", "call:f{", "a:", "<escape>", "[", "]", "}<end_function_call>",
    ],
    "nemotron": ["<TOOLCALL>", "</TOOLCALL>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"],
    "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json\n",
                 "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "function"],
    "kimi": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0",
             "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
            "</arg_value>"],
    "qwen_coder": ["<tool_call>", "<function=f>", "<parameter=a>", "</parameter>", "</function>",
                   "</tool_call>", "<function="],
    "xml": ["<function_calls>", '<invoke name="f">', '<parameter name="a">', "</parameter>",
            "</invoke>", "</function_calls>", "<invoke"],
    "dsml": ["<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>",
             '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>"],
    "minimax_m3": [
        "]<]minimax[>[", "<tool_call>", '<invoke name="f">', "<a>", "</a>", "<item>", "</item>",
        "</invoke>", "</tool_call>", "<mm:think>", "</mm:think>", "]<]minimax[>[<a>",
        "]<]minimax[>[</a>",
    ],
    "pythonic": ["[f(", "a=", ")", "g()", "<|tool_call_start|>", "<|tool_call_end|>", "'", '"""'],
    "llama": ["<|python_tag|>", ";", "[f(", "a=", ")", "<|python_start|>", "<|python_end|>"],
    "json": ["```json", "```", "["],
    "harmony": ["<|channel|>", "analysis", "final", "commentary", " to=functions.f", "<|message|>",
                "<|constrain|>json", "<|end|>", "<|start|>assistant", "<|call|>", "<|return|>"],
}  # fmt: skip
JSON = [
        '{"name": "f", "arguments": ', '{"name": "f"', '"parameters": ', '{"a": 1}', '{"a": "x\\n',
        '{"', "{", "}", "[", "]", ",", ", ", '"', "\\", "1", "-2.5e3", "true", '\\u00e9"', ":",
]  # fmt: skip
OTHERS = ["<think>", "</think>", "<", " ", "\n", "\n\n", "text", "ü", "<tool", "`", "(", "="]
WHOLE = {
    "hermes": '\n<tool_call>\n{"name": "f", "arguments": {"a": ["</tool_call>"]}}\n</tool_call>',
    "qwen_coder": "<tool_call>\n<function=f>\n<parameter=a>\n<b>\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{</arg_value>\n</tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]',
    "llama": '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
    "pythonic": "<|tool_call_start|>[f(a='x', b=[1, {'c': None}]), g()]<|tool_call_end|>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    '{"a": 1}<|call|>',
    "xml": '<function_calls>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
    "</function_calls>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<a>'
    "]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</a>]<]minimax[>[</invoke>\n"
    "]<]minimax[>[</tool_call>",
    "json": '```json\n[{"name": "f", "arguments": {"a": 1}}]\n```',
}


def texts(name: str) -> st.SearchStrategy[str]:
    """Texts made of the family's marks, of pieces of JSON, and of anything."""
    known = [*MARKS[name], *JSON, *OTHERS, *([WHOLE[name]] * 6 if name in WHOLE else [])]
    pieces = st.sampled_from(known) | st.text(max_size=3)
    return st.lists(pieces, max_size=14).map("".join)
