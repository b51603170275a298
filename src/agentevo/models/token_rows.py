"""Which ids of a model's vocabulary are tokens.

Many models have more rows than their tokenizer has tokens (Qwen2.5: 151,936 of 151,665), so that
matrices have round sizes. Nothing can be read from such an id, and no prompt may have it. It is
never sampled: engine and trainer compute the softmax over the tokens only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def limit_to_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Notes the number of ids up to the tokenizer's last token: the later ones are never
    sampled."""
    rows = int(model.config.get_text_config().vocab_size)
    causal_model(model).num_token_rows = min(num_tokens(tokenizer), rows)


def num_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many ids there are up to the tokenizer's last token."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def num_token_rows(model: PreTrainedModel) -> int:
    """How many ids, from 0 on, can be sampled; the whole vocabulary unless `limit_to_tokens` has
    noted fewer."""
    rows = int(model.config.get_text_config().vocab_size)
    return int(getattr(causal_model(model), "num_token_rows", rows))


def token_logits(model: PreTrainedModel, logits: torch.Tensor) -> torch.Tensor:
    """The logits [..., V] of the ids that can be sampled, a view."""
    return logits[..., : num_token_rows(model)]


def causal_model(model: PreTrainedModel) -> Any:
    """The transformers model inside of adapters."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner
