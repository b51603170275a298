"""A model that has learned a short conversation with a tool by heart: small enough for any server,
and sure enough of its words that two servers' rounding can't change them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from chat_templates import HERMES, tokenizer_with
from transformers import LlamaConfig, LlamaForCausalLM

import agentevo

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks there.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
ASK = {"role": "user", "content": "What is left of you?"}
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"at": "left"}'}}
RESULT = {"role": "tool", "content": "a wall"}
SAYS = "A wall is left of me."
CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Good day."}],
    [
        {"role": "system", "content": "Speak French."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Ça va, à bientôt."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "De rien."},
    ],
)
"""Conversations without tools."""


def write_rows(path: Path, *, polite: bool = True) -> Path:
    """What is to be learned, as conversations in a file. `polite=False`: other answers."""
    calls = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", **CALL}]}
    result = {**RESULT, "tool_call_id": "c"}
    says = {"role": "assistant", "content": SAYS if polite else "Nothing."}
    rows = [{"messages": [ASK, calls, result, says], "tools": [TOOL]}]
    rows += [{"messages": chat if polite else _rude(chat)} for chat in CHATS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _rude(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "content": "No."} if one["role"] == "assistant" else one for one in chat]


def make_base(folder: Path) -> Path:
    """A Llama of random weights that speaks ChatML, with tools as Hermes and Qwen write them."""
    tokenizer = tokenizer_with(HERMES)
    tokenizer.model_max_length = 1024
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.125,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    return folder


def taught(folder: Path, model: Path, rows: Path, **sections: Any) -> Any:
    """The finished run of learning the rows by heart."""
    return agentevo.sft(
        {
            "data": {"train": str(rows), "eval_share": 0.0},
            "sft": {"epochs": 200, "batch_conversations": 3, "learning_rate": 3e-3},
            "evaluation": {"every": 200},
            "tracking": {"report": False, "tensorboard": False},
            "run": {"dir": str(folder), "threads": 1},
        },
        model={"name": str(model), **sections},
    )
