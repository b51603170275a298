"""Which class of transformers reads the model of a folder.

A model with a vision tower of a known type is read whole, with its tower, if the folder has an
image processor. Without one it can be shown no image, and the class for text reads what it can.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agentevo.errors import ConfigError
from agentevo.models.vision.parts import SEEING_TYPES
from agentevo.models.vision.processor import IMAGE_FILE, VisionProcessor, load_processor
from agentevo.runtime.parsing import read_json_object

if TYPE_CHECKING:
    from agentevo.config import VisionSection

CAUSAL = "a causal language model"
SEEING = "a vision-language model"


def reads_images(folder: Path, images: bool = True) -> bool:
    """Whether the folder's model is read with its vision tower. `images`: whether it is shown
    images. False for a damaged config.json."""
    kind = str(_config_of(folder).get("model_type"))
    if kind not in SEEING_TYPES:
        return False
    return _has_tower(kind, images and has_image_processor(folder))


def has_image_processor(folder: Path) -> bool:
    """Whether the folder has the settings of an image processor."""
    if (folder / IMAGE_FILE).is_file():
        return True
    try:  # newer folders have one file for all parts of a processor
        return "image_processor" in read_json_object(folder / "processor_config.json")
    except ConfigError:
        return False


def saved_processor(
    folder: Path,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    section: VisionSection,
) -> VisionProcessor | None:
    """The processor of the folder's model, with the recipe's limits. None for a model that reads
    text only. Raises ModelError."""
    if not section.images or not reads_images(folder) or not has_image_processor(folder):
        return None
    return load_processor(
        folder, config, tokenizer, min_pixels=section.min_pixels, max_pixels=section.max_pixels
    )


def model_class(folder: Path, images: bool = True) -> tuple[Any, str]:
    """The class that reads the folder's model, and what such a model is called. `images`: whether
    it is shown images."""
    if reads_images(folder, images):
        return AutoModelForImageTextToText, SEEING
    return AutoModelForCausalLM, CAUSAL


def class_of_type(model_type: str, images: bool = True) -> Any:
    """As `model_class`, for a model of which only the configuration is known. It is taken to have
    an image processor."""
    if model_type in SEEING_TYPES and _has_tower(model_type, images):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _has_tower(model_type: str, is_shown_images: bool) -> bool:
    """Whether a model of a type that sees is read with its tower. Some types have a class without
    one, for models that are shown no images."""
    return is_shown_images or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def remedy_for(folder: Path) -> str:
    """What to do about a model that can't be read."""
    config = _config_of(folder)
    kind = str(config.get("model_type"))
    if kind in SEEING_TYPES:
        return "save or fetch it again"
    if any(config.get(part) for part in ("vision_config", "vision_tower")):
        return (
            f"AgentEvo shows no images to models of type {kind}: choose a text model, or one of "
            f"the types {', '.join(sorted(SEEING_TYPES))}"
        )
    if _hears(config):
        return f"models of type {kind} read audio, which AgentEvo does not: choose a text model"
    return "save or fetch it again"


def _hears(config: Mapping[str, Any]) -> bool:
    thinker = config.get("thinker_config")  # Qwen's Omni models
    parts = thinker if isinstance(thinker, dict) else config
    return bool(parts.get("audio_config"))


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        return read_json_object(folder / "config.json")
    except ConfigError:
        return {}
