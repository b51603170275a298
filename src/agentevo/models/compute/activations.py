"""Chooses which tensors decoder layers keep between the forward and the backward pass (everything,
the expensive ones, or only the input), and whether they are on the device or on the CPU.

`keep_activations(model, section)` replaces the `forward` of each decoder layer with a
`CheckpointedLayer`. Modules, parameters and names stay the same. Passes without gradient call the
original `forward` directly. The backward pass recomputes the tensors that were not kept, by the
same operations on the same numbers and with the same random numbers, so the gradient is the same.

Makes glibc's allocator return freed memory to the system. By default it keeps freed blocks below
32 MiB and fragments them: at 4,096 tokens, a step of SmolLM2-135M with `memory.checkpointing=full`
then peaks at 5.4 GiB instead of 3.3 (docs/training.md).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentevo.config import MemorySection
from agentevo.errors import ModelError
from agentevo.models.compute.compiled import CompiledLayer
from agentevo.models.compute.linear import PackedWeights
from agentevo.runtime.devices import can_pin

M_MMAP_THRESHOLD = -3
"""glibc's malloc.h."""
BLOCK_BYTES = 4 * 2**20


def give_back_freed_blocks() -> None:
    """From now on, this process returns freed blocks of at least BLOCK_BYTES to the system
    immediately. The page faults cost about a sixth of a long step's time. Does nothing if the C
    library has no mallopt, or the environment sets MALLOC_MMAP_THRESHOLD_ already."""
    if sys.platform != "linux" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES)


EXPENSIVE_OPERATORS = (
    "aten::mm",
    "aten::addmm",
    "aten::linear",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "mkldnn::_linear_pointwise",
)
"""The operators whose results `selective` keeps, if this build of PyTorch has them: matrix products
and attention. Batched products are not included, because their results may be attention scores."""
IN_PLACE = frozenset({"GptOssExperts", "Llama4TextMoe"})
"""transformers' modules that change the result of a product in place, so that it can't be kept."""
SMALLEST_OFFLOAD = 64 * 1024
"""The smallest tensor that is offloaded, in bytes. Moving smaller ones costs more than it saves."""


class CheckpointedLayer(PackedWeights):
    """Replaces the `forward` of one decoder layer."""

    def __init__(self, layer: nn.Module, section: MemorySection) -> None:
        self.layer = layer
        self.section = section
        self.inner: PackedWeights | None = vars(layer).get("forward")
        """The layer's callable before the replacement (models/compute/fused.py)."""

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own `forward`: hidden_states [1, T, H] first."""
        if not torch.is_grad_enabled():
            return self._forward(hidden_states, *args, **kwargs)

        where = self._on_cpu(kwargs) if self.section.offload_activations else nullcontext()
        with where:
            if self.section.checkpointing == "none":
                return self._forward(hidden_states, *args, **kwargs)

            contexts = (
                _selective_contexts
                if self.section.checkpointing == "selective"
                else noop_context_fn
            )
            return checkpoint(
                partial(self._forward, **kwargs),
                hidden_states,
                *args,
                use_reentrant=False,
                context_fn=contexts,
            )

    def drop(self) -> None:
        """See PackedWeights.drop."""
        if self.inner is not None:
            self.inner.drop()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = partial(type(self.layer).forward, self.layer)
        if self.inner is not None:
            forward = self.inner
        return forward(*args, **kwargs)

    def _on_cpu(self, kwargs: dict[str, Any]) -> Any:
        """While the context is open, saved tensors are moved to pinned CPU memory. The layer's
        parameters and the tensors that all layers share (rotations) stay on the device."""
        return _saved_on_cpu([*self.layer.parameters(), *_tensors(kwargs)])


def keep_activations(model: PreTrainedModel, section: MemorySection) -> PreTrainedModel:
    """Applies the section, in place, to a model that `agentevo.models.compute.attention.prepare`
    has prepared. On a CPU, this also makes the allocator of the whole process keep less memory.
    Raises ModelError for a model without decoder layers of transformers' kind, and for `selective`
    if a layer changes what would be kept."""
    if section.checkpointing == "none" and not section.offload_activations:
        return model

    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no decoder layers that transformers can checkpoint: set "
            "memory.checkpointing=none and "
            "memory.offload_activations=false"
        )

    if section.checkpointing == "selective":
        # A compiled layer keeps products and attention itself, and recomputes the rest.
        layers = [
            layer for layer in layers if not isinstance(vars(layer).get("forward"), CompiledLayer)
        ]
        kinds = {type(module).__name__ for layer in layers for module in layer.modules()}
        if changing := kinds & IN_PLACE:
            raise ModelError(
                f"memory.checkpointing=selective is not possible with {', '.join(changing)}, which "
                "changes results of products in place: set it to full or none"
            )

    for layer in layers:
        layer.forward = CheckpointedLayer(layer, section)

    if next(model.parameters()).device.type == "cpu":
        give_back_freed_blocks()

    return model


@cache
def _expensive_operators() -> frozenset[Any]:
    expensive = set()
    for name in EXPENSIVE_OPERATORS:
        space, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, space), operator, None)
        if packet is not None:
            expensive.add(packet)
    return frozenset(expensive)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    packet = getattr(operator, "overloadpacket", operator)
    return (
        CheckpointPolicy.MUST_SAVE
        if packet in _expensive_operators()
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _leaves_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


@contextmanager
def _saved_on_cpu(staying: list[torch.Tensor]) -> Iterator[None]:
    """While the context is open, the tensors that autograd saves are in pinned CPU memory, one copy
    each. Tensors in `staying` and small ones stay on the device.

    Copies in both directions run on the device's current stream, in order with the computation.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in staying}
    moved: dict[
        tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]
    ] = {}  # keeps the tensors alive, so that no address is reused

    def pack(tensor: torch.Tensor) -> tuple[torch.device | None, torch.Tensor]:
        place = tensor.untyped_storage().data_ptr()
        if tensor.nbytes < SMALLEST_OFFLOAD or place in storages or not _leaves_device(tensor):
            return None, tensor

        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in moved:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=can_pin(tensor.device))
            moved[key] = tensor, copy.copy_(tensor, non_blocking=True)

        return tensor.device, moved[key][1]

    def unpack(packed: tuple[torch.device | None, torch.Tensor]) -> torch.Tensor:
        device, tensor = packed
        return tensor if device is None else tensor.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield

    moved.clear()
