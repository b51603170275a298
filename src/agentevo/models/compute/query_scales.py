"""The scales of queries that depend on positions.

Llama 4 scales the queries of layers without RoPE by the position (attn_temperature_tuning), but
transformers 5.19 takes the place in the pass's row for it. `name_positions` and `query_factors`
correct that where sequences share a row or are continued. They can go when transformers uses
`position_ids`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def name_positions(model: PreTrainedModel) -> None:
    """Makes the layers that scale their queries by the place in the row pass the true positions on
    to the attention function, as `row_positions`."""
    for layer in model.modules():
        if scales_by_place(getattr(layer, "self_attn", None)):
            layer.register_forward_pre_hook(_name_positions, with_kwargs=True)


def scales_by_place(attention: object) -> bool:
    """Whether this attention module scales its queries by their place in the row."""
    return bool(getattr(attention, "attn_temperature_tuning", False)) and not getattr(
        attention, "use_rope", True
    )


def query_factors(attention: Any, positions: torch.Tensor) -> torch.Tensor:
    """[..., T] float32: what turns the scales of the places 0 to T - 1 into those of `positions`
    [..., T]. Exactly 1 where both are the same."""

    def scales(places: torch.Tensor) -> torch.Tensor:
        steps = torch.floor((places.float() + 1.0) / attention.floor_scale)
        return torch.log1p(steps) * attention.attn_scale + 1.0

    return scales(positions) / scales(torch.arange(positions.shape[-1], device=positions.device))


def _name_positions(module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any]:
    return args, {**kwargs, "row_positions": kwargs["position_ids"]}
