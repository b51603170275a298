"""Models of today's architectures with random weights, in folders as `model.name` takes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from agentevo.config import TinyModel
from agentevo.models.tiny_tokenizer import tiny_tokenizer

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", _ROPE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_5": ("qwen3_5_text", _DELTA_NET),
    "qwen3_next": (
        "qwen3_next",
        _DELTA_NET | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention"],
            "n_groups": 2,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "chunk_size": 8,
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        _EXPERTS
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "index_head_dim": 8,
            "index_n_heads": 128,  # with fewer, some scores are exactly 0, and any is right
            "index_topk": 16,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4": (
        "llama4_text",
        _ROPE | {"num_local_experts": 2, "attention_chunk_size": 24, "intermediate_size_mlp": 48},
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
}
"""Name -> type of the model's configuration, and what it has besides the common shape."""


def write_model(name: str, folder: Path, corpus: Iterable[str], tokenizer: str = "word") -> str:
    """Writes the model and a tokenizer (TinyModel.tokenizer) with the words of the corpus. Returns
    the folder."""
    words = tiny_tokenizer(TinyModel(tokenizer=tokenizer, context_length=1024), corpus)
    words.save_pretrained(folder)
    model_type, differing = ARCHITECTURES[name]
    shape = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    config = CONFIG_MAPPING[model_type](**shape | differing)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    return str(folder)
