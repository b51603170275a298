"""A model whose weights are split over several processes (FSDP, `torch.distributed.fsdp`).

Each decoder layer is one group, whose weights are gathered while the layer computes. Embeddings,
the last norm and the output layer are the root's group. It stays gathered until the backward pass
ends, because the chunked output layer needs its whole weight. Gradients are summed over ranks,
because each rank's loss is a part of the minibatch's loss. The shards are always float32, whatever
the compute dtype: they are the master weights.

Tower and projector of a model that is shown images stay whole on each process, in the compute
dtype. A rank without images does not call them, so they can't gather weights from all ranks.

All ranks run every pass together, so all ranks run the same number of passes
(`passes.null_batches`). To write weights, the first process assembles them tensor by tensor
(`parts.py`).

Layers with packed copies of their weights (models/compute/linear.py, models/compute/fused.py) are
replaced by plain layers, because gathered weights are temporary.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentevo.errors import ModelError
from agentevo.models.compute.activations import CheckpointedLayer
from agentevo.models.compute.fused import FusedLayer
from agentevo.models.compute.fused_decoder import FusedDecoder
from agentevo.models.compute.linear import FastLinear
from agentevo.models.vision.parts import language_modules, processor_of, vision_parameters


@dataclass(frozen=True, eq=False)
class _Sharding:
    skeleton: PreTrainedModel
    """The model as it was before it was sharded, without its weights."""
    mesh: DeviceMesh
    own_meshes: Mapping[str, DeviceMesh]
    """Name of a module -> the other mesh over which its weights are split."""
    dtype: torch.dtype
    """The dtype in which the model computes."""


_SHARDED: WeakKeyDictionary[nn.Module, _Sharding] = WeakKeyDictionary()


def shard(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    own_meshes: Mapping[str, DeviceMesh] = MappingProxyType({}),
) -> PreTrainedModel:
    """Shards the model in place over the mesh, on the mesh's kind of device. The mesh has the
    dimension `shard`, optionally after `replicate`. Every process calls it with the same weights.
    Modules named in `own_meshes` are sharded over their own mesh instead: experts, which differ
    between the processes of `mesh`. Raises ModelError for a base in 8 or 4 bits, and for a model
    without decoder layers of transformers' kind."""
    check_shard(model)
    # AgentEvo never changes a model's outputs in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    make_plain(model)
    hollow = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in model.parameters()
    }
    skeleton = copy.deepcopy(model, cast(dict[int, Any], hollow))
    sharding = _Sharding(skeleton, mesh, dict(own_meshes), next(model.parameters()).dtype)
    return _apply(model, sharding)


def check_shard(model: PreTrainedModel) -> None:
    """Raises ModelError for a model that can't be sharded; see `shard`."""
    if not all(parameter.is_floating_point() for parameter in model.parameters()):
        raise ModelError(
            "trainer.parallel.shard: a base in 8 or 4 bits (model.lora.quantize) can't be "
            "sharded: set model.lora.quantize=none, or leave trainer.parallel.shard out"
        )

    if not _layers(model):
        raise ModelError(
            f"{type(model).__name__} has no decoder layers that can be sharded one by one: leave "
            "trainer.parallel.shard out"
        )


def is_sharded(model: nn.Module) -> bool:
    return model in _SHARDED


def any_sharded() -> bool:
    """Whether this process has a part of any sharded model. Passes then need all ranks."""
    return len(_SHARDED) > 0


@torch.no_grad()
def copy_sharded(
    policy: PreTrainedModel, change: Callable[[PreTrainedModel], None] = lambda twin: None
) -> PreTrainedModel:
    """Copies a sharded model, with the same sharding. Each process copies its own part. `change`
    can replace layers of the copy before it has weights. Weights that the policy does not have are
    0."""
    sharding = _SHARDED[policy]
    device = next(policy.parameters()).device
    twin = copy.deepcopy(sharding.skeleton)
    change(twin)
    buffers = {name: buffer.clone() for name, buffer in twin.named_buffers()}
    _apply(twin, sharding)
    cast(nn.Module, twin).to_empty(device=device)

    for name, buffer in twin.named_buffers():
        buffer.copy_(buffers[name])

    sources = dict(policy.named_parameters())
    for name, parameter in twin.named_parameters():
        source = sources.get(name)
        if source is not None and source.shape == parameter.shape:
            parameter.copy_(source)
        else:
            parameter.zero_()

    return twin


def skeleton_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without weights, in the dtypes that it has outside of training."""
    return _SHARDED[model].skeleton if model in _SHARDED else model


def note_change(model: nn.Module) -> None:
    """Discards the gathered weights. Call it after code has changed their shards."""
    if isinstance(model, FSDPModule):
        model.reshard()


def _apply(model: PreTrainedModel, sharding: _Sharding) -> PreTrainedModel:
    low = sharding.dtype if sharding.dtype.itemsize < torch.float32.itemsize else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    groups = [(model.get_submodule(name), mesh) for name, mesh in sharding.own_meshes.items()]
    groups += [(module, sharding.mesh) for module in (*_layers(model), model)]
    whole: set[nn.Parameter] = set()
    if processor_of(model) is not None:
        whole = {parameter for _, parameter in vision_parameters(model)}
        model.register_forward_hook(_drop_features)

    for module, mesh in groups:  # only one group at a time is whole on the device and in float32
        place(module, torch.device(mesh.device_type), trained_as=torch.float32, keep_dtype=whole)
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=whole)

    for module, _ in groups:
        group = cast(FSDPModule, module)
        group.set_force_sum_reduction_for_comms(True)
        group.set_gradient_divide_factor(1.0)

    _SHARDED[model] = sharding
    return model


def _drop_features(model: nn.Module, inputs: object, output: Any) -> None:
    """Removes the features of images from the model's output, where nobody reads them. FSDP gathers
    weights when the gradient of an output arrives, and ranks without images would not take part."""
    if getattr(output, "image_hidden_states", None) is not None:
        output["image_hidden_states"] = None


def place(
    module: nn.Module,
    device: torch.device,
    *,
    trained_as: torch.dtype | None = None,
    keep_dtype: Container[nn.Parameter] = (),
) -> None:
    """Moves the weights and buffers that are not split to the device. Trained weights get the dtype
    `trained_as`, if it is set, except those in `keep_dtype`. In place; parameters stay the same
    objects."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            continue

        target = parameter.device if parameter.is_meta else device
        is_cast = parameter.requires_grad and parameter not in keep_dtype
        dtype = trained_as if is_cast and trained_as is not None else parameter.dtype
        parameter.data = parameter.data.to(target, dtype)

    for buffer in module.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.data.to(device)


def _layers(model: nn.Module) -> list[nn.Module]:
    modules = model.modules() if processor_of(model) is None else language_modules(model)
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


def make_plain(model: nn.Module) -> None:
    """Replaces, in place, the layers that have packed copies of their weights by plain ones. The
    layers with packed copies round differently, which AdamW's first steps amplify."""
    for parent in list(model.modules()):
        stand_in = vars(parent).get("forward")
        if isinstance(stand_in, FusedLayer | FusedDecoder):
            del parent.forward
        elif isinstance(stand_in, CheckpointedLayer) and isinstance(stand_in.inner, FusedLayer):
            stand_in.inner = None

        for name, child in list(parent.named_children()):
            if type(child) is FastLinear:
                plain = nn.Linear(1, 1, bias=child.bias is not None, device="meta")
                plain.in_features = child.in_features
                plain.out_features = child.out_features
                plain.weight = child.weight
                plain.bias = child.bias
                setattr(parent, name, plain)
