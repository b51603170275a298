"""How each family of vision-language models shows an image as tokens.

A chat template writes one placeholder per image. The family replaces it by the text of the image:
as many feature tokens as the vision tower gives features, and the tokens around them. The texts are
those of transformers' processors (`replace_image_token`), which need packages for video even if
there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from agentevo.errors import ModelError

CONFIG_NAMES = (
    "image_token",
    "video_token",
    "audio_token",
    "boi_token",
    "eoi_token",
    "boa_token",
    "eoa_token",
    "vision_start_token",
    "vision_end_token",
)
"""The beginnings of the names under which configurations have ids of images, audio and videos."""
TEXTS_OF_FAMILIES = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<fake_token_around_image>",
    "<global-img>",
    "<img>",
    "</img>",
    "<|audio|>",
    "<|video|>",
)
"""Tokens around images, audio and videos that no configuration names."""


@dataclass(frozen=True)
class ImageLayout:
    """The tokens of one image."""

    text: str
    """The text that replaces the placeholder."""
    grid: tuple[int, ...]
    """See ImageSpan."""


@dataclass(frozen=True)
class VisionFamily:
    """What a processor needs to know of a model."""

    name: str
    placeholder: str
    """The text that the chat template writes for an image."""
    feature: str
    """The text of the token in whose place the model reads a feature."""
    lay_out: Callable[[Mapping[str, Any]], ImageLayout]
    """The tokens of an image, by what its image processor returned for it alone."""
    numbers: tuple[int, ...] = ()
    """The numbers of the model's configuration that `lay_out` depends on."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the image processor, those that transformers' processor passes."""
    merge: int | None = None
    """The number of patches along one side of a token, for models with M-RoPE. None for models
    whose positions count tokens."""
    image_axis: int = 0
    """The axis of the pixel tensors along which images lie."""


def find_family(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, image_processor: Any
) -> VisionFamily:
    """The family of a model. Raises ModelError for a model that AgentEvo can't show images to."""
    make = _FAMILIES.get(config.model_type)
    if make is None:
        raise ModelError(
            f"models of type {config.model_type} can't be shown images: choose one of the types "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    return make(config, tokenizer, image_processor)


def vision_ids(
    family: VisionFamily, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """The ids that a policy must never sample: features and boundaries of images, video and audio.
    A sampled one would claim an image that does not exist."""
    names = (f"{name}_{suffix}" for name in CONFIG_NAMES for suffix in ("id", "index"))
    ids = {getattr(config, name, None) for name in names}
    vocabulary = tokenizer.get_vocab()
    texts = [family.placeholder, family.feature, *TEXTS_OF_FAMILIES]
    tiles = (text for text in vocabulary if text.startswith("<row_") and "_col_" in text)
    ids |= {vocabulary.get(text) for text in (*texts, *tiles)}
    return frozenset(id for id in ids if isinstance(id, int))


def _qwen(config: Any, tokenizer: PreTrainedTokenizerBase, image_processor: Any) -> VisionFamily:
    feature = _token_text(tokenizer, config.image_token_id)
    merge = int(image_processor.merge_size)
    sizes = (int(image_processor.patch_size), merge)
    tower = (int(config.vision_config.patch_size), int(config.vision_config.spatial_merge_size))
    if sizes != tower:
        raise ModelError(
            f"the image processor makes patches of {sizes[0]} pixels and merges {sizes[1]} x "
            f"{sizes[1]}, and the model {tower[0]} and {tower[1]} x {tower[1]}: save the model's "
            "own with processor.save_pretrained"
        )

    def lay_out(processed: Mapping[str, Any]) -> ImageLayout:
        frames, height, width = map(int, processed["image_grid_thw"][0])
        count = frames * height * width // merge**2
        return ImageLayout(feature * count, (frames, height, width))

    return VisionFamily("qwen", feature, feature, lay_out, sizes, merge=merge)


def _idefics(config: Any, tokenizer: PreTrainedTokenizerBase, image_processor: Any) -> VisionFamily:
    feature = _token_text(tokenizer, config.image_token_id)
    vision = config.vision_config
    features = int((vision.image_size // vision.patch_size) ** 2 / config.scale_factor**2)
    fake = "<fake_token_around_image>"
    whole_image = f"{fake}<global-img>{feature * features}{fake}"

    def lay_out(processed: Mapping[str, Any]) -> ImageLayout:
        rows, columns = int(processed["rows"][0][0]), int(processed["cols"][0][0])
        tiles = "".join(
            "".join(
                f"{fake}<row_{row}_col_{column}>{feature * features}"
                for column in range(1, columns + 1)
            )
            + "\n"
            for row in range(1, rows + 1)
        )
        text = f"{tiles}\n{whole_image}" if tiles else whole_image
        return ImageLayout(text, (features * (rows * columns + 1),))

    options = {"return_row_col_info": True}
    return VisionFamily(
        "idefics3", feature, feature, lay_out, (features,), options=options, image_axis=1
    )


def _gemma3(config: Any, tokenizer: PreTrainedTokenizerBase, image_processor: Any) -> VisionFamily:
    feature = _token_text(tokenizer, config.image_token_index)
    start = _token_text(tokenizer, config.boi_token_index)
    end = _token_text(tokenizer, config.eoi_token_index)
    features = int(config.mm_tokens_per_image)

    def lay_out(processed: Mapping[str, Any]) -> ImageLayout:
        return ImageLayout(f"\n\n{start}{feature * features}{end}\n\n", (features,))

    options = {"do_pan_and_scan": False}
    return VisionFamily("gemma3", start, feature, lay_out, (features,), options=options)


def _gemma4(config: Any, tokenizer: PreTrainedTokenizerBase, image_processor: Any) -> VisionFamily:
    feature = _token_text(tokenizer, config.image_token_id)
    start = _token_text(tokenizer, config.boi_token_id)
    end = _token_text(tokenizer, config.eoi_token_id)

    def lay_out(processed: Mapping[str, Any]) -> ImageLayout:
        features = int(processed["num_soft_tokens_per_image"][0])
        return ImageLayout(f"{start}{feature * features}{end}", (features,))

    return VisionFamily("gemma4", feature, feature, lay_out)


def _internvl(
    config: Any, tokenizer: PreTrainedTokenizerBase, image_processor: Any
) -> VisionFamily:
    feature = _token_text(tokenizer, config.image_token_id)
    features = int(config.image_seq_length)

    def lay_out(processed: Mapping[str, Any]) -> ImageLayout:
        count = features * int(processed["num_patches"][0])
        return ImageLayout(f"<img>{feature * count}</img>", (count,))

    options = {"crop_to_patches": True}
    return VisionFamily("internvl", feature, feature, lay_out, (features,), options=options)


def _llava(config: Any, tokenizer: PreTrainedTokenizerBase, image_processor: Any) -> VisionFamily:
    feature = _token_text(tokenizer, config.image_token_index)
    tower = config.vision_config.model_type
    if tower not in ("clip_vision_model", "siglip_vision_model"):  # Pixtral breaks lines of patches
        raise ModelError(
            f"LLaVA models with a tower of type {tower} can't be shown images: choose one with "
            "CLIP or SigLIP"
        )

    patch = int(config.vision_config.patch_size)
    # The tower of CLIP has a class token in front of its patches; "default" drops the first token.
    extra = int(tower == "clip_vision_model")
    extra -= int(config.vision_feature_select_strategy == "default")

    def lay_out(processed: Mapping[str, Any]) -> ImageLayout:
        height, width = processed["pixel_values"].shape[-2:]
        count = (height // patch) * (width // patch) + extra
        return ImageLayout(feature * count, (count,))

    return VisionFamily("llava", feature, feature, lay_out, (patch, extra))


_FAMILIES: dict[str, Callable[[Any, PreTrainedTokenizerBase, Any], VisionFamily]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "idefics3": _idefics,
    "internvl": _internvl,
    "llava": _llava,
    "qwen2_5_vl": _qwen,
    "qwen2_vl": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "smolvlm": _idefics,
}


def _token_text(tokenizer: PreTrainedTokenizerBase, id: int | None) -> str:
    text = None if id is None else tokenizer.convert_ids_to_tokens(id)
    if not isinstance(text, str):
        raise ModelError(
            f"the tokenizer has no token {id}, which config.json names for images: they don't "
            "belong together"
        )
    return text
