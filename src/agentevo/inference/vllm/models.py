"""Which models vLLM can serve, so that log-probs are those of training."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from agentevo.errors import ConfigError, MissingExtraError
from agentevo.models.compute.adapters import is_adapted
from agentevo.models.vision.parts import adapted_part, processor_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("qwen",)
"""The families (VisionFamily.name) whose images vLLM is shown. Its other models want pixels in a
form of their own."""


def check_vllm_model(model: PreTrainedModel) -> None:
    """Raises ConfigError for a model that vLLM can't serve, and MissingExtraError for one that sees
    without the package that vLLM's models need for it. The weights are not read."""
    if (refusal := adapter_refusal(model)) is not None:
        raise ConfigError(
            f"engine.type=vllm can't serve {refusal} (model.lora): leave that out, or use "
            "engine.type=torch"
        )

    processor = processor_of(model)
    if processor is not None and processor.family.name not in FAMILIES:
        raise ConfigError(
            f"engine.type=vllm is shown images by Qwen's models only, and this one is of the "
            f"family {processor.family.name}: set model.vision.images=false, or engine.type=torch"
        )
    if processor is not None and find_spec("torchvision") is None:
        raise MissingExtraError(
            "engine.type=vllm needs the package 'torchvision' for models that see: pip install "
            "torchvision (the build for your torch), or set engine.type=torch"
        )


def adapter_refusal(model: Any) -> str | None:
    """Why vLLM does not support the adapter of a model. None if it does, or if there is no
    adapter."""
    if not is_adapted(model):
        return None

    config = model.peft_config[model.active_adapter]
    reasons = {
        "a base in 8 or 4 bits": getattr(model.config, "quantization_config", None) is not None,
        "DoRA": config.use_dora,
        "trained biases": config.bias != "none",
        "whole modules that are trained": bool(config.modules_to_save),
        "ranks of their own for some layers": bool(config.rank_pattern or config.alpha_pattern),
        "adapters in the tower or projector of a model that sees": adapted_part(model) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
