"""Chat templates of families whose messages end or begin otherwise than ChatML's, each as short as
it can be, and tokenizers with their special tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from agentevo.models.chat.model_template import template_text
from agentevo.models.tiny_tokenizer import byte_tokenizer

_ITEMS = "{%- for k, v in c.function.arguments.items() -%}"
_RAW = "{{- v if v is string else v | tojson -}}"
_END = "{%- endfor -%}"
_CALLS = "{%- for c in m.tool_calls or [] -%}"

GLM = (
    "{{- '[gMASK]<sop>' -}}{%- if tools -%}{{- '<|system|>\n' + (tools | tojson) -}}{%- endif -%}"
    "{%- set ns = namespace(asked=-1) -%}{%- for m in messages if m.role == 'user' -%}"
    "{%- set ns.asked = messages.index(m) -%}{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}{{- '<|assistant|>\n<think>' -}}"
    "{{- m.reasoning_content if m.reasoning_content and loop.index0 > ns.asked else '' -}}"
    "{{- '</think>' -}}{%- if m.content -%}{{- '\n' + m.content -}}{%- endif -%}"
    + _CALLS + "{{- '\n<tool_call>' + c.function.name + '\n' -}}" + _ITEMS
    + "{{- '<arg_key>' + k + '</arg_key>\n<arg_value>' -}}" + _RAW + "{{- '</arg_value>\n' -}}"
    + _END + "{{- '</tool_call>' -}}" + _END
    + "{%- elif m.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|observation|>' -}}"
    "{%- endif -%}{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}"
    "{%- else -%}{{- '<|' + m.role + '|>\n' + m.content -}}{%- endif -%}" + _END
    + "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}"
    "{{- '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' -}}"
    "{%- endif -%}"
)  # fmt: skip
"""GLM 4.5: nothing ends a message but the role of the next one, and each answer has a thought."""

NEMOTRON = (
    "{%- if tools -%}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' -}}"
    "{%- endif -%}{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}{{- '<|im_start|>assistant\n<think>' -}}"
    "{%- if m.reasoning_content and loop.last -%}{{- '\n' + m.reasoning_content + '\n' -}}"
    "{%- endif -%}{{- '</think>' + (m.content or '') -}}"
    + _CALLS + "{{- '<tool_call>\n<function=' + c.function.name + '>\n' -}}" + _ITEMS
    + "{{- '<parameter=' + k + '>\n' -}}" + _RAW + "{{- '\n</parameter>\n' -}}" + _END
    + "{{- '</function>\n</tool_call>\n' -}}" + _END + "{{- '<|im_end|>\n' -}}"
    "{%- elif m.role == 'tool' -%}{{- '<|im_start|>user\n<tool_response>\n' + m.content "
    "+ '\n</tool_response>\n<|im_end|>\n' -}}"
    "{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}"
    + _END + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{{- '<think></think>' if enable_thinking is defined and not enable_thinking "
    "else '<think>\n' -}}{%- endif -%}"
)  # fmt: skip
"""Nemotron 3: the generation prompt opens a thought, which the history leaves empty."""

GEMMA = (
    "{{- bos_token -}}{%- set ns = namespace(last='') -%}"
    "{%- if tools -%}{{- '<|turn>system\n<|tool>' + (tools | tojson) + '<tool|><turn|>\n' -}}"
    "{%- endif -%}{%- for m in messages -%}{%- if m.role != 'tool' -%}"
    "{%- if m.role != 'assistant' or ns.last != 'tool' -%}"
    "{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' -}}{%- endif -%}"
    "{%- if m.reasoning_content and loop.last -%}{{- '<|channel>thought\n' + m.reasoning_content "
    "+ '\n<channel|>' -}}{%- endif -%}{{- m.content or '' -}}"
    + _CALLS + "{{- '<|tool_call>call:' + c.function.name + '{' -}}" + _ITEMS
    + "{{- k + ':' + ('<|\"|>' + v + '<|\"|>' if v is string else v | tojson) -}}"
    "{{- '' if loop.last else ',' -}}" + _END + "{{- '}<tool_call|>' -}}" + _END
    + "{%- if not m.tool_calls -%}{{- '<turn|>\n' -}}{%- elif loop.last -%}"
    "{{- '<|tool_response>' -}}{%- endif -%}"
    "{%- else -%}{{- '<|tool_response>response:' + (m.name or 'unknown') + '{value:<|\"|>' "
    "+ m.content + '<|\"|>}<tool_response|>' -}}{%- endif -%}{%- set ns.last = m.role -%}" + _END
    + "{%- if add_generation_prompt and ns.last != 'tool' -%}{{- '<|turn>model\n' -}}{%- endif -%}"
)  # fmt: skip
"""Gemma 4: a call ends at the mark of its result, which is in the same turn of the model."""

GEMMA_THOUGHTS = GEMMA.removesuffix("{%- endif -%}") + (
    "{{- '<|channel>thought\n<channel|>' if not enable_thinking else '' -}}"
    "{%- elif add_generation_prompt and enable_thinking -%}{{- '<|channel>thought\n' -}}"
    "{%- endif -%}"
)
"""Its large models: the prompt has an empty thought, or opens one after the result of a tool."""

MINIMAX = (
    "{{- ']~!b[]~b]system\n' -}}"
    "{{- messages[0].content if messages[0].role == 'system' else 'You are helpful.' -}}"
    "{%- if tools -%}{{- '\n\n# Tools\n' + (tools | tojson) -}}{%- endif -%}{{- '[e~[\n' -}}"
    "{%- set ns = namespace(asked=-1) -%}{%- for m in messages if m.role == 'user' -%}"
    "{%- set ns.asked = messages.index(m) -%}{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}{{- ']~b]ai\n' -}}"
    "{%- if m.reasoning_content and loop.index0 > ns.asked -%}"
    "{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}{%- endif -%}"
    "{{- m.content or '' -}}"
    "{%- if m.tool_calls -%}{{- '\n<minimax:tool_call>\n' -}}" + _CALLS
    + "{{- '<invoke name=\"' + c.function.name + '\">\n' -}}" + _ITEMS
    + "{{- '<parameter name=\"' + k + '\">' -}}" + _RAW + "{{- '</parameter>\n' -}}" + _END
    + "{{- '</invoke>\n' -}}" + _END + "{{- '</minimax:tool_call>' -}}{%- endif -%}"
    "{{- '[e~[\n' -}}"
    "{%- elif m.role == 'tool' -%}"
    "{%- if messages[loop.index0 - 1].role != 'tool' -%}{{- ']~b]tool' -}}{%- endif -%}"
    "{{- '\n<response>' + m.content + '</response>' -}}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '[e~[\n' -}}"
    "{%- endif -%}"
    "{%- elif m.role == 'user' -%}{{- ']~b]user\n' + m.content + '[e~[\n' -}}{%- endif -%}"
    + _END + "{%- if add_generation_prompt -%}{{- ']~b]ai\n<think>\n' -}}{%- endif -%}"
)  # fmt: skip
"""MiniMax M2: the generation prompt opens a thought, which the history leaves out."""

DEEPSEEK_V32 = template_text("deepseek_v32")
DEEPSEEK_V4 = template_text("deepseek_v4")
"""Those that AgentEvo ships, because the checkpoints have none."""

_DSML = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
         "<think>", "</think>", "｜DSML｜")  # fmt: skip
_MARKS = {
    MINIMAX: ("]~!b[", "]~b]", "[e~[", "<think>", "</think>", "<minimax:tool_call>",
              "</minimax:tool_call>"),
    DEEPSEEK_V32: _DSML,
    DEEPSEEK_V4: _DSML,
    GLM: ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
          "<|endoftext|>"),
    NEMOTRON: ("<|im_start|>", "<|im_end|>"),
    GEMMA: ("<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
            "<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>", "<channel|>"),
}  # fmt: skip
_MARKS[GEMMA_THOUGHTS] = _MARKS[GEMMA]
_BOS = {GEMMA: "<bos>", GEMMA_THOUGHTS: "<bos>"} | dict.fromkeys(
    (DEEPSEEK_V32, DEEPSEEK_V4), "<｜begin▁of▁sentence｜>"
)
_EOS = {
    GLM: "<|endoftext|>",
    NEMOTRON: "<|im_end|>",
    GEMMA: "<turn|>",
    GEMMA_THOUGHTS: "<turn|>",
    MINIMAX: "[e~[",
    DEEPSEEK_V32: "<｜end▁of▁sentence｜>",
    DEEPSEEK_V4: "<｜end▁of▁sentence｜>",
}


def family_tokenizer(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(512)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(_MARKS[template]), "eos_token": _EOS[template]}
    )
    if template in _BOS:
        tokenizer.bos_token = _BOS[template]
    tokenizer.chat_template = template
    return tokenizer
