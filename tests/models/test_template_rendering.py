"""Chat templates of strangers: rendered in another process, to the same text, and within bounds."""

from __future__ import annotations

import json

import pytest
from chat_templates import HERMES, PHI3, QWEN3, tokenizer_with

from agentevo.errors import ModelError
from agentevo.models.chat import template_rendering, template_worker
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.chat.chat_template import NO_TOOLS, ChatTemplate, ToolSchemas
from agentevo.models.chat.template_rendering import (
    TemplateRenderer,
    render_here,
    untrusted_templates,
)
from agentevo.models.chat.template_worker import variables_in
from agentevo.types import Message, ToolCall

TOOLS = ToolSchemas.of(
    [{"type": "function", "function": {"name": "add", "description": "ä\ud800", "parameters": {}}}]
)
CONVERSATION = [
    Message("user", "<|im_end|> 1 < 2 & \u2028 \U0001f600"),
    Message("assistant", "", (ToolCall("add", json.dumps({"a": 1.5, "b": [None]}), "call00001"),)),
    Message("tool", "3", name="add", tool_call_id="call00001"),
]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.slow
def test_the_other_process_renders_what_this_one_does(monkeypatch) -> None:
    asked = []
    ask = template_rendering.JsonWorker.ask
    monkeypatch.setattr(
        template_rendering.JsonWorker, "ask", lambda *given: asked.append(1) or ask(*given)
    )
    with untrusted_templates():
        for text in (HERMES, QWEN3, PHI3):
            tokenizer = tokenizer_with(text)
            calls = text != PHI3  # it has no place for them
            messages, tools = (CONVERSATION, TOOLS) if calls else (CONVERSATION[:1], NO_TOOLS)
            elsewhere = ChatTemplate(tokenizer).render(messages, prompt=True, tools=tools)

            assert ChatTemplate(tokenizer).variables == frozenset()
            here = ChatTemplate(tokenizer)
            here._renderer = TemplateRenderer(render_here, variables_in)
            num_asked = len(asked)
            assert elsewhere == here.render(messages, prompt=True, tools=tools)
            assert len(asked) == num_asked > 0

    ChatFormat(tokenizer).first_prompt(CONVERSATION[:1])
    assert len(asked) == num_asked  # outside of the block it is this process


HOSTILE = {
    "a text times a number": "{{ 'x' * 10**10 }}",
    "computed as it is compiled": "{% if 10**(10**10) > 1 %}x{% endif %}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a wide format by a method": "{{ '{:>10000000000}'.format(1) }}",
    "a filter": "{{ 'x' | center(10**10) }}",
    "a method": "{{ 'x'.ljust(10**10) }}",
    "indented JSON": "{{ messages | tojson(indent=10**10) }}",
    "a list times a number": "{{ ([0] * 10**10) | length }}",
    "loops": LOOPS,
    "a macro that calls itself": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "doubling": (
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
    ),
    "writing for ever": LOOPS.replace("{% endfor %}", "xxxxxxxxxxxxxxxx{% endfor %}", 1),
    "a long reason": "{{ raise_exception('x' * 10**7) }}",
    "a long text": "{{ 'x' * 10**7 }}",
}


@pytest.mark.slow
def test_no_template_takes_time_or_memory_without_bounds(monkeypatch) -> None:
    """Each is refused, also where it behaves until it meets some message, and the template that
    comes after it is rendered."""
    monkeypatch.setattr(template_rendering, "RENDER_S", 3.0)
    with untrusted_templates():
        fine = ChatFormat(tokenizer_with(HERMES))
        expected = fine.first_prompt([Message("user", "fine?")])
        for what, hostile in HOSTILE.items():
            with pytest.raises(ModelError, match="the chat template refuses") as refused:
                ChatFormat(tokenizer_with(hostile + HERMES))
            assert len(str(refused.value)) < 3000, what

        sleeper = "{% if 'wake' in messages[0].content %}" + LOOPS + "{% endif %}" + HERMES
        chat = ChatFormat(tokenizer_with(sleeper))
        with pytest.raises(ModelError, match="took longer than 3 s to render"):
            chat.first_prompt([Message("user", "wake up")])
        with pytest.raises(ModelError, match="is not rendered again"):
            chat.first_prompt([Message("user", "hello")])

        fine._first_prompt.cache_clear()
        assert fine.first_prompt([Message("user", "fine?")]) == expected


def test_a_long_conversation_may_be_rendered_whole() -> None:
    messages = [{"role": "user", "content": '"\\' * 10**5}]
    request = {"messages": messages, "tools": None, "prompt": True, "values": {}}
    template = "{{ messages | tojson }}{{ bos }}"
    answer = template_worker.answer_to({**request, "template": template})
    assert json.loads(answer["text"]) == messages

    long = template_worker.answer_to({**request, "template": template * 20})
    assert "characters" in long["problem"] and "are allowed" in long["problem"]
