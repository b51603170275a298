"""Tiny vision-language models of each family: configuration, tokenizer with the family's chat
template, and image processor. Nothing is downloaded."""

from __future__ import annotations

from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "idefics3",
    "smolvlm",
    "gemma3",
    "gemma4",
    "internvl",
    "llava",
)
_EACH = "{% for part in message.content %}"
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    + _EACH
    + "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PARTS_ONLY = (
    "{% for message in messages %}{{ message.role | capitalize }}:"
    + _EACH
    + "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
TEMPLATES = {
    "qwen": _CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
    "gemma3": _CHATML.replace("IMAGE", "<start_of_image>"),
    "gemma4": _CHATML.replace("IMAGE", "<|image|>"),
    "internvl": _CHATML.replace("IMAGE", "<IMG_CONTEXT>\n"),
    "idefics3": _PARTS_ONLY,
    "smolvlm": _PARTS_ONLY,
    "llava": _PARTS_ONLY,
}
_TOKENS = {
    "qwen": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "gemma4": ["<|image>", "<image|>", "<|image|>", "<|video|>"],
    "internvl": ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
    "idefics3": [
        "<fake_token_around_image>",
        "<image>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    ],
    "llava": ["<image>"],
}
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


class TinyVision(NamedTuple):
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerFast
    image_processor: Any


def tiny_vision(name: str) -> TinyVision:
    """The parts of a tiny model of this type."""
    kind = "qwen" if name.startswith("qwen") else name
    tokenizer = _tokenizer(_TOKENS["idefics3" if kind == "smolvlm" else kind], TEMPLATES[kind])
    return TinyVision(_config(name, tokenizer), tokenizer, _image_processor(kind))


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_linear": (
        "qwen3_5",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "gemma4_vision": ("gemma4", {"use_bidirectional_attention": "vision"}),
}
"""Name -> the family's name, and other values of the part for text."""


def write_tiny_vision(name: str, folder: Path, seed: int = 0, **text: Any) -> Path:
    """Writes the model, the tokenizer and the image processor of a family or of VARIANTS into a
    folder, as `model.name` takes it. The weights are random, of a size with which log-probs depend
    on the input. `text`: other values of the part for text."""
    family, changes = VARIANTS.get(name, (name, {}))
    parts = tiny_vision(family)
    settings = parts.config.to_dict()
    settings["text_config"] |= changes | text
    for key in ("vocab_size", "vocab_size_per_layer_input"):  # as real models, more than tokens
        if key in settings["text_config"]:
            settings["text_config"][key] = 288
    config = type(parts.config).from_dict(settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.data = noise * parameter[0].numel() ** -0.5
        else:
            parameter.data += 0.1 * noise * (parameter.numel() > 1)

    embeddings = model.get_input_embeddings().weight
    size = 0.1 if family.startswith("gemma") else 0.5  # Gemma multiplies them
    embeddings.data = torch.randn(embeddings.shape, generator=generator) * size
    model.tie_weights()
    model.save_pretrained(folder)
    parts.tokenizer.save_pretrained(folder)
    parts.image_processor.save_pretrained(folder)
    return folder


def png(width: int, height: int, seed: int = 0) -> bytes:
    """The file of an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return image_file(Image.fromarray(pixels))


def image_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _tokenizer(tokens: list[str], template: str) -> PreTrainedTokenizerFast:
    """Bytes, and runs of line breaks as in Gemma's vocabulary: whether a line break before an
    image's own is encoded with them changes the ids."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "ĊĊĊ"]
    bpe = models.BPE(
        vocab={token: id for id, token in enumerate(vocabulary)},
        merges=[("Ċ", "Ċ"), ("ĊĊ", "Ċ")],
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", *tokens]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|im_end|>",
        chat_template=template,
    )


def _config(name: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "pad_token_id": tokenizer.pad_token_id,
    }
    ids = tokenizer.get_vocab()
    if name.startswith("qwen"):
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "hidden_size": 32}
        if name == "qwen2_vl":
            vision |= {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": 64}
        else:
            vision |= {"out_hidden_size": 64, "intermediate_size": 48}
        if name == "qwen3_vl":
            vision |= {"deepstack_visual_indexes": [0]}
        if name == "qwen3_5":
            text |= {"layer_types": ["full_attention", "full_attention"]}
            rope |= {"partial_rotary_factor": 1.0}
        return AutoConfig.for_model(
            name,
            text_config=text | {"rope_parameters": rope},
            vision_config=vision,
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )

    if name in ("idefics3", "smolvlm"):
        return AutoConfig.for_model(
            name,
            text_config={"model_type": "llama", **text},
            vision_config=_CLIP,
            image_token_id=ids["<image>"],
            scale_factor=2,
            pad_token_id=tokenizer.pad_token_id,
        )

    if name == "gemma3":
        return AutoConfig.for_model(
            name,
            text_config=text,
            vision_config={"model_type": "siglip_vision_model", **_CLIP},
            mm_tokens_per_image=4,
            boi_token_index=ids["<start_of_image>"],
            eoi_token_index=ids["<end_of_image>"],
            image_token_index=ids["<image_soft_token>"],
        )

    if name == "gemma4":
        small = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(tokenizer)}
        vision = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        }
        return AutoConfig.for_model(
            name,
            text_config=text | small | {"global_head_dim": 16},
            vision_config=vision,
            audio_config=None,
            boi_token_id=ids["<|image>"],
            eoi_token_id=ids["<image|>"],
            image_token_id=ids["<|image|>"],
            video_token_id=ids["<|video|>"],
        )

    if name == "internvl":
        return AutoConfig.for_model(
            name,
            text_config={"model_type": "qwen2", **text},
            vision_config=_CLIP | {"image_size": [16, 16], "patch_size": [4, 4]},
            image_token_id=ids["<IMG_CONTEXT>"],
            image_seq_length=4,
        )

    return AutoConfig.for_model(
        name,
        text_config={"model_type": "llama", **text},
        vision_config={"model_type": "clip_vision_model", **_CLIP},
        image_token_index=ids["<image>"],
    )


def _image_processor(kind: str) -> Any:
    module, settings = {
        "qwen": (
            "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
            {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1024}},
        ),
        "idefics3": (
            "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil",
            {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
        ),
        "smolvlm": (
            "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil",
            {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
        ),
        "gemma3": (
            "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
            {"size": {"height": 16, "width": 16}},
        ),
        "gemma4": (
            "gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil",
            {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        ),
        "internvl": (
            "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
            {"size": {"height": 16, "width": 16}, "max_patches": 4},
        ),
        "llava": (
            "llava.image_processing_pil_llava.LlavaImageProcessorPil",
            {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
        ),
    }[kind]
    path, _, name = module.rpartition(".")
    return getattr(import_module(f"transformers.models.{path}"), name)(**settings)
