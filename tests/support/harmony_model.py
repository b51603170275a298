"""A GPT-OSS of few weights that writes Harmony: it has learned by heart to think, to call a tool,
and to answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from harmony_template import HARMONY, MARKS
from transformers import GptOssConfig, GptOssForCausalLM

import agentevo
from agentevo.models.tiny_tokenizer import byte_tokenizer

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASK = {"role": "user", "content": "Left?"}
THOUGHT = "I look."
ARGUMENTS = {"at": "left"}
SAW = "a wall"
SAYS = "A wall."


def make_base(folder: Path) -> Path:
    """The model with random weights."""
    tokenizer = byte_tokenizer(1024)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(MARKS), "eos_token": "<|return|>"}
    )
    tokenizer.chat_template = HARMONY
    shape = GptOssConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=64,
        max_position_embeddings=1024,
        initializer_range=0.125,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    GptOssForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def taught(folder: Path, epochs: int = 120) -> Any:
    """The finished run of learning the conversation."""
    call = {"type": "function", "function": {"name": "look", "arguments": ARGUMENTS}, "id": "c"}
    calls = {"role": "assistant", "content": "", "thinking": THOUGHT, "tool_calls": [call]}
    result = {"role": "tool", "content": SAW, "tool_call_id": "c"}
    messages = [ASK, calls, result, {"role": "assistant", "content": SAYS}]
    rows = folder / "rows.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    rows.write_text(json.dumps({"messages": messages, "tools": [TOOL]}) + "\n")
    return agentevo.sft(
        {
            "data": {"train": str(rows), "eval_share": 0.0},
            "sft": {"epochs": epochs, "batch_conversations": 1, "learning_rate": 5e-3},
            "evaluation": {"every": 1000},
            "tracking": {"report": False, "tensorboard": False},
            "run": {"dir": str(folder / "sft"), "threads": 1},
        },
        model={"name": str(make_base(folder / "base"))},
    )
