"""One attention function for every transformers model, steered by a plan.

`prepare(model)` points the model at it. Each forward pass then carries `plan=...`, an object that
knows which token may see which:

    inference: `CacheAttention` (inference/cache_attention.py), new tokens against a key-value cache
    training:  `TreeAttention` (training/tree_attention.py), packed sequences that share prefixes

Tokens of all sequences lie side by side in one row, [1, tokens], without padding; only the plan
tells them apart. So the model module is the same one for generation and for training.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from agentevo.errors import ModelError
from agentevo.models.fused import use_fused_layers
from agentevo.models.isolation import check_isolation, check_layer_types
from agentevo.models.linear import use_fast_linear

NAME = "agentevo"


class AttentionPlan(Protocol):
    """Who sees whom in one forward pass."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """q [T, H, D], k and v [T, Hkv, D] -> [T, H, D]. `window`: how many tokens back a token
        sees, itself included; None for all."""
        ...


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T,
    H, D]."""
    if plan is None:
        raise ModelError(
            "this model was prepared for AgentEvo: call it with plan=..., or "
            "model.set_attn_implementation('sdpa') to use it alone"
        )
    if kwargs.get("s_aux") is not None:
        raise ModelError(
            "attention sinks (as in gpt-oss) are not supported by AgentEvo's attention: use "
            "another model"
        )
    if attention_mask is not None:
        raise ModelError(
            "the model brings an attention mask of its own, which AgentEvo's attention would "
            "ignore: use another model"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = plan.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale,
        sliding_window,
        softcap,
    )
    return out.unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The plan knows who sees whom; no mask tensor is built."""


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Points the model's attention here and, on a CPU, its linear layers at oneDNN. In place;
    parameters stay the same objects.

    Raises ModelError for an architecture that does not go through transformers' attention
    interface, or in which tokens meet elsewhere too (models/isolation.py).
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{type(model).__name__} does not use transformers' attention interface, which "
            "AgentEvo needs: choose a Llama, Qwen, "
            "Mistral, Gemma or similar decoder"
        )
    check_layer_types(model)
    model.set_attn_implementation(NAME)
    check_isolation(model)
    if next(model.parameters()).device.type == "cpu" and use_fast_linear(model):
        use_fused_layers(model)
    return model
