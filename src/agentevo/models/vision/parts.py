"""The parts of a vision-language model.

    tower            reads pixels
    projector        turns what the tower says into features, one per feature token
    language model   everything else: embeddings, decoder, output layer

Engine and trainer prepare the language model only (models/compute/attention.py). Tower and
projector keep transformers' own code, so an image has the same features in any company.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from agentevo.errors import ModelError
from agentevo.models.token_rows import causal_model

if TYPE_CHECKING:
    from agentevo.models.vision.processor import VisionProcessor

Part = Literal["tower", "projector"]
PARTS: tuple[Part, ...] = ("tower", "projector")


class _Places(NamedTuple):
    """The names of modules within `model.model`."""

    tower: str
    projectors: tuple[str, ...]
    """Some lie within the tower."""


_QWEN = _Places("visual", ("visual.merger",))
_DEEPSTACK = _Places("visual", ("visual.merger", "visual.deepstack_merger_list"))
_IDEFICS = _Places("vision_model", ("connector",))
_LLAVA = _Places("vision_tower", ("multi_modal_projector",))
_PLACES = {
    "gemma3": _LLAVA,
    "gemma4": _Places("vision_tower", ("embed_vision",)),
    "idefics3": _IDEFICS,
    "internvl": _LLAVA,
    "llava": _LLAVA,
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_vl": _DEEPSTACK,
    "qwen3_vl_moe": _DEEPSTACK,
    "smolvlm": _IDEFICS,
}
"""Type of a model's configuration -> the places of its parts."""
SEEING_TYPES = frozenset(_PLACES)
"""The types of models that AgentEvo shows images to."""
_KEY = "_agentevo_processor"
"""The attribute of a model that has its processor. Copies of the model keep it."""

_TEXT_ONLY = "_agentevo_text_only"
"""The attribute of a model that sees and is shown no images."""


def set_processor(model: PreTrainedModel, processor: VisionProcessor) -> None:
    """Connects a model with the processor of its images."""
    vars(causal_model(model))[_KEY] = processor


def processor_of(model: nn.Module) -> VisionProcessor | None:
    """The processor of a model's images. None for a model that is shown no images."""
    processor: VisionProcessor | None = vars(causal_model(model)).get(_KEY)  # type: ignore[arg-type]
    return processor


def show_no_images(model: PreTrainedModel) -> None:
    """Makes a model that sees one that is never shown images."""
    vars(causal_model(model))[_TEXT_ONLY] = True


def reads_text_only(model: PreTrainedModel) -> bool:
    """Whether `show_no_images` was called."""
    return _TEXT_ONLY in vars(causal_model(model))


def has_tower(model: nn.Module) -> bool:
    """Whether the model has a vision tower of a known type."""
    return _places_in(model) is not None


def part_of(model: nn.Module, name: str) -> Part | None:
    """The part that a module or parameter belongs to, by its name within the model inside
    adapters. None for the language model."""
    places = _places_in(model)
    if places is None:
        return None
    if any(_lies_in(name, f"model.{place}") for place in places.projectors):
        return "projector"
    return "tower" if _lies_in(name, f"model.{places.tower}") else None


def language_modules(model: nn.Module) -> list[nn.Module]:
    """All modules of a model outside of its tower and projector. For a text model, all modules."""
    places = _places_in(model)
    if places is None:
        return list(model.modules())

    inner: Any = causal_model(model)  # type: ignore[arg-type]
    roots = [inner.model.get_submodule(place) for place in (places.tower, *places.projectors)]
    seeing = {id(module) for root in roots for module in root.modules()}
    return [module for module in model.modules() if id(module) not in seeing]


def vision_parameters(
    model: nn.Module, parts: Collection[str] = PARTS
) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter of everything in these parts, adapters included. The names are those
    within the model inside adapters."""
    if has_tower(model):
        for name, parameter in causal_model(model).named_parameters():  # type: ignore[arg-type]
            if part_of(model, name) in parts:
                yield name, parameter


def vision_may_change(model: nn.Module) -> bool:
    """Whether new weights or another adapter may change what tower and projector compute."""
    return any(
        parameter.requires_grad or _is_of_adapter(name)
        for name, parameter in vision_parameters(model)
    )


def adapted_part(model: nn.Module) -> Part | None:
    """A part of the model that has an adapter: the tower or the projector."""
    names = (name for name, _ in vision_parameters(model) if _is_of_adapter(name))
    return next((part_of(model, name) for name in names), None)


def freeze_parts(model: nn.Module, parts: Collection[str]) -> None:
    """Makes these parts constants of the training. Raises ModelError for adapters in them."""
    for name, parameter in vision_parameters(model, parts):
        if parameter.requires_grad and _is_of_adapter(name):
            raise ModelError(
                f"model.lora trains {name}, and model.vision keeps the {part_of(model, name)} as "
                "it is: remove one of the keys"
            )
        parameter.requires_grad_(False)


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Sets the attention of the language model. A tower keeps its own."""
    if has_tower(model):
        model.set_attn_implementation({"text_config": implementation})
    else:
        model.set_attn_implementation(implementation)


def attention_of(model: PreTrainedModel) -> str:
    """The attention of the language model."""
    config: PretrainedConfig = model.config
    config = config.get_text_config() if has_tower(model) else config
    return str(config._attn_implementation)


def forget_positions(model: nn.Module) -> None:
    """Removes what a model with M-RoPE remembers of its last pass. A pass with explicit positions
    does not read it."""
    inner: Any = causal_model(model)  # type: ignore[arg-type]
    if hasattr(getattr(inner, "model", None), "rope_deltas"):
        inner.model.rope_deltas = None


def remembers_positions(model: nn.Module) -> bool:
    """Whether a model with M-RoPE remembers positions of a pass."""
    inner: Any = causal_model(model)  # type: ignore[arg-type]
    deltas = getattr(getattr(inner, "model", None), "rope_deltas", None)
    return isinstance(deltas, torch.Tensor)


def _places_in(model: nn.Module) -> _Places | None:
    inner: Any = causal_model(model)  # type: ignore[arg-type]
    kind = getattr(getattr(inner, "config", None), "model_type", None)
    places = _PLACES.get(str(kind))
    if places is None or not hasattr(getattr(inner, "model", None), places.tower):
        return None
    return places


def _is_of_adapter(name: str) -> bool:
    return ".lora_" in name or ".modules_to_save." in name


def _lies_in(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}.")
