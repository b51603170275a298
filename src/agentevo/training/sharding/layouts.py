"""Parameters that are slices of larger ones, and the consequences for gradients, their norm and
checkpoints.

A parameter is whole on every process unless the module that owns it declares a layout: then it is
this process's slice along one dimension, or it is whole but every process finds only a part of its
gradient. Such a slice is an ordinary tensor, so FSDP shards it like any other, and one optimizer
steps all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from agentevo.models.compute.parts import Cut, Saved, WeightPart, own_part
from agentevo.training.collectives import Ranks, broadcast_from, gather_slices

_KEY = "_agentevo_layouts"
"""Attribute of a module: name of its parameter -> layout. Copies of the module keep it, and so does
the module that FSDP makes from it."""


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """The division of a parameter among the processes of one group."""

    ranks: Ranks
    dim: int | None
    """The dimension that is sliced; None for a parameter that every process has whole, and whose
    gradient is the sum over the processes."""
    sizes: tuple[int, ...] = ()
    """Length of each process's slice."""
    sharing: tuple[Ranks, ...] | None = None
    """The processes over which its gradient is summed; None for all data-parallel ranks. A slice of
    experts that processes tokens of other ranks already includes their share."""

    @property
    def cut(self) -> Cut | None:
        """The place of this process's slice in the whole tensor; None for a whole one."""
        if self.dim is None:
            return None
        return Cut(self.dim, sum(self.sizes[: self.ranks.rank]), sum(self.sizes))

    def own(self, full_tensor: torch.Tensor) -> torch.Tensor:
        """This process's slice of the whole tensor."""
        if self.dim is None:
            return full_tensor
        first = sum(self.sizes[: self.ranks.rank])
        return full_tensor.narrow(self.dim, first, self.sizes[self.ranks.rank]).clone()

    def whole(self, local_slice: torch.Tensor) -> torch.Tensor:
        """The inverse of `own`, called by all processes of the group."""
        if self.dim is None:
            return local_slice
        owners = [rank for rank, size in enumerate(self.sizes) if size]
        if len(owners) == 1:
            shape = whole_shape(local_slice, self)
            return broadcast_from(local_slice, self.ranks, owners[0], shape)
        return gather_slices(local_slice, self.ranks, self.dim, self.sizes)

    def __deepcopy__(self, memo: object) -> ShardLayout:
        return self


def lay_out(module: nn.Module, name: str, layout: ShardLayout) -> None:
    """Cuts this process's slice out of a module's parameter, and records its layout."""
    parameter = module._parameters[name]
    assert parameter is not None
    if layout.dim is not None:
        sliced = nn.Parameter(layout.own(parameter.detach()), parameter.requires_grad)
        module._parameters[name] = sliced
    vars(module).setdefault(_KEY, {})[name] = layout


def layouts_by_name(model: nn.Module) -> dict[str, ShardLayout]:
    """Name of a parameter, as in the model's state dict -> its layout, where it has one."""
    return {
        f"{path}.{name}" if path else name: layout
        for path, module in model.named_modules(remove_duplicate=False)
        for name, layout in vars(module).get(_KEY, {}).items()
    }


def layouts_of(model: nn.Module) -> dict[nn.Parameter, ShardLayout]:
    """The same by the parameters themselves; called after FSDP has replaced them by its own."""
    return {
        module._parameters[name]: layout  # type: ignore[misc]
        for module in model.modules()
        for name, layout in vars(module).get(_KEY, {}).items()
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor that FSDP may have sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def add_parts(layouts: Mapping[nn.Parameter, ShardLayout]) -> None:
    """Sums the gradients that each process of a tensor group has computed a part of."""
    for parameter, layout in layouts.items():
        if layout.dim is None and parameter.grad is not None:
            distributed.all_reduce(local(parameter.grad), group=layout.ranks.group)


def gradient_norm(
    parameters: Iterable[nn.Parameter], layouts: Mapping[nn.Parameter, ShardLayout]
) -> torch.Tensor:
    """The L2 norm of the gradient of the whole model, the same on every process; all of them call
    this. Each number is counted once, wherever it is."""
    sums: dict[tuple[Any, ...], torch.Tensor] = defaultdict(lambda: torch.zeros(()))
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue

        layout = layouts.get(parameter)
        groups = _sharding_groups(grad)
        if layout is not None and layout.dim is not None:
            groups = (*groups, layout.ranks.group)

        square = local(grad).float().square().sum()
        sums[groups] = sums[groups].to(square.device) + square

    for groups, total in sums.items():
        for group in groups:
            distributed.all_reduce(total, group=group)

    return torch.stack(list(sums.values())).sum().sqrt() if sums else torch.zeros(())


def _sharding_groups(grad: torch.Tensor) -> tuple[Any, ...]:
    """The groups over which FSDP has sharded a gradient."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    return tuple(
        mesh.get_group(place) for place, how in enumerate(grad.placements) if how.is_shard()
    )


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: torch.Tensor, largest: float) -> None:
    """Scales the gradients down to a norm of `largest` where their norm is greater."""
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor.to(parameter.grad.device))


def whole_of(
    part: torch.Tensor, parameter: torch.Tensor, layout: ShardLayout | None
) -> torch.Tensor:
    """This process's part of a tensor that is divided like the parameter (its weights, a moment) ->
    the whole tensor on every process, detached; all of them call this. `part` may be FSDP's part of
    it, or an object that represents that."""
    part = part.detach()
    if isinstance(parameter, DTensor):
        if not isinstance(part, DTensor):
            part = DTensor.from_local(
                part.to(parameter.device),
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )

        part = part.full_tensor()

    return part if layout is None else layout.whole(part.to(parameter.device))


def whole_shape(parameter: torch.Tensor, layout: ShardLayout | None) -> torch.Size:
    """The shape of the whole tensor that a parameter is a part of."""
    shape = list(parameter.shape)
    if layout is not None and layout.dim is not None:
        shape[layout.dim] = sum(layout.sizes)
    return torch.Size(shape)


def kept(
    tensor: torch.Tensor, parameter: torch.Tensor, layout: ShardLayout | None
) -> torch.Tensor | WeightPart:
    """The part of a tensor, divided like the parameter, that a checkpoint keeps: this process's
    part, or all of it if every process has all. `tensor` may be FSDP's part of it."""
    cut = None if layout is None else layout.cut
    if cut is None and not isinstance(parameter, DTensor):
        return tensor.detach()
    return WeightPart.of(tensor, parameter, cut)


def part_of(saved: Saved, parameter: torch.Tensor, layout: ShardLayout | None) -> torch.Tensor:
    """The inverse of `kept`, which any process may have called: this process's part of a tensor of
    a checkpoint, in FSDP's form where FSDP has sharded the parameter."""
    return own_part(saved, parameter, None if layout is None else layout.cut)


def whole_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by their parameters' names (weights, moments of the optimizer) -> the whole ones on
    every process, detached; all of them call it, one tensor after the other."""
    layouts = layouts_by_name(model)
    return {name: whole_of(t, t, layouts.get(name)) for name, t in tensors.items()}


@torch.no_grad()
def gather_trained(model: nn.Module, target: nn.Module | None) -> None:
    """Writes the trained weights of a model that several processes hold in parts into a whole one
    of the same names, tensor by tensor. All processes call it; those without a target only give
    their parts."""
    layouts = layouts_by_name(model)
    targets = None if target is None else dict(target.named_parameters())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        full_tensor = whole_of(parameter, parameter, layouts.get(name))
        if targets is not None:
            targets[name].copy_(full_tensor)
