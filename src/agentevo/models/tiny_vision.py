"""Creates a tiny policy that sees: a Qwen2-VL of a few million parameters.

Each square of 16 x 16 pixels is a token. Images are scaled to multiples of 16 pixels, so pictures
with cells of 16 or 32 pixels keep their shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agentevo.models.tiny_tokenizer import IMAGE_TOKENS
from agentevo.models.vision.processor import VisionProcessor, check_size

if TYPE_CHECKING:
    from agentevo.config import ModelSection, TinyModel

PATCH_PIXELS = 8
MERGE = 2
"""The number of patches along one side of a token."""
MAX_PIXELS = 2**16
ROPE_THETA = 10.0
"""Qwen2-VL's rows and columns have the lower frequencies of the rotary embedding. With the usual
10,000 a step to the next column turns by 0.002 radians at most, too little for a fresh model to
learn where something is; with 10 it turns by 0.1 to 0.2."""
TOWER_WIDTH = 64
TOWER_LAYERS = 2
TOWER_HEADS = 4


def tiny_vision_config(tiny: TinyModel, tokenizer: PreTrainedTokenizerBase) -> Qwen2VLConfig:
    """The shape of the policy. The language model has the section's shape."""
    half_head = tiny.hidden_size // tiny.num_heads // 2
    side = half_head // 3
    sections = [half_head - 2 * side, side, side]
    vocabulary = tokenizer.get_vocab()
    start, end, image, video = (vocabulary[token] for token in IMAGE_TOKENS)
    return Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": tiny.hidden_size,
            "intermediate_size": tiny.intermediate_size,
            "num_hidden_layers": tiny.num_layers,
            "num_attention_heads": tiny.num_heads,
            "num_key_value_heads": tiny.num_heads,
            "max_position_embeddings": tiny.context_length,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": ROPE_THETA,
                "mrope_section": sections,
            },
            "initializer_range": tiny.hidden_size**-0.5,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": TOWER_LAYERS,
            "embed_dim": TOWER_WIDTH,
            "num_heads": TOWER_HEADS,
            "mlp_ratio": 2,
            "hidden_size": tiny.hidden_size,
            "patch_size": PATCH_PIXELS,
            "spatial_merge_size": MERGE,
            "initializer_range": TOWER_WIDTH**-0.5,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )


def make_tiny_vision(
    tiny: TinyModel, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Qwen2VLForConditionalGeneration:
    """A float32 model on the CPU with random weights. Equal shapes, tokenizers and seeds give equal
    weights. Other random generators do not change."""
    config = tiny_vision_config(tiny, tokenizer)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU
        return Qwen2VLForConditionalGeneration(config)


def tiny_processor(section: ModelSection, tokenizer: PreTrainedTokenizerBase) -> VisionProcessor:
    """The policy's processor. Raises ModelError for a size of images that can't be."""
    limits = section.vision
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH_PIXELS,
        merge_size=MERGE,
        size={
            "shortest_edge": limits.min_pixels or (PATCH_PIXELS * MERGE) ** 2,
            "longest_edge": limits.max_pixels or MAX_PIXELS,
        },
    )
    check_size(image_processor)
    return VisionProcessor(tokenizer, image_processor, tiny_vision_config(section.tiny, tokenizer))
