"""The engines that `engine.type` can name. Other packages register their engines as entry
points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentevo.config import EngineSection
from agentevo.errors import ConfigError
from agentevo.inference.engine import EngineFactory, UpdatableEngine
from agentevo.runtime.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

engines: Registry[EngineFactory] = Registry("engines")


def check_engine(section: EngineSection) -> None:
    """Checks before anything is created that the engine exists, that its package is installed, and
    that its options are valid. Raises UnknownNameError and ConfigError."""
    engines.get(section.type)
    if section.type == "torch" and section.options:
        raise ConfigError(
            f"engine.options.{next(iter(section.options))}: the embedded engine takes no options: "
            "leave engine.options out, or choose the engine that they are for with engine.type "
            "(a base in 4 or 8 bits is model.lora.quantize)"
        )

    if section.type == "vllm":
        from agentevo.inference.vllm.arguments import check_options

        check_options(section)

    if section.type == "sglang":
        from agentevo.inference.sglang.options import check_options

        check_options(section)


def check_model(section: EngineSection, model: PreTrainedModel) -> None:
    """Raises ConfigError for a model that the engine can't serve. Its weights are not read, and
    nothing is started. SGLang and engines of other packages check it when they start."""
    if section.type == "vllm":
        from agentevo.inference.vllm.models import check_vllm_model

        check_vllm_model(model)


def rounding_options(section: EngineSection) -> list[str]:
    """The options, as NAME=VALUE, that make the engine compute less precisely than its dtype:
    quantized weights, or rounded keys and values. Raises ConfigError for invalid options."""
    if section.type == "vllm":
        from agentevo.inference.vllm.options import read_options as read_vllm

        return read_vllm(section).rounding

    if section.type == "sglang":
        from agentevo.inference.sglang.options import read_options as read_sglang

        return read_sglang(section).rounding

    return []


@engines.register("torch")
def torch_engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, section: EngineSection
) -> UpdatableEngine:
    """Embedded: continuous batching in this process, on the trainer's own weights."""
    from agentevo.inference.embedded.torch_engine import TorchEngine

    return TorchEngine(model, tokenizer, section)


@engines.register("vllm")
def vllm_engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, section: EngineSection
) -> UpdatableEngine:
    """vLLM, in processes that this one starts, with its own weights (extra `vllm`)."""
    from agentevo.inference.vllm.engine import VllmEngine

    return VllmEngine(model, tokenizer, section)


@engines.register("sglang")
def sglang_engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, section: EngineSection
) -> UpdatableEngine:
    """SGLang: an HTTP server, started here or given by its URL (engine.options.url)."""
    from agentevo.inference.sglang.engine import SglangEngine

    return SglangEngine(model, tokenizer, section)
