"""The longest sequence that a model computes. Rotary frequencies that depend on the length can
limit it.

Two of transformers' types of RoPE choose frequencies by the longest position of a pass: `dynamic`
beyond `max_position_embeddings`, and `longrope` (Phi-3-128k, Phi-3.5, Phi-4-mini) beyond
`original_max_position_embeddings`. Beyond that border, a token's frequencies depend on the other
sequences of the pass. Within one sequence they depend on the length of the answer, so a later pass
computes other log-probs than the engine. Such a model is exact for sequences up to the border, and
`limit_positions` refuses longer ones. There is no border if the frequencies on both sides are the
same (equal `short_factor` and `long_factor`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from agentevo.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

UNLIMITED = 1 << 30
"""The context length of a model whose config has no limit, in tokens."""
LONGEST_ROW = 131_072
"""The longest row of a training file, in tokens, if the recipe sets no limit. A model's context may
be far longer than a machine can train on."""


def context_length(config: PretrainedConfig) -> int:
    """The longest sequence that a model of this config computes, in training and in the engine, in
    tokens."""
    text_config = config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    return min([UNLIMITED if limit is None else int(limit), *_borders(text_config)])


def row_limit(context: int, max_tokens: int | None) -> int:
    """The longest row to train on, in tokens, for a model with this context length. `max_tokens`:
    the recipe's limit (data.max_tokens)."""
    return min(context, max_tokens or LONGEST_ROW)


def length_advice(config: PretrainedConfig) -> str:
    """Advice if a border makes the context shorter than `max_position_embeddings`. Otherwise an
    empty text."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    border = context_length(config)
    if border >= (limit or UNLIMITED):
        return ""
    return (
        f"beyond {border} tokens the model's RoPE (longrope) has other frequencies for the whole "
        "sequence: to train with one set of frequencies at any length, copy long_factor over "
        "short_factor (and long_mscale, if present) in the RoPE parameters of config.json"
    )


def limit_positions(model: PreTrainedModel) -> None:
    """Makes a pass beyond the border raise ModelError, instead of changing the frequencies of the
    other sequences in the pass."""
    borders = list(_borders(model.config.get_text_config()))
    for module in model.modules() if borders else ():
        if isinstance(getattr(module, "rope_type", None), str | dict):
            module.register_forward_pre_hook(
                partial(_refuse_beyond, min(borders)), with_kwargs=True
            )


def _borders(text_config: Any) -> Iterator[int]:
    """The borders of those RoPEs of the config whose frequencies depend on the length."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if not isinstance(rope, dict):
            continue

        rope_type = str(rope.get("rope_type", ""))
        if "dynamic" in rope_type:
            yield int(text_config.max_position_embeddings)
        elif rope_type == "longrope" and any(
            rope.get(f"short_{factor}") != rope.get(f"long_{factor}")
            for factor in ("factor", "mscale")
        ):
            yield int(rope["original_max_position_embeddings"])


def _refuse_beyond(border: int, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
    positions: torch.Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    longest = int(positions.max()) + 1
    if longest > border:
        raise ModelError(
            f"a sequence has {longest} tokens, but beyond {border} the frequencies of this model's "
            f"RoPE ({module.rope_type}) depend on other sequences: shorten the sequence"
        )
