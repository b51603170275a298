"""Computes decoder layers of the Llama family in fewer and larger operations, for passes without
gradients in float32 on an x86 CPU.

A transformers decoder layer runs about forty operations. With a single token, the overhead of each
operation takes as long as its arithmetic. With many tokens, each operation writes its result to
memory. `FusedLayer` needs about twenty operations for the same arithmetic. It has one product for
queries, keys and values, and rotates queries and keys together. It multiplies norm weights into the
following matrices, and computes activation, gate and residual sums inside oneDNN's products. If
`cpu_kernels` are available, norm, rotation and gate are one kernel each.

The layer's modules, parameters and gradients do not change: a pass with gradients runs the layer's
own `forward`. Results agree to float32 rounding. The packed copies include LoRA adapters
(`effective`), so generation costs the same with and without them.

Computes the single matrix and bias that are equivalent to a linear layer in a pass without
gradients, with or without LoRA adapters around it.

    W' = W + sum_i scale_i B_i A_i                          (LoRA, arXiv 2106.09685)
    W' = m / ||W + scale B A|| (W + scale B A), row by row   (DoRA, arXiv 2402.09353)

The layer itself does not change: W and the adapters are not merged in place. PEFT's layer is
recognised by its name and public attributes, so this module does not import PEFT.
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

from agentevo.models.compute.cpu_kernels import WHOLE, cpu_kernels
from agentevo.models.compute.linear import FastLinear, PackedMatrix, PackedWeights


def ingredients(linear: nn.Module | None) -> list[torch.Tensor | float] | None:
    """All tensors and numbers that the layer's product depends on, in a fixed order. None if the
    layer computes more than a product: it has hooks, active dropout, or adapters of other kinds or
    on other layers."""
    if type(linear) is FastLinear:
        parameters = linear._parameters.values()  # faster than lookups by name
        return (
            None
            if _has_hooks(linear)
            else [parameter for parameter in parameters if parameter is not None]
        )

    if not _is_lora(linear):
        return None

    layer: Any = linear
    if (
        type(layer.base_layer) is not FastLinear
        or layer.merged
        or layer.fan_in_fan_out
        or _has_hooks(layer)
        or _has_hooks(layer.base_layer)
    ):
        return None

    base = layer.base_layer
    tensors: list[torch.Tensor | float] = [base.weight]
    tensors += [] if base.bias is None else [base.bias]
    names = active_names(layer)
    for name in names:
        variant = layer.lora_variant.get(name)
        dora = type(variant).__name__ == "DoraLinearVariant"
        dropout = layer.lora_dropout[name]

        if (variant is not None and not (dora and len(names) == 1)) or layer.lora_B[
            name
        ].bias is not None:
            return None

        if not isinstance(dropout, nn.Identity) and (dropout.training or layer.training):
            return None

        tensors += [layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]]
        tensors += [layer.lora_magnitude_vector[name].weight] if dora else []

    return tensors


def effective(linear: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The effective matrix [out, in] and bias [out] (or None), detached, of a layer that has
    `ingredients`."""
    layer: Any = linear
    if type(linear) is FastLinear:
        return layer.weight.detach(), None if layer.bias is None else layer.bias.detach()

    weight, bias = effective(layer.base_layer)
    for name in active_names(layer):
        weight = torch.addmm(
            weight,
            layer.lora_B[name].weight.detach(),
            layer.lora_A[name].weight.detach(),
            alpha=layer.scaling[name],
        )
        if name in layer.lora_variant:
            magnitude = layer.lora_magnitude_vector[name].weight.detach()
            weight = weight * (magnitude / torch.linalg.vector_norm(weight, dim=1)).unsqueeze(1)

    return weight, bias


def active_names(layer: Any) -> list[str]:
    """The names of a PEFT layer's active adapters."""
    return (
        []
        if layer.disable_adapters
        else [name for name in layer.active_adapters if name in layer.lora_A]
    )


def _is_lora(linear: nn.Module | None) -> bool:
    return type(linear).__name__ == "Linear" and type(linear).__module__ == "peft.tuners.lora.layer"


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


FUSED_CLASSES = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
"""The classes of layers that compute exactly what this module computes. Subclasses may differ and
are not replaced."""

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


class FusedLayer(PackedWeights):
    """Replaces the `forward` of one decoder layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self.head_dim = int(attention.head_dim)
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_rotated = self.num_heads + attention.k_proj.out_features // self.head_dim
        self.scaling = float(attention.scaling)

        self.window: int | None = getattr(attention, "sliding_window", None)
        if isinstance(layer, MistralDecoderLayer):
            self.window = getattr(attention.config, "sliding_window", None)

        self.attention = attention
        self.has_head_norms = hasattr(attention, "q_norm")
        self.epsilon = float(layer.input_layernorm.variance_epsilon)  # type: ignore[union-attr, arg-type]
        self.epsilon_tensor = torch.tensor(self.epsilon)
        self.norm_class = type(layer.input_layernorm)
        self.linears = tuple(
            (parent, name)
            for parent, names in ((attention, ATTENTION_LINEARS), (mlp, MLP_LINEARS))
            for name in names
        )
        self.packed: tuple[PackedMatrix, ...] | None = None
        self.packed_of: list[torch.Tensor | float] = []
        self.packed_state: list[tuple[int, int, int] | float] = []

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the layer's own `forward`: hidden_states [1, T, H] -> [1, T, H]."""
        plan: Any = kwargs.get("plan")
        rotation: Any = kwargs.get("position_embeddings")
        foreign = (
            plan is None
            or rotation is None
            or hidden_states.dtype != torch.float32
            or hidden_states.device.type != "cpu"
        )
        unusual = torch.is_grad_enabled() or foreign or not hidden_states.numel()
        weights = None if unusual else self.weights()
        if weights is None:
            self.drop()
            return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)

        return self.of_tokens(hidden_states[0], weights, plan, rotation).unsqueeze(0)

    @property
    def can_replace_layer(self) -> bool:
        """Whether it can compute in place of the layer, judged by the layer's modules."""
        return self._ingredients() is not None

    def weights(self) -> tuple[PackedMatrix, ...] | None:
        """The matrices of the products (queries-keys-values, output, gate, up, down), packed from
        the layer's current weights. None if the layer computes more than these products."""
        made_of = self._ingredients()
        return None if made_of is None else self._packed_for(made_of)

    def drop(self) -> None:
        """See PackedWeights.drop."""
        self.packed = None

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies. It leaves out the packed matrices, which can't be copied and are
        packed again when needed."""
        return {**self.__dict__, "packed": None, "packed_of": [], "packed_state": []}

    def of_tokens(
        self,
        x: torch.Tensor,
        weights: tuple[PackedMatrix, ...],
        plan: Any,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """The hidden states x [T, H] after this layer. `weights`: what `weights()` returned."""
        qkv, o, gate, up, down = weights
        heads = qkv.product(self._normalise(x)).view(
            x.shape[0], -1, self.head_dim
        )  # [T, query, key and value heads, D]
        query, key = self._rotate(heads, *rotation)
        value = heads[:, self.num_rotated :]
        out = plan.attend(query, key, value, self.scaling, self.window, None)
        x = o.product_plus(out.reshape(x.shape[0], -1), x)
        normed = self._normalise(x)
        return down.product_plus(self._gate(normed, gate, up), x)

    def _gate(self, x: torch.Tensor, gate: PackedMatrix, up: PackedMatrix) -> torch.Tensor:
        """SiLU of the gate product, times the up product."""
        kernels = cpu_kernels()
        if kernels is None or gate.num_outputs % WHOLE:
            return up.product_times(x, gate.product(x, "swish"))
        return kernels.gate_in_place(gate.product(x), up.product(x))

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        """The RMS norm of x [T, H] (arXiv 1910.07467) without its weight, which the following
        matrix includes."""
        if (kernels := cpu_kernels()) is not None:
            return kernels.rms_norm(x, self.epsilon)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean = torch.addcmul(self.epsilon_tensor, length, length, value=1 / x.shape[-1])
        return x * mean.rsqrt_()

    def _rotate(
        self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies rotary positions (arXiv 2104.09864) to the query and key heads of heads [T, all,
        D]. cos and sin are [1, T, D]."""
        num_q = self.num_heads
        num_k = self.num_rotated - self.num_heads
        if self.has_head_norms:
            query = heads[:, :num_q]
            key = heads[:, num_q : self.num_rotated]
            heads = torch.cat([self.attention.q_norm(query), self.attention.k_norm(key)], dim=1)

        if (kernels := cpu_kernels()) is not None:
            return kernels.rotate(heads, num_q, num_k, cos[0], sin[0])

        heads = heads[:, : self.num_rotated]
        cos = cos.transpose(0, 1)  # [T, 1, D]
        sin = sin.transpose(0, 1)  # [T, 1, D]
        rotated = heads * cos
        low, high = heads.chunk(2, -1)
        sin_low, sin_high = sin.chunk(2, -1)
        rotated_low, rotated_high = rotated.chunk(2, -1)
        rotated_low.addcmul_(high, sin_low, value=-1)
        rotated_high.addcmul_(low, sin_high)

        return rotated[:, :num_q], rotated[:, num_q:]

    def _ingredients(self) -> list[torch.Tensor | float] | None:
        """All tensors and numbers from which the matrices are packed. None if a module is of an
        unexpected kind."""
        made_of: list[torch.Tensor | float] = []
        for parent, name in self.linears:
            of_linear = ingredients(parent._modules[name])
            if of_linear is None:
                return None
            made_of += of_linear

        for name in NORMS:
            norm: Any = self.layer._modules[name]
            if type(norm) is not self.norm_class:
                return None
            made_of.append(cast(Any, norm).weight)

        return made_of

    def _packed_for(self, made_of: list[torch.Tensor | float]) -> tuple[PackedMatrix, ...]:
        state = [
            (id(item), item.data_ptr(), item._version) if isinstance(item, torch.Tensor) else item
            for item in made_of
        ]
        if self.packed is None or state != self.packed_state:
            (q, q_bias), (k, k_bias), (v, v_bias), o, (gate, gate_bias), (up, up_bias), down = (
                effective(cast(nn.Module, parent._modules[name])) for parent, name in self.linears
            )
            norm_in, norm_mlp = (
                cast(Any, self.layer._modules[name]).weight.detach() for name in NORMS
            )
            self.packed = (
                PackedMatrix(
                    torch.cat([q, k, v]) * norm_in,
                    None if q_bias is None else torch.cat(cast(Any, [q_bias, k_bias, v_bias])),
                ),
                PackedMatrix(*o),
                PackedMatrix(gate * norm_mlp, gate_bias),
                PackedMatrix(up * norm_mlp, up_bias),
                PackedMatrix(*down),
            )
            self.packed_of = made_of  # keeps the ids in packed_state from being reused
            self.packed_state = state

        return self.packed


def use_fused_layers(model: PreTrainedModel) -> int:
    """Replaces the `forward` of every decoder layer of a known kind by a `FusedLayer`. Returns
    their number. Call this after `use_fast_linear`."""
    fused = 0
    for layer in cast(Iterable[Any], model.modules()):
        plain_norms = type(layer) in FUSED_CLASSES and all(
            type(layer._modules[name]).__name__.endswith("RMSNorm") for name in NORMS
        )
        if plain_norms and isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation):
            layer.forward = FusedLayer(layer)
            fused += 1

    return fused
