"""Computes hidden states from token ids through a decoder's `FusedLayer`s, without the overhead of
the decoder's own `forward`.

A pass of a transformers decoder does more than its layers: it checks whether to build a mask,
collects the requested records, and calls each layer as a module. For one new token, this takes a
tenth of the pass. `FusedDecoder` calls embeddings, rotary positions, layers and norm in sequence if
all layers are fused (`models/compute/fused.py`) and there are no hooks. Otherwise the decoder's own
`forward` runs. The results equal those of the decoder's own `forward`, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from agentevo.models.compute.fused import FusedLayer
from agentevo.models.compute.linear import PackedMatrix

DECODERS = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
"""The classes of decoders that consist of exactly embeddings, rotary positions, layers and norm.
Subclasses may differ and are not replaced."""
SUPPORTED_ARGUMENTS = frozenset({"input_ids", "plan", "position_ids", "use_cache"})
"""The arguments that `FusedDecoder` supports. All others must be None."""
RECORDED = ("output_hidden_states", "output_attentions")
"""The settings of a model's configuration that request more than the last hidden states."""


class FusedDecoder:
    """Replaces the `forward` of one decoder."""

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the decoder's own `forward`: input_ids [1, T] -> hidden states [1, T, H]."""
        straight = not args and self._wants_only_states(kwargs)
        layers = self._layers() if straight else None
        if layers is None:
            return type(self.decoder).forward(self.decoder, *args, **kwargs)

        decoder: Any = self.decoder
        embedded = decoder.embed_tokens(kwargs["input_ids"])
        rotation = decoder.rotary_emb(embedded, position_ids=kwargs["position_ids"])
        x = embedded[0]
        plan = kwargs["plan"]
        for layer, weights in layers:
            x = layer.of_tokens(x, weights, plan, rotation)

        return BaseModelOutputWithPast(last_hidden_state=decoder.norm(x).unsqueeze(0))

    def _wants_only_states(self, kwargs: dict[str, Any]) -> bool:
        """Whether the arguments are input ids and the caller wants only hidden states, in float32
        on a CPU. Elsewhere no layer packs its weights."""
        decoder: Any = self.decoder
        ids = kwargs.get("input_ids")
        embeddings = decoder.embed_tokens.weight
        return (
            not torch.is_grad_enabled()
            and ids is not None
            and ids.numel() > 0
            and embeddings.dtype == torch.float32
            and embeddings.device.type == "cpu"
            and kwargs.get("plan") is not None
            and kwargs.get("position_ids") is not None
            and kwargs.get("use_cache") is False
            and not any(
                value is not None
                for name, value in kwargs.items()
                if name not in SUPPORTED_ARGUMENTS
            )
            and not any(getattr(decoder.config, name, False) for name in RECORDED)
        )

    def _layers(self) -> list[tuple[FusedLayer, tuple[PackedMatrix, ...]]] | None:
        """Every layer with its current weights. None if a layer is not fused, or has hooks and must
        be called as a module."""
        layers: list[tuple[FusedLayer, tuple[PackedMatrix, ...]]] = []
        decoder: Any = self.decoder
        for layer in decoder.layers:
            fused = vars(layer).get("forward")
            listened = layer._forward_hooks or layer._forward_pre_hooks
            if (
                listened
                or not isinstance(fused, FusedLayer)
                or (weights := fused.weights()) is None
            ):
                return None
            layers.append((fused, weights))

        return layers


def use_fused_decoder(model: PreTrainedModel) -> None:
    """Replaces the `forward` of the decoder of `model` by a `FusedDecoder`, if its class is known
    and its layers are fused. Call this after `use_fused_layers`."""
    for module in model.modules():
        layers: Any = getattr(module, "layers", ())
        if type(module) in DECODERS and all(
            isinstance(vars(layer).get("forward"), FusedLayer) for layer in layers
        ):
            module.forward = FusedDecoder(module)
