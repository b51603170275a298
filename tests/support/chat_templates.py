"""Chat templates that behave as those of well-known families do, each as short as it can be, on a
tokenizer of bytes that has their special tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from agentevo.models.tiny_tokenizer import byte_tokenizer

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|eom|>",
    "<|begin|>",
    "<|User|>",
    "<|Assistant|>",
    "<|endoftext|>",
]

_TOOLS = (
    "{%- if tools -%}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' -}}"
    "{%- endif -%}"
)
_ASSISTANT = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
_THINKS = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"
_CALLS = (
    "{%- for call in m.tool_calls or [] -%}"
    "{%- if content or not loop.first -%}{{- '\n' -}}{%- endif -%}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' -}}'
    "{{- (call.function.arguments if call.function.arguments is string"
    " else call.function.arguments | tojson) + '}\n</tool_call>' -}}{%- endfor -%}"
)
_RESULT = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}"
    "{%- endif -%}{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}"
    "{%- endif -%}"
)


def _chatml(assistant: str, prompt: str, result: str = _RESULT, before: str = _TOOLS) -> str:
    return (
        before + "{%- for m in messages -%}"
        "{%- if m.role == 'assistant' -%}" + assistant + "{%- elif m.role == 'tool' -%}" + result
        + "{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}"
        "{%- endif -%}{%- endfor -%}" + prompt
    )  # fmt: skip


HERMES = _chatml(
    "{%- set content = m.content or '' -%}{{- '<|im_start|>assistant\n' + content -}}"
    + _CALLS
    + "{{- '<|im_end|>\n' -}}",
    _ASSISTANT,
)
"""Qwen2.5: results of tools share one message of the user's role."""

QWEN3 = _chatml(
    "{%- set content = m.content or '' -%}{%- set thought = m.reasoning_content or '' -%}"
    "{%- if not thought and '</think>' in content -%}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
    "{{- '<|im_start|>assistant\n' -}}"
    "{%- if loop.index0 > ns.asked and (loop.last or thought) -%}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' -}}{%- endif -%}"
    "{{- content -}}" + _CALLS + "{{- '<|im_end|>\n' -}}",
    _ASSISTANT,
    before="{%- set ns = namespace(asked=-1) -%}{%- for m in messages if m.role == 'user' -%}"
    "{%- set ns.asked = messages.index(m) -%}{%- endfor -%}" + _TOOLS,
)
"""Thoughts of answers before the last question are stripped; the newest answer always has one."""

QWEN3_THINKING = QWEN3.replace(_ASSISTANT, _THINKS)
"""The same, and the generation prompt opens the thought."""

QWQ = _chatml(
    "{%- set content = (m.content or '').split('</think>')[-1].lstrip('\n') -%}"
    "{{- '<|im_start|>assistant\n' + content -}}" + _CALLS + "{{- '<|im_end|>\n' -}}",
    _THINKS,
)
"""The generation prompt opens the thought, and every thought is stripped, the newest too."""

R1 = (
    "{%- set ns = namespace(tool=false) -%}{{- '<|begin|>' -}}"
    "{%- for m in messages if m.role == 'system' -%}{{- m.content -}}{%- endfor -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.tool = false -%}"
    "{{- '<|User|>' + m.content -}}{%- elif m.role == 'tool' -%}{%- set ns.tool = true -%}"
    "{{- '<result>' + m.content + '</result>' -}}{%- elif m.role == 'assistant' -%}"
    "{%- if not ns.tool -%}{{- '<|Assistant|>' -}}{%- endif -%}{%- set ns.tool = false -%}"
    "{%- if m.content is none -%}{%- for call in m.tool_calls -%}"
    "{{- '<call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</call>' -}}"
    "{%- endfor -%}{%- else -%}{{- m.content.split('</think>')[-1] -}}{%- endif -%}"
    "{{- '<|im_end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt and not ns.tool -%}{{- '<|Assistant|><think>\n' -}}{%- endif -%}"
)
"""DeepSeek-R1's distils: no place for reasoning, calls only where content is None, no header after
the result of a tool."""

_R1_CALLS = (
    "{%- for call in m.tool_calls -%}{%- if not ns.called -%}"
    "{{- '<|Assistant|>' + (m.content or '') + '<calls>' -}}{%- set ns.called = true -%}"
    "{%- else -%}{{- '\n' -}}{%- endif -%}"
    "{{- '<call>' + call.type + '<sep>' + call.function.name + '\n' + call.function.arguments"
    " + '</call>' -}}{%- endfor -%}{{- '</calls><|im_end|>' -}}"
)
R1_TEXT = (
    R1.replace("namespace(tool=false)", "namespace(tool=false, called=false)")
    .replace(
        "{%- if not ns.tool -%}",
        "{%- if 'tool_calls' in m -%}" + _R1_CALLS + "{%- else -%}{%- if not ns.tool -%}",
    )
    .replace(
        "{{- '<|im_end|>' -}}{%- endif -%}{%- endfor",
        "{{- '<|im_end|>' -}}{%- endif -%}{%- endif -%}{%- endfor",
    )
)
"""DeepSeek-R1: arguments are put into the text as they are, which fails with a mapping; a second
message of calls has no header."""

R1_DISTIL = R1.replace("(call.function.arguments | tojson)", "call.function.arguments")
"""Its distils: arguments as a text, and calls only where content is None."""

PHI3 = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- else -%}{{- '<|endoftext|>' -}}{%- endif -%}"
)
"""The text is ended wherever the assistant is not asked to speak."""

STRICT = _chatml(
    "{{- '<|im_start|>assistant\n' + (m.content or '') -}}"
    + _CALLS.replace("content or", "m.content or")
    + "{{- ('<|eom|>' if m.tool_calls else '<|im_end|>') + '\n' -}}",
    _ASSISTANT,
    "{%- if messages[loop.index0 - 1].role != 'tool' "
    "and not messages[loop.index0 - 1].tool_calls -%}"
    "{{- raise_exception('a tool has nothing to answer') -}}{%- endif -%}"
    "{{- '<|im_start|>tool ' + (m.tool_call_id or '-') + '\n' + m.content + '<|im_end|>\n' -}}",
)
"""Results need a call before them, and a message of calls ends in a token of its own."""

NAMES_RESULTS = STRICT.replace(
    "(m.tool_call_id or '-')",
    "(messages[loop.index0 - 1].tool_calls or [{'function': {'name': '-'}}])[0].function.name",
)
"""A result is written under the name of the call before it."""

MOVES_TOOLS = (
    "{%- for m in messages -%}{%- if tools and loop.last and m.role == 'user' -%}"
    "{{- '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' -}}{%- endif -%}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}" + _ASSISTANT
)
"""Tools stand before the last question, wherever that is."""


SWITCHES = QWEN3.replace(
    "{%- set ns = namespace",
    "{%- if reasoning_effort is defined -%}{{- '<|im_start|>system\nEffort: ' + reasoning_effort"
    " + '<|im_end|>\n' -}}{%- endif -%}{%- set ns = namespace",
).replace(
    _ASSISTANT,
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\n\n</think>\n\n' -}}{%- elif opens -%}{{- '<think>\n' -}}{%- endif -%}"
    "{%- endif -%}",
)
"""Qwen3 with variables: `enable_thinking: false` writes an empty thought, `opens` opens one, and
the first message names the `reasoning_effort`."""

THINKS_AFTER_RESULTS = QWEN3.replace(
    _ASSISTANT,
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{{- '<think>\n' if messages[-1].role == 'tool' else '' -}}{%- endif -%}",
)
"""A thought is opened after the result of a tool only, as Gemma 4 does."""


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(512)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, "eos_token": "<|im_end|>"})
    tokenizer.chat_template = template
    return tokenizer
