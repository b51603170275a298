"""Computes the floating-point operations of a model's pass from the model's shape. MFU (model FLOPs
utilisation) is derived from them.

    forward   2 per weight and token, 2 heads (d_qk + d_v) per query-key pair and layer
    backward  4 per trained weight and token, 2 per frozen one (only its input needs a gradient);
              twice the forward's for attention

A multiply-add counts as two operations, as in PaLM (arXiv 2204.02311, appendix B: 6 N + 12 L H Q T
per token). A query-key pair is a token and a token that it attends to, itself included. Only
weights of matrix products count. Embeddings do not, because they are looked up. The output layer
counts only for the requested predictions, and a mixture of experts only for the experts that a
token is sent to.

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

from agentevo.models.compute.windows import Chunk, Window, first_seen, num_pairs


@dataclass(frozen=True)
class ForwardWork:
    """The work of a pass: tokens, predictions and query-key pairs."""

    tokens: int
    predictions: int
    """The number of tokens at which the output layer is computed."""
    pairs: Mapping[Window, int]
    """The number of query-key pairs of one layer, for each window of the model."""


@dataclass(frozen=True)
class ModelFlops:
    """The counts of one model. A weight counts once for each token that it is multiplied with."""

    trained: float
    frozen: float
    output_trained: float
    """The trained weights of the output layer."""
    output_frozen: float
    per_pair: int
    """The operations of one layer's forward pass for one query-key pair."""
    layers: Mapping[Window, int]
    """Window -> the number of layers with attention that have it."""

    @property
    def windows(self) -> tuple[Window, ...]:
        return tuple(self.layers)

    def forward(self, work: ForwardWork) -> float:
        """The operations of a pass without gradient."""
        weights = (self.trained + self.frozen) * work.tokens + (
            self.output_trained + self.output_frozen
        ) * work.predictions
        return 2 * weights + self._attention(work)

    def training(self, work: ForwardWork) -> float:
        """The operations of a forward and backward pass."""
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
    """The work of sequences that are computed separately, with causal attention."""
    lengths = list(lengths)
    return ForwardWork(
        sum(lengths),
        predictions,
        {window: sum(num_pairs(length, window) for length in lengths) for window in windows},
    )


def work_of_depths(
    depths: torch.Tensor, predictions: int, windows: Iterable[Window]
) -> ForwardWork:
    """The work of tokens that see themselves and all tokens before them. `depths`, of any shape,
    has the number of tokens before each."""
    windows = list(windows)
    hidden: dict[Window, torch.Tensor] = {
        w: first_seen(depths, w).clamp(min=0) for w in windows if w is not None
    }
    pairs = {window: int((depths + 1 - hidden.get(window, 0)).sum()) for window in windows}
    return ForwardWork(depths.numel(), predictions, pairs)


def model_flops(model: PreTrainedModel) -> ModelFlops:
    """The counts of a decoder of transformers, with or without PEFT's adapters."""
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
    """(number of weights, whether they belong to experts, whether they are trained) of each matrix
    that this module itself multiplies by."""
    below_experts = "experts" in name.split(".")
    if isinstance(module, nn.Linear):  # a quantised layer does not store its weights as a matrix
        yield module.in_features * module.out_features, below_experts, module.weight.requires_grad
        return

    for parameter in module.parameters(recurse=False):
        if parameter.dim() >= 2:
            stacked = parameter.dim() == 3 and parameter.shape[0] == _num_experts(config)
            yield parameter.numel(), below_experts or stacked, parameter.requires_grad


def _is_idle(name: str, active: Any) -> bool:
    """Whether the module is a part of PEFT that computes nothing: an inactive adapter, or a module
    that was replaced by a trained copy."""
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
    """The share of the experts that a token is sent to; 1 if the config does not name it."""
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

    windows: dict[str, Window] = {"full_attention": None, "sliding_attention": window}
    if "chunked_attention" in kinds:
        windows["chunked_attention"] = Chunk(config.attention_chunk_size)
    return dict(Counter(windows[kind] for kind in kinds if kind in windows))
