"""Decoder layers of the Llama family with fewer and larger operations, for passes without gradients in float32 on an x86 CPU.

A transformers decoder layer runs about forty operations; with one token in flight the overhead of each is as long as its arithmetic, and
with many, each writes its result to memory. `FusedLayer` does the same arithmetic in about twenty: one product for queries, keys and
values, norm weights multiplied into the matrices that follow, activation, gate and residual sums inside oneDNN's products, and the rotation
on queries and keys together.

The layer's modules, parameters and gradients stay as they are: a pass with gradients runs the layer's own `forward`. Results agree to
float32 rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from agentevo.models.linear import FastLinear, PackedMatrix, PackedWeights

FUSED_CLASSES = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
"""Layers whose arithmetic is exactly the one below; a subclass may differ and is left alone."""

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


class FusedLayer(PackedWeights):
    """Stands in for the `forward` of one decoder layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self.head_dim = int(attention.head_dim)
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_rotated = self.num_heads + attention.k_proj.out_features // self.head_dim
        self.scaling = float(attention.scaling)
        self.index = int(attention.layer_idx)
        self.window: int | None = getattr(attention, "sliding_window", None)
        if isinstance(layer, MistralDecoderLayer):
            self.window = getattr(attention.config, "sliding_window", None)
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.epsilon = torch.tensor(float(layer.input_layernorm.variance_epsilon))  # type: ignore[union-attr, arg-type]
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.linears = tuple((parent, name) for parent, names in ((attention, ATTENTION_LINEARS), (mlp, MLP_LINEARS)) for name in names)
        self.packed: tuple[PackedMatrix, ...] | None = None
        self.packed_of: list[tuple[nn.Module, str, torch.Tensor, int, int]] = []

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the layer's own `forward`: hidden_states [1, T, H] -> [1, T, H]."""
        plan: Any = kwargs.get("plan")
        rotation: Any = kwargs.get("position_embeddings")
        foreign = plan is None or rotation is None or hidden_states.dtype != torch.float32 or hidden_states.device.type != "cpu"
        if (
            torch.is_grad_enabled()
            or foreign
            or not hidden_states.numel()
            or not all(_is_plain(parent._modules[name]) for parent, name in self.linears)
        ):
            self.drop()
            return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)
        return self._forward(hidden_states[0], plan, rotation).unsqueeze(0)

    def drop(self) -> None:
        """See PackedWeights.drop."""
        self.packed = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the packed matrices, which can't be copied and are made again when needed."""
        return {**self.__dict__, "packed": None, "packed_of": []}

    def _forward(self, x: torch.Tensor, plan: Any, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        qkv, o, gate, up, down = self._weights()
        heads = qkv.product(self._normed(x)).view(x.shape[0], -1, self.head_dim)  # [T, query, key and value heads, D]
        rotated = self._rotated(heads[:, : self.num_rotated], *rotation)
        query, key, value = rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, self.num_rotated :]
        out = plan.attend(self.index, query, key, value, self.scaling, self.window, None)
        x = o.product_plus(out.reshape(x.shape[0], -1), x)
        normed = self._normed(x)
        return down.product_plus(up.product_times(normed, gate.product(normed, "swish")), x)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm of x [T, H] without its weight (arXiv 1910.07467), which is in the matrix that follows."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self.epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()

    def _rotated(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Query and key heads [T, heads, D] with their rotary position (arXiv 2104.09864); cos and sin [1, T, D]."""
        if self.head_norms is not None:
            q_norm, k_norm = self.head_norms
            heads = torch.cat([q_norm(heads[:, : self.num_heads]), k_norm(heads[:, self.num_heads :])], dim=1)
        half = self.head_dim // 2
        cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
        rotated = heads * cos
        rotated[..., :half].addcmul_(heads[..., half:], sin[..., :half], value=-1)
        rotated[..., half:].addcmul_(heads[..., :half], sin[..., half:])
        return rotated

    def _weights(self) -> tuple[PackedMatrix, ...]:
        """Of each product: queries-keys-values, output, gate, up, down."""
        if self.packed is None or any(_changed(*one) for one in self.packed_of):
            linears: list[Any] = [parent._modules[name] for parent, name in self.linears]
            q, k, v, o, gate, up, down = (linear.weight.detach() for linear in linears)
            norm_in, norm_mlp = (norm.weight.detach() for norm in cast(Iterable[Any], self.norms))
            biases: list[Any] = [None if linear.bias is None else linear.bias.detach() for linear in linears]
            self.packed = (
                PackedMatrix(torch.cat([q, k, v]) * norm_in, None if biases[0] is None else torch.cat(biases[:3])),
                PackedMatrix(o, biases[3]),
                PackedMatrix(gate * norm_mlp, biases[4]),
                PackedMatrix(up * norm_mlp, biases[5]),
                PackedMatrix(down, biases[6]),
            )
            self.packed_of = [
                (module, name, tensor, tensor.data_ptr(), tensor._version)
                for module in (*linears, *self.norms)
                for name, tensor in module._parameters.items()
                if tensor is not None
            ]
        return self.packed


def _changed(module: nn.Module, name: str, tensor: torch.Tensor, address: int, version: int) -> bool:
    """Is this parameter another one, elsewhere, or with other numbers than when it was packed?"""
    return module._parameters[name] is not tensor or tensor._version != version or tensor.data_ptr() != address


def _is_plain(linear: nn.Module | None) -> bool:
    """Just a product: not wrapped by an adapter, say, and nobody listening in on it."""
    return type(linear) is FastLinear and not linear._forward_hooks and not linear._forward_pre_hooks


def use_fused_layers(model: PreTrainedModel) -> int:
    """Gives every decoder layer of a known kind its `FusedLayer`; returns how many. Call after `use_fast_linear`."""
    fused = 0
    for layer in cast(Iterable[Any], model.modules()):
        if type(layer) in FUSED_CLASSES and isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation):
            layer.forward = FusedLayer(layer)
            fused += 1
    return fused
