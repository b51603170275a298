"""Chat templates that write tool calls and thoughts as those of well-known families do, each as
short as it can be. Every message is `<|im_start|>role\\n...<|im_end|>\\n`."""

from __future__ import annotations

_THOUGHT = (
    "{%- if m.reasoning_content -%}{{- BEGIN + m.reasoning_content + END -}}{%- endif -%}"
    "{{- m.content or '' -}}"
)
_THINK = _THOUGHT.replace("BEGIN", "'<think>\n'").replace("END", "'\n</think>\n\n'")
_EACH = "{%- for c in m.tool_calls or [] -%}{%- set f = c.function -%}"
_ITEMS = "{%- for k, v in f.arguments.items() -%}"
_RAW = "{{- v if v is string else v | tojson -}}"
_END = "{%- endfor -%}"


def _template(assistant: str, prompt: str = "") -> str:
    return (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
        "{%- if m.role == 'assistant' -%}" + assistant + "{%- else -%}{{- m.content -}}"
        "{%- endif -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n" + prompt + "' -}}"
        "{%- endif -%}"
    )


def _if_calls(calls: str) -> str:
    return "{%- if m.tool_calls -%}" + calls + "{%- endif -%}"


TEMPLATES = {
    "hermes": _template(
        _THINK + _EACH + "{{- '\n<tool_call>\n{\"name\": \"' + f.name + '\", \"arguments\": ' + "
        "f.arguments | tojson + '}\n</tool_call>' -}}" + _END
    ),
    "qwen_coder": _template(
        _THINK + _EACH + "{{- '\n<tool_call>\n<function=' + f.name + '>\n' -}}" + _ITEMS
        + "{{- '<parameter=' + k + '>\n' -}}" + _RAW + "{{- '\n</parameter>\n' -}}" + _END
        + "{{- '</function>\n</tool_call>' -}}" + _END
    ),
    "glm": _template(
        _THOUGHT.replace("BEGIN", "'\n<think>'").replace("END", "'</think>\n'")
        + _EACH + "{{- '\n<tool_call>' + f.name + '\n' -}}" + _ITEMS
        + "{{- '<arg_key>' + k + '</arg_key>\n<arg_value>' -}}" + _RAW
        + "{{- '</arg_value>\n' -}}" + _END + "{{- '</tool_call>' -}}" + _END
    ),
    "llama": _template(
        _THINK + _EACH + "{%- if not loop.first -%}{{- '; ' -}}{%- endif -%}"
        "{{- '{\"name\": \"' + f.name + '\", \"parameters\": ' + f.arguments | tojson + '}' -}}"
        + _END + "{#- <|python_tag|> -#}"
    ),
    "pythonic": _template(
        _THINK + _if_calls(
            "{{- '<|tool_call_start|>[' -}}" + _EACH
            + "{%- if not loop.first -%}{{- ', ' -}}{%- endif -%}{{- f.name + '(' -}}" + _ITEMS
            + "{%- if not loop.first -%}{{- ', ' -}}{%- endif -%}{{- k + '=' + v | tojson -}}"
            + _END + "{{- ')' -}}" + _END + "{{- ']<|tool_call_end|>' -}}"
        )
    ),
    "mistral": _template(
        _THOUGHT.replace("BEGIN", "'[THINK]'").replace("END", "'[/THINK]'")
        + _if_calls(
            "{{- '[TOOL_CALLS] [' -}}" + _EACH
            + "{{- (f | tojson)[:-1] + ', \"id\": \"' + (c.id or '123456789') + '\"}' -}}"
            "{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}" + _END + "{{- ']' -}}"
        )
    ),
    "mistral with arguments": _template(
        _THOUGHT.replace("BEGIN", "'[THINK]'").replace("END", "'[/THINK]'")
        + _EACH + "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson -}}" + _END
    ),
    "deepseek": _template(
        _THINK + _if_calls(
            "{{- '<｜tool▁calls▁begin｜>' -}}" + _EACH
            + "{{- ('' if loop.first else '\n') + '<｜tool▁call▁begin｜>' + c.type "
            "+ '<｜tool▁sep｜>' + f.name + '\n```json\n' + f.arguments | tojson "
            "+ '\n```<｜tool▁call▁end｜>' -}}" + _END + "{{- '<｜tool▁calls▁end｜>' -}}"
        )
    ),
    "deepseek 3.1": _template(
        _THINK + _if_calls(
            "{{- '<｜tool▁calls▁begin｜>' -}}" + _EACH
            + "{{- '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments | tojson "
            "+ '<｜tool▁call▁end｜>' -}}" + _END + "{{- '<｜tool▁calls▁end｜>' -}}"
        )
    ),
    "kimi": _template(
        _THOUGHT.replace("BEGIN", "'<think>'").replace("END", "'</think>'")
        + _if_calls(
            "{{- '<|tool_calls_section_begin|>' -}}" + _EACH
            + "{{- '<|tool_call_begin|>functions.' + f.name + ':' + loop.index0 | string "
            "+ '<|tool_call_argument_begin|>' + f.arguments | tojson + '<|tool_call_end|>' -}}"
            + _END + "{{- '<|tool_calls_section_end|>' -}}"
        )
    ),
    "harmony": _template(
        "{%- if m.reasoning_content -%}{{- '<|channel|>analysis<|message|>' + m.reasoning_content "
        "+ '<|end|><|start|>assistant' -}}{%- endif -%}"
        "{%- if m.content -%}{{- '<|channel|>' + ('commentary' if m.tool_calls else 'final') "
        "+ '<|message|>' + m.content + '<|end|><|start|>assistant' -}}{%- endif -%}" + _EACH
        + "{{- ('' if loop.first else '<|call|><|start|>assistant') + ' to=functions.' + f.name "
        "+ '<|channel|>commentary json<|message|>' + f.arguments | tojson -}}" + _END
    ),
    "xml": _template(
        _THINK + _if_calls(
            "{{- '\n<minimax:tool_call>\n' -}}" + _EACH
            + "{{- '<invoke name=\"' + f.name + '\">\n' -}}" + _ITEMS
            + "{{- '<parameter name=\"' + k + '\">' -}}" + _RAW + "{{- '</parameter>\n' -}}" + _END
            + "{{- '</invoke>\n' -}}" + _END + "{{- '</minimax:tool_call>' -}}"
        )
    ),
    "gemma": _template(
        "{%- macro value(v) -%}{%- if v is string -%}{{- Q + v + Q -}}{%- elif v is mapping -%}"
        "{{- '{' -}}{%- for k, i in v.items() -%}{{- Q + k + Q + ':' + value(i) -}}"
        "{{- '' if loop.last else ',' -}}{%- endfor -%}{{- '}' -}}"
        "{%- elif v is iterable -%}{{- '[' -}}{%- for i in v -%}{{- value(i) -}}"
        "{{- '' if loop.last else ',' -}}{%- endfor -%}{{- ']' -}}"
        "{%- else -%}{{- v | tojson -}}{%- endif -%}{%- endmacro -%}".replace("Q", "'<|\"|>'")
        + _THOUGHT.replace("BEGIN", "'<|channel>thought\n'").replace("END", "'\n<channel|>'")
        + _EACH + "{{- '<|tool_call>call:' + f.name + '{' -}}" + _ITEMS
        + "{{- k + ':' + value(v) + ('' if loop.last else ',') -}}" + _END
        + "{{- '}<tool_call|>' -}}" + _END
    ),
    "dsml": _template(
        _THINK + _if_calls(
            "{{- '\n\n<｜DSML｜function_calls>\n' -}}" + _EACH
            + "{{- '<｜DSML｜invoke name=\"' + f.name + '\">\n' -}}" + _ITEMS
            + "{{- '<｜DSML｜parameter name=\"' + k + '\" string=\"' "
            "+ ('true' if v is string else 'false') + '\">' -}}" + _RAW
            + "{{- '</｜DSML｜parameter>\n' -}}" + _END + "{{- '</｜DSML｜invoke>\n' -}}" + _END
            + "{{- '</｜DSML｜function_calls>' -}}"
        )
    ),
    "json": _template(
        _THINK + _EACH + "{{- '\n' + {'name': f.name, 'arguments': f.arguments} | tojson -}}"
        + _END
    ),
}  # fmt: skip
"""By the name of the parser, and which of its forms."""
