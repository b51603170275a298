"""The floating-point operations that a pass of a model needs, computed from its shape. MFU (model
FLOPs utilisation) is derived from them.

    forward   2 per weight and token, 2 heads (d_qk + d_v) per query-key pair and layer
    backward  4 per trained weight and token, 2 per frozen one (only its input needs a gradient);
              twice the forward's for attention

A multiply-add is two operations (PaLM, arXiv 2204.02311, appendix B, counts so: 6 N + 12 L H Q T a
token). A query-key pair is a token and one that it attends to, itself included. Only weights of
matrix products count: embeddings are looked up. The output layer counts for the requested
predictions and not for every token; a mixture of experts counts for the experts that a token is
sent to.

Not counted: norms, activations, softmax, the optimizer, DoRA's norms, linear attention,
recomputation that saves memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

Window = int | None
"""How many tokens back a token sees, itself included; None for all."""


@dataclass(frozen=True)
class ForwardWork:
    """The work of a pass: tokens, predictions and query-key pairs."""

    tokens: int
    predictions: int
    """Tokens at which the output layer is computed."""
    pairs: Mapping[Window, int]
    """Query-key pairs of one layer, for each window that the model has."""


@dataclass(frozen=True)
class ModelFlops:
    """The counts of one model: weights, each once per token that it is multiplied with."""

    trained: float
    frozen: float
    output_trained: float
    """Weights of the output layer."""
    output_frozen: float
    per_pair: int
    """Operations of one layer's forward pass for one query-key pair."""
    layers: Mapping[Window, int]
    """Number of layers with attention, by their window."""

    @property
    def windows(self) -> tuple[Window, ...]:
        return tuple(self.layers)

    def forward(self, work: ForwardWork) -> float:
        """A pass without gradient."""
        weights = (self.trained + self.frozen) * work.tokens + (
            self.output_trained + self.output_frozen
        ) * work.predictions
        return 2 * weights + self._attention(work)

    def training(self, work: ForwardWork) -> float:
        """Forward and backward."""
        trained = self.trained * work.tokens + self.output_trained * work.predictions
        frozen = self.frozen * work.tokens + self.output_frozen * work.predictions
        return 6 * trained + 4 * frozen + 3 * self._attention(work)

    def _attention(self, work: ForwardWork) -> float:
        return self.per_pair * sum(
            count * work.pairs[window] for window, count in self.layers.items()
        )


def work_of_sequences(
    lengths: Iterable[int], predictions: int, windows: Iterable[Window]
) -> ForwardWork:
    """Sequences that are computed one by one, with causal attention."""
    lengths = list(lengths)
    return ForwardWork(
        sum(lengths),
        predictions,
        {window: sum(_pairs(length, window) for length in lengths) for window in windows},
    )


def work_of_depths(
    depths: torch.Tensor, predictions: int, windows: Iterable[Window]
) -> ForwardWork:
    """Tokens that see themselves and all before them: depths, of any shape, are numbers of tokens
    before each."""
    num_visible = depths + 1
    pairs = {
        window: int((num_visible if window is None else num_visible.clamp(max=window)).sum())
        for window in windows
    }
    return ForwardWork(depths.numel(), predictions, pairs)


def _pairs(length: int, window: Window) -> int:
    short = length if window is None else min(length, window)
    return short * (short + 1) // 2 + (length - short) * short


def model_flops(model: PreTrainedModel) -> ModelFlops:
    """Reads off a decoder of transformers, with PEFT's adapters or without."""
    inner: Any = model
    if hasattr(model, "get_base_model"):
        inner = inner.get_base_model()

    config = inner.config.get_text_config()
    output: nn.Module | None = inner.get_output_embeddings()

    flops = ModelFlops(0, 0, 0, 0, _per_pair(config), _layers(config))
    in_output = set() if output is None else set(output.modules())
    share = _share_of_experts(config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or _is_idle(
            name, getattr(model, "active_adapters", [])
        ):
            continue

        for weights, of_experts, trained in _weights(name, module, config):
            count = weights * (share if of_experts else 1)
            key = f"{'output_' if module in in_output else ''}{'trained' if trained else 'frozen'}"
            flops = replace(flops, **{key: getattr(flops, key) + count})

    return flops


def _weights(name: str, module: nn.Module, config: Any) -> Iterable[tuple[int, bool, bool]]:
    """(number, whether of experts, whether trained) of the matrices that this module itself
    multiplies by."""
    below_experts = "experts" in name.split(".")
    if isinstance(module, nn.Linear):  # a quantised one does not hold its weights as a matrix
        yield module.in_features * module.out_features, below_experts, module.weight.requires_grad
        return

    for parameter in module.parameters(recurse=False):
        if parameter.dim() >= 2:
            stacked = parameter.dim() == 3 and parameter.shape[0] == _num_experts(config)
            yield parameter.numel(), below_experts or stacked, parameter.requires_grad


def _is_idle(name: str, active: Any) -> bool:
    """A part of PEFT's that computes nothing: adapters that are not in use, and what was replaced
    by a trained copy."""
    parts = name.split(".")
    if "original_module" in parts:
        return True

    kinds = (
        "lora_A",
        "lora_B",
        "lora_embedding_A",
        "lora_embedding_B",
        "lora_magnitude_vector",
        "modules_to_save",
    )
    return any(part in kinds and following not in active for part, following in pairwise(parts))


def _num_experts(config: Any) -> int | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def _share_of_experts(config: Any) -> float:
    """The share of the experts that a token is sent to; all of them if the config does not name
    it."""
    number = _num_experts(config)
    active = next(
        (
            getattr(config, name)
            for name in ("num_experts_per_tok", "moe_topk", "top_k_experts")
            if hasattr(config, name)
        ),
        None,
    )
    return active / number if active and number else 1.0


def _per_pair(config: Any) -> int:
    heads = config.num_attention_heads
    if getattr(config, "qk_nope_head_dim", None):  # DeepSeek's latent attention
        return int(
            2 * heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
        )
    return int(4 * heads * (getattr(config, "head_dim", None) or config.hidden_size // heads))


def _layers(config: Any) -> dict[Window, int]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return {window: config.num_hidden_layers}
    windows = {"full_attention": None, "sliding_attention": window}
    return dict(Counter(windows[kind] for kind in kinds if kind in windows))
