"""Requests under a grammar: a tiny policy over bytes, and what a grammar of JSON looks like. The
package that reads grammars is an extra: who imports this is skipped without it."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedModel

from agentevo.agents import Policy
from agentevo.config import ModelSection, TinyModel
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.inference.engine import Engine
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.compute.attention import prepare
from agentevo.models.files.load import LoadedModel, load_model
from agentevo.types import Completion, SamplingParams

pytest.importorskip("llguidance", reason="grammars need the extra `constrained`")

END = 5
"""The token that ends a message of the tiny policy."""


def json_grammar(**schema: Any) -> str:
    """Compact JSON by a schema."""
    return "start: %json " + json.dumps(
        {**schema, "x-guidance": {"whitespace_flexible": False}}, sort_keys=True
    )


FACT = json_grammar(
    type="object",
    properties={
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "s": {"enum": ["hot", "no"]},
    },
    required=["n", "s"],
    additionalProperties=False,
)
CALL = 'start: "<" ("left" | "right") ("," ("left" | "right"))* ">"'


@cache
def tiny_policy(tokenizer: str = "byte") -> LoadedModel:
    """One narrow layer; nobody may change its weights."""
    tiny = TinyModel(hidden_size=16, num_layers=1, num_heads=1, tokenizer=tokenizer)
    loaded = load_model(
        ModelSection(name="tiny", tiny=tiny), corpus=lambda: ["hot no left right"], seed=7
    )
    prepare(loaded.model)
    return loaded


def alone() -> PreTrainedModel:
    """The policy as transformers runs it by itself."""
    model = copy.deepcopy(tiny_policy().model)
    model.set_attn_implementation("sdpa")
    return model


def params(grammar: str, seed: int = 0, **other: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "max_new_tokens": 48,
            "stop_token_ids": (END,),
            "grammar": grammar,
            "seed": seed,
            **other,
        }
    )


def complete(
    engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]
) -> list[Completion]:
    """All at once."""

    async def together() -> list[Completion]:
        return list(
            await asyncio.gather(
                *(engine.generate(prompt, one, deadline_s=300) for prompt, one in requests)
            )
        )

    return asyncio.run(together())


TEMPLATE = (
    "{%- if tools -%}{{- '<|system|>' + (tools | tojson) + '<|end|>' -}}{%- endif -%}"
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' + (m.content or '') -}}"
    '{%- for c in m.tool_calls or [] -%}{{- \'<tool_call>\n{"name": "\' + c.function.name + \'", '
    "\"arguments\": ' + (c.function.arguments | tojson) + '}\n</tool_call>' -}}{%- endfor -%}"
    "{{- '<|end|>' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}"
    "{%- endif -%}"
)


@cache
def chat_format() -> ChatFormat:
    """With a place for tools and calls."""
    tokenizer = copy.deepcopy(tiny_policy().tokenizer)
    tokenizer.chat_template = TEMPLATE
    return ChatFormat(tokenizer)


def policy_of(opened, seed=5) -> Policy:
    """A policy of the real engine at temperature 1."""
    chat = chat_format()
    sampling = SamplingParams(max_new_tokens=200, stop_token_ids=chat.end_ids)
    engine = TorchEngine(tiny_policy().model, tiny_policy().tokenizer)
    conversation = Conversation(
        engine, chat, sampling, name="a", seed=seed, context_length=2048, timeout_s=300.0
    )
    return Policy(conversation, opened.gateway)
