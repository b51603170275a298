"""The index of a corpus file, by words or by meaning. A process builds it once, in memory."""

from __future__ import annotations

from functools import lru_cache

from agentevo.agents.tools.corpus import Index, read_corpus
from agentevo.agents.tools.dense import DenseIndex, load_encoder
from agentevo.agents.tools.word_index import WordIndex
from agentevo.errors import ConfigError

KINDS = ("bm25", "dense")


@lru_cache(maxsize=8)
def corpus_index(path: str, kind: str = "bm25", model: str | None = None) -> Index:
    """The index of a corpus file; `model` as in `dense.load_encoder`. Raises ConfigError for a
    corpus that can't be read or indexed."""
    if kind not in KINDS or (model is not None and kind != "dense"):
        raise ConfigError(f"kind {kind!r} is not known: use bm25, or dense, which takes a model")
    passages = read_corpus(path)
    if kind == "bm25":
        return WordIndex(passages)
    return DenseIndex(passages, load_encoder(model))
