"""Determines which ids of a model's vocabulary are tokens.

Many models have more rows than their tokenizer has tokens (Qwen2.5: 151,936 of 151,665), so that
matrices have round sizes. The additional ids have no text, and no prompt may have them. They are
never sampled: engine and trainer compute the softmax only over the tokens.

Some tokens are never sampled either (`ban_tokens`): those that stand for images, which would claim
an image that does not exist. Prompts may have them. Engine and trainer give them no probability.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOWEST = -1e30
"""The score of tokens that have no probability, and the start of a running maximum. It is finite,
so that zero times its distance is zero."""


def limit_to_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Limits sampling to the ids up to the tokenizer's last token."""
    rows = int(model.config.get_text_config().vocab_size)
    causal_model(model).num_token_rows = min(num_tokens(tokenizer), rows)


def num_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of ids up to the tokenizer's last token."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def num_token_rows(model: PreTrainedModel) -> int:
    """The number of ids, from 0 on, that can be sampled: the whole vocabulary, unless
    `limit_to_tokens` was called."""
    inner = causal_model(model)
    if "num_token_rows" in vars(inner):
        return int(inner.num_token_rows)
    return int(model.config.get_text_config().vocab_size)


def ban_tokens(model: PreTrainedModel, ids: Iterable[int]) -> None:
    """Bans these ids from sampling, in addition to those that are banned already."""
    causal_model(model).banned_tokens = tuple(sorted({*banned_tokens(model), *ids}))


def banned_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """The ids below `num_token_rows` that are never sampled, in ascending order."""
    banned: tuple[int, ...] = getattr(causal_model(model), "banned_tokens", ())
    return tuple(id for id in banned if id < num_token_rows(model))


def token_logits(model: PreTrainedModel, logits: torch.Tensor) -> torch.Tensor:
    """The logits [..., V] of the ids up to the last one that can be sampled, LOWEST for banned
    tokens. A view if none is banned, otherwise float32 or wider."""
    logits = logits[..., : num_token_rows(model)]
    banned = banned_tokens(model)
    if not banned or not logits.numel():
        return logits

    exact = logits.float() if logits.element_size() < 4 else logits.clone()
    exact[..., list(banned)] = LOWEST
    return exact


def causal_model(model: PreTrainedModel) -> Any:
    """The transformers model inside adapters."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def decoder_of(model: PreTrainedModel) -> Any:
    """The embeddings and layers of a model, inside adapters too: what returns hidden states. The
    name that transformers has for it in Llama 4 (`base_model_prefix`) is none of its modules."""
    causal = causal_model(model)
    return getattr(causal, "model", causal) if causal.base_model is causal else causal.base_model
