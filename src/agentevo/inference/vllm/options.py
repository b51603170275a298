"""The options of vLLM in `engine.options` (`engine.type: vllm`), read before anything is
started."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from agentevo.config import EngineSection
from agentevo.errors import MissingExtraError
from agentevo.inference.engine_options import read_engine_options
from agentevo.runtime.section import Section


class VllmOptions(Section):
    """Options under vLLM's names."""

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


def read_options(section: EngineSection) -> VllmOptions:
    """See `read_engine_options`."""
    return read_engine_options(section, VllmOptions, "vLLM")


def check_options(section: EngineSection) -> None:
    """Raises the errors of `read_options`, and MissingExtraError if vLLM is not installed."""
    read_options(section)
    if find_spec("vllm") is None:
        raise MissingExtraError(
            "engine.type=vllm needs the package 'vllm': pip install 'agentevo[vllm]', or set "
            "engine.type=torch"
        )
