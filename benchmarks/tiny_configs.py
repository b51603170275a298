"""Tiny configurations of transformers' architectures: the same shape for all, under the names that
each config class has for it.

`tiny_config(model_type)` fills in SHAPE where the class has a field of that name, in its parts too
(text_config, vision_config ...), and what OVERRIDES says for single architectures. Layers alternate
between windowed and full attention where a class has both, and the window is shorter than the
sequences that are compared.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

WINDOW = 24
VOCABULARY = 97
SHAPE: dict[str, Any] = {
    # text
    "vocab_size": VOCABULARY,
    "decoder_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_seq_len": 256,
    "context_length": 256,
    "max_target_positions": 256,
    # width
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "emb_dim": 32,
    "dim_model_base": 32,
    "embedding_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "dense_intermediate_size": 48,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "ffn_hidden_size": 48,
    "dim_ff": 48,
    "dff": 48,
    "d_inner": 48,
    "n_inner": 48,
    "feed_forward_size": 48,
    # depth
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_layers": 2,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "multi_query_group_num": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "head_dim": 8,
    "swa_head_dim": 8,
    "global_head_dim": 8,
    "dim_head": 8,
    "d_head": 8,
    "d_kv": 8,
    "kv_channels": 8,
    "attention_head_size": 8,
    "attention_head_dim": 8,
    "query_pre_attn_scalar": 8,
    "rotary_dim": 4,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "local_attention": WINDOW,
    "window_size": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 12,
    "index_head_dim": 8,
    "index_n_heads": 32,
    "index_topk": 16,
    # experts
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "zero_expert_num": 1,
    # recurrences
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
    "mamba_headdim": 16,
    "state_size": 8,
    "ssm_state_size": 8,
    "lru_width": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "time_step_rank": 4,
    # images and sounds
    "image_size": 28,
    "patch_size": 14,
    "num_channels": 3,
    "depth": 1,
    "image_token_id": 3,
    "image_token_index": 3,
    "video_token_id": 4,
    "audio_token_id": 5,
    "initializer_range": 0.25,
    "init_std": 0.25,
}
QWEN2_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "initializer_range",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "pad_token_id",
)
ALTERNATING = ["sliding_attention", "full_attention"]
LATENT = {"num_key_value_heads": 4}
RECURRENT = {"layer_types": ["linear_attention", "full_attention"]}
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "hy_v4": LATENT,
    "qwen3_next": RECURRENT,
    "qwen3_5_text": RECURRENT,
    "qwen3_5_moe_text": RECURRENT,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "qwen4_exp_text": RECURRENT
    | {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "nemotron_h": {"n_groups": 2, "layers_block_type": ["mamba", "attention"]},
    "longcat_flash": LATENT,
    "minicpm3": LATENT,
    "youtu": LATENT,
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "cohere_compass_text": {
        "head_dim": 64,
        "layer_types": ALTERNATING,
        "rope_parameters": {
            kind: {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [12, 12, 8],
            }
            for kind in ALTERNATING
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "got_ocr2": {
        "text_config": {
            "model_type": "qwen2",
            **{name: SHAPE[name] for name in SHAPE if name in QWEN2_FIELDS},
        }
    },
    "dots1": {"n_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "kimi_linear": RECURRENT | LATENT,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gemma3n_text": {"layer_types": ALTERNATING, "num_kv_shared_layers": 0},
    "gemma4_text": {"layer_types": ALTERNATING},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"head_dim": 16, "n_groups": 2},
    "minimax_m3_vl_text": {
        "index_n_heads": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 16],
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["mamba", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


BORDER = 128
"""Where the frequencies of `longrope` change; no sequence that is compared is longer."""
SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": BORDER}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", **SCALED},
    "dynamic": {"rope_type": "dynamic", **SCALED},
    "yarn": {"rope_type": "yarn", **SCALED},
    "llama3": {
        "rope_type": "llama3",
        **SCALED,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "rope_type": "longrope",
        **SCALED,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
    "proportional": {"rope_type": "proportional", **SCALED, "partial_rotary_factor": 0.5},
}
"""Every type of RoPE that transformers has."""
ENCODERS = (
    "bert",
    "bert-generation",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}, is_decoder": (name, {"is_decoder": True}) for name in ENCODERS},
    **{f"llama, RoPE {kind}": ("llama", {"rope_parameters": ROPES[kind]}) for kind in ROPES},
    **{
        f"gemma3_text, RoPE {kind} and default": (
            "gemma3_text",
            {
                "layer_types": ALTERNATING,
                "rope_parameters": {
                    "sliding_attention": ROPES["default"],
                    "full_attention": ROPES[kind],
                },
            },
        )
        for kind in ("linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
    },
    "phi3, RoPE longrope": (
        "phi3",
        {"rope_parameters": ROPES["longrope"], "original_max_position_embeddings": BORDER},
    ),
    "phimoe, RoPE longrope": (
        "phimoe",
        {
            "rope_parameters": {**ROPES["longrope"], "short_mscale": 1.1, "long_mscale": 1.2},
        },
    ),
    "ministral3, scaled by position": (
        "ministral3",
        {
            "rope_parameters": {
                **ROPES["yarn"],
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama4_text, scaled by position": (
        "llama4_text",
        {"no_rope_layers": [1, 0], "floor_scale": 16, "attn_temperature_tuning": True},
    ),
    **{
        f"{name}, with windows": (
            name,
            {"use_sliding_window": True, "layer_types": ALTERNATING, "max_window_layers": 2},
        )
        for name in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
    },
    "gemma3n_text, shared keys": (
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ALTERNATING * 2,
            "num_kv_shared_layers": 2,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gemma4_text, shared keys": (
        "gemma4_text",
        {"num_hidden_layers": 4, "layer_types": ALTERNATING * 2, "num_kv_shared_layers": 2},
    ),
}
"""What one architecture can be set to: name -> model type, and what differs."""


def tiny_config(name: str) -> PretrainedConfig:
    """Of a model type or a variant. Raises whatever the config class raises where it has no such
    shape."""
    model_type, changes = VARIANTS.get(name, (name, {}))
    kind = CONFIG_MAPPING[model_type]
    return kind(**(_arguments(kind, model_type) | changes))


def _arguments(kind: type[PretrainedConfig], model_type: str) -> dict[str, Any]:
    fields = set(inspect.signature(kind.__init__).parameters) | set(
        getattr(kind, "__annotations__", {})
    )
    arguments = {name: value for name, value in SHAPE.items() if name in fields}
    parts = {name: part for name, part in kind.sub_configs.items() if name in fields}
    for name, part in parts.items():
        if hasattr(part, "model_type"):
            arguments[name] = _arguments(part, part.model_type)

    return arguments | OVERRIDES.get(model_type, {})
