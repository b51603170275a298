"""The options of vLLM in `engine.options` (`engine.type: vllm`), read before anything is started.

Options that AgentEvo needs itself have a type here. Every other option is passed to vLLM under
vLLM's name and is checked against vLLM's argument list (inference/vllm/arguments.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field

from agentevo.config import EngineSection
from agentevo.errors import ConfigError
from agentevo.inference.engine_options import read_engine_options
from agentevo.runtime.section import Section

_LORA = "AgentEvo sets it for model.lora"
_MODEL = "AgentEvo writes the model and its configuration for vLLM: set model.name"
_LOGPROBS = "AgentEvo sets it, so that a log-prob is that of the distribution drawn from"
_REPLICAS = (
    "one engine is one copy of the weights: start more engines (rollout.samplers with "
    "rollout.engines, or `agentevo launch`)"
)
_POLICY = "it changes the distribution that tokens are drawn from, which is then not the policy's"
_IMAGES = "AgentEvo shows images itself, with the pixels of model.vision"
_CODE = "AgentEvo's own code loads the weights, and other code is never run"

REFUSED: Mapping[str, str] = {
    "model": _MODEL,
    "model_weights": _MODEL,
    "hf_config_path": _MODEL,
    "hf_overrides": "AgentEvo writes the model's configuration: set model.config_overrides",
    "config_format": _MODEL,
    "load_format": _MODEL,
    "revision": _MODEL,
    "hf_token": "AgentEvo downloads the model, with the token in the environment variable HF_TOKEN",
    "tokenizer": "vLLM gets tokens and no text, so it has no tokenizer",
    "tokenizer_mode": "vLLM gets tokens and no text, so it has no tokenizer",
    "tokenizer_revision": "vLLM gets tokens and no text, so it has no tokenizer",
    "skip_tokenizer_init": "vLLM gets tokens and no text, so it has no tokenizer",
    "max_num_seqs": "set engine.max_running",
    "max_num_batched_tokens": "set engine.prefill_tokens",
    "enable_chunked_prefill": "set engine.prefill_tokens",
    "enable_prefix_caching": "set engine.prefix_sharing",
    "kv_cache_memory_bytes": "set engine.kv_cache_gb or engine.kv_cache_tokens",
    "num_gpu_blocks_override": "set engine.kv_cache_tokens",
    "enable_lora": _LORA,
    "max_loras": _LORA,
    "max_lora_rank": _LORA,
    "lora_target_modules": _LORA,
    "default_mm_loras": _LORA,
    "enable_tower_connector_lora": _LORA,
    "limit_mm_per_prompt": _IMAGES,
    "language_model_only": "set model.vision.images=false",
    "mm_processor_kwargs": _IMAGES,
    "mm_processor_cache_gb": _IMAGES,
    "mm_device_do_normalize": _IMAGES,
    "enable_mm_embeds": _IMAGES,
    "logprobs_mode": _LOGPROBS,
    "max_logprobs": "AgentEvo sets it",
    "generation_config": "requests have their own settings: set the section sampling",
    "override_generation_config": "requests have their own settings: set the section sampling",
    "seed": "every request has its own seed, which comes from run.seed",
    "runner": "an engine generates",
    "convert": "an engine generates",
    "disable_log_stats": "AgentEvo sets it",
    "data_parallel_size": _REPLICAS,
    "data_parallel_size_local": _REPLICAS,
    "nnodes": _REPLICAS,
    "logits_processors": _POLICY,
    "watermark_config": _POLICY,
    "diffusion_config": _POLICY,
    "worker_cls": _CODE,
    "worker_extension_cls": _CODE,
    "scheduler_cls": _CODE,
    "trust_remote_code": _CODE,
    "weight_transfer_config": "rollout.transport says how weights reach an engine",
    "enable_return_routed_experts": "set engine.routed_experts, with engine.type=torch",
}
"""vLLM's arguments that are no options -> the reason, or the key to set in their place."""

ROUNDING = ("quantization", "quantization_config", "kv_cache_dtype")
"""Options under which vLLM computes with rounded weights, or over rounded keys and values."""
EXACT = ("auto", "float16", "bfloat16")
"""Values of `kv_cache_dtype` that round as a model's own dtype does."""
DEVICES = ("pipeline_parallel_size", "prefill_context_parallel_size")
"""Options that multiply the number of devices."""
DRAFTING = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
"""Options of speculative decoding."""


class VllmOptions(Section):
    """Options under vLLM's names. Those that are not fields are in `passed_on`."""

    model_config = ConfigDict(extra="allow")

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype that vLLM computes in. Default: the model's."""
    max_model_len: int | None = Field(default=None, ge=16)
    """The longest sequence, in tokens. Default: the model's context."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """The number of devices of this machine that share each layer."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of the device's memory for weights, activations and key-value cache. Default: the cache
    has `engine.kv_cache_gb` (or `kv_cache_tokens`), and the rest takes what it needs."""
    enforce_eager: bool | None = None
    """Run layer by layer, without compiling and capturing graphs. Default: true on a CPU, where
    compiling takes minutes, and false on a GPU."""
    start_timeout_s: float = Field(default=1200.0, gt=0)
    """The time limit for vLLM to load the weights and be ready, in seconds."""

    @property
    def passed_on(self) -> dict[str, Any]:
        """The options that only vLLM knows."""
        return dict(self.model_extra or {})

    @property
    def num_devices(self) -> int:
        """The number of devices of one engine."""
        sizes = (self.passed_on.get(name) for name in DEVICES)
        return math.prod([self.tensor_parallel_size, *(int(size or 1) for size in sizes)])

    @property
    def rounding(self) -> list[str]:
        """The options that make vLLM compute less precisely than its dtype, as NAME=VALUE."""
        values = ((name, self.passed_on.get(name)) for name in ROUNDING)
        return [f"{name}={value}" for name, value in values if value not in (None, *EXACT)]

    @property
    def is_drafting(self) -> bool:
        """Whether vLLM decodes speculatively."""
        return any(self.passed_on.get(name) is not None for name in DRAFTING)


def read_options(section: EngineSection) -> VllmOptions:
    """The options of the section. Raises the errors of `read_engine_options`, and ConfigError for
    an argument of vLLM that AgentEvo sets, or for a number of devices that is none. Other options
    that only vLLM knows are not checked."""
    options = read_engine_options(section, VllmOptions, "vLLM")
    for name, value in options.passed_on.items():
        if name in REFUSED:
            raise ConfigError(f"engine.options.{name}: {REFUSED[name]}")
        if name in DEVICES and value is not None and (type(value) is not int or value < 1):
            raise ConfigError(
                f"engine.options.{name}: got {value!r}: give a whole number of at least 1"
            )
    return options
