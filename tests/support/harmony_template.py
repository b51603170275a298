"""A chat template with the properties of GPT-OSS's: channels that the prompt leaves to the model,
an answer that ends otherwise as the last message than in a history, calls with an end of their
own."""

from __future__ import annotations

MARKS = (
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
HARMONY = (
    "{{- '<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>' -}}"
    "{%- if tools -%}{{- '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' -}}"
    "{%- endif -%}"
    "{%- set seen = namespace(tool=none) -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}"
    "{%- if '<|channel|>' in (m.content or '') -%}"
    "{{- raise_exception('give the thought as thinking') -}}{%- endif -%}"
    "{%- if m.tool_calls -%}{%- set f = m.tool_calls[0].function -%}{%- set seen.tool = f.name -%}"
    "{%- if m.thinking -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking "
    "+ '<|end|>' -}}{%- endif -%}"
    "{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' "
    "+ (f.arguments | tojson) + '<|call|>' -}}"
    "{%- elif loop.last and not add_generation_prompt -%}"
    "{%- if m.thinking -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking "
    "+ '<|end|>' -}}{%- endif -%}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' -}}"
    "{%- else -%}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}"
    "{%- set seen.tool = none -%}{%- endif -%}"
    "{%- elif m.role == 'tool' -%}"
    "{%- if seen.tool is none -%}{{- raise_exception('no call before') -}}{%- endif -%}"
    "{{- '<|start|>functions.' + seen.tool + ' to=assistant<|channel|>commentary<|message|>' "
    "+ (m.content | tojson) + '<|end|>' -}}"
    "{%- elif m.role == 'system' -%}{{- '<|start|>developer<|message|># Instructions\n\n' "
    "+ m.content + '<|end|>' -}}"
    "{%- else -%}{{- '<|start|>user<|message|>' + m.content + '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"
)
