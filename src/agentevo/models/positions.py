"""The longest sequence that a model computes, and rotary frequencies that depend on that length.

Two of transformers' types of RoPE choose frequencies by the longest position of a pass: `dynamic`
beyond `max_position_embeddings`, `longrope` (Phi-3-128k, Phi-3.5, Phi-4-mini) beyond
`original_max_position_embeddings`. Beyond that border a token's frequencies depend on the other
sequences of the pass, and, in one sequence, on the later length of the answer: a later pass
computes other log-probs than the engine. So such a model takes sequences up to the border, where it
is exact, and `hold_positions` refuses longer ones. Frequencies that are the same on both sides
(`short_factor` and `long_factor` alike) have no border.
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
"""Tokens that a model takes whose config knows no limit."""
LONGEST_ROW = 131_072
"""Tokens of the longest row of a file that is trained on where the recipe sets no limit: what a
model takes may be far more than a machine can train."""


def context_length(config: PretrainedConfig) -> int:
    """The most tokens of a sequence that a model of this config computes, in training and in the
    engine."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    return min([UNLIMITED if limit is None else int(limit), *_borders(text)])


def row_limit(context: int, max_tokens: int | None) -> int:
    """The most tokens of a row that is trained on, with a model of this context, where the recipe's
    limit (data.max_tokens) is `max_tokens`."""
    return min(context, max_tokens or LONGEST_ROW)


def length_advice(config: PretrainedConfig) -> str:
    """What to do where the context ends before the model's own does; otherwise nothing."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    border = context_length(config)
    if border >= (limit or UNLIMITED):
        return ""
    return (
        f"beyond {border} tokens its RoPE (longrope) has other frequencies for the whole sequence: "
        "to train it with one set of frequencies at any length, copy long_factor over "
        "short_factor (and long_mscale, if it has one) in the RoPE parameters of its config.json"
    )


def hold_positions(model: PreTrainedModel) -> None:
    """From now on a pass beyond the border raises ModelError instead of changing the frequencies of
    all other sequences of the pass."""
    borders = list(_borders(model.config.get_text_config()))
    for module in model.modules() if borders else ():
        if isinstance(getattr(module, "rope_type", None), str | dict):
            module.register_forward_pre_hook(
                partial(_refuse_beyond, min(borders)), with_kwargs=True
            )


def _borders(text: Any) -> Iterator[int]:
    """The longest sequences with the frequencies of short ones, for each RoPE of the config that
    depends on the length."""
    parameters = getattr(text, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if not isinstance(rope, dict):
            continue

        kind = str(rope.get("rope_type", ""))
        if "dynamic" in kind:
            yield int(text.max_position_embeddings)
        elif kind == "longrope" and any(
            rope.get(f"short_{what}") != rope.get(f"long_{what}") for what in ("factor", "mscale")
        ):
            yield int(rope["original_max_position_embeddings"])


def _refuse_beyond(border: int, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
    positions: torch.Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    longest = int(positions.max()) + 1
    if longest > border:
        raise ModelError(
            f"a sequence of {longest} tokens is longer than the {border} up to which this model's "
            f"RoPE ({module.rope_type}) gives every sequence its own frequencies: shorten it"
        )
