"""Communication of processes that compute one pass together, as differentiable functions.

There are two conventions. In a tensor group every process has the same loss, and the gradient of a
value that all processes hold is complete on each of them: `copy_to_group` and `add_over_group` are
a pair. In a context or expert group the loss is the sum over the processes, and the backward pass
of `gather_stretches` and `exchange_rows` is their true adjoint. Every process of a group calls the
same functions in the same order, forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes along one dimension of a device mesh, and the rank of this process among
    them."""

    group: distributed.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh, dimension: str) -> Ranks:
        group = mesh.get_group(dimension)
        return cls(group, distributed.get_rank(group), distributed.get_world_size(group))

    @classmethod
    def imagine(cls, size: int) -> Ranks:
        """Rank 0 of `size` processes that do not exist yet, for checks before they start."""
        return cls(cast(distributed.ProcessGroup, None), 0, size)

    def __deepcopy__(self, memo: object) -> Ranks:
        """Returns the same ranks, because the same processes compute a copied model."""
        return self


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _sum(grads[0], ctx.ranks), None


class _AddOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return _sum(x, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


class _GatherColumns(torch.autograd.Function):
    """Slices [..., n_i] of the last dimension -> the whole tensor, on every process. All processes
    have the same loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.bounds = sum(sizes[: ranks.rank]), sum(sizes[: ranks.rank + 1])
        return gather_slices(x, ranks, -1, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first, end = ctx.bounds
        return grads[0][..., first:end], None, None


class _GatherStretches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        gathered = x.new_empty(ranks.size * len(x), *x.shape[1:])
        distributed.all_gather(list(gathered.chunk(ranks.size)), x.contiguous(), group=ranks.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ranks = ctx.ranks
        grad = grads[0].contiguous()
        local_grad = grad.new_empty(len(grad) // ranks.size, *grad.shape[1:])
        distributed.reduce_scatter(local_grad, list(grad.chunk(ranks.size)), group=ranks.group)
        return local_grad, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        ranks: Ranks,
    ) -> torch.Tensor:
        ctx.sizes_and_ranks = send_sizes, receive_sizes, ranks
        return _all_to_all(x, send_sizes, receive_sizes, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        send_sizes, receive_sizes, ranks = ctx.sizes_and_ranks
        return _all_to_all(grads[0], receive_sizes, send_sizes, ranks), None, None, None


def copy_to_group(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """x, which every process of a tensor group holds and uses in part. Its gradient is the sum over
    the processes."""
    out: torch.Tensor = _CopyToGroup.apply(x, ranks)
    return out


def add_over_group(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum of x over a tensor group. Every process must use the sum in the same way."""
    out: torch.Tensor = _AddOverGroup.apply(x, ranks)
    return out


def gather_columns(x: torch.Tensor, ranks: Ranks, sizes: tuple[int, ...]) -> torch.Tensor:
    """Slices [..., sizes[i]] of a tensor group -> the whole tensor. Every process must use it in
    the same way."""
    out: torch.Tensor = _GatherColumns.apply(x, ranks, sizes)
    return out


def gather_stretches(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Equal stretches [n, ...] of a context group -> [size * n, ...], in order of ranks."""
    out: torch.Tensor = _GatherStretches.apply(x, ranks)
    return out


def exchange_rows(
    x: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], ranks: Ranks
) -> torch.Tensor:
    """Sends the rows of x, sorted by receiver, `send_sizes[i]` rows to process i. Returns the
    received rows, `receive_sizes[i]` rows from process i."""
    out: torch.Tensor = _ExchangeRows.apply(x, send_sizes, receive_sizes, ranks)
    return out


def exchange_heads(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """A stretch of nodes with all heads [n, size * h, D] -> all nodes with this process's heads
    [size * n, h, D]."""
    length, heads, width = x.shape
    parts = x.view(length, ranks.size, heads // ranks.size, width).transpose(0, 1)
    equal_sizes = [1] * ranks.size
    return exchange_rows(parts, equal_sizes, equal_sizes, ranks).flatten(0, 1)


def exchange_nodes(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The inverse of `exchange_heads`."""
    length, heads, width = x.shape
    equal_sizes = [1] * ranks.size
    parts = exchange_rows(
        x.view(ranks.size, length // ranks.size, heads, width), equal_sizes, equal_sizes, ranks
    )
    return parts.transpose(0, 1).flatten(1, 2)


def gather_slices(x: torch.Tensor, ranks: Ranks, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Slices of sizes[i] along `dim` -> the whole tensor, on every process. Has no gradient."""
    widest = max(sizes)
    local_slice = x.detach().movedim(dim, 0)
    padded = local_slice.new_zeros(widest, *local_slice.shape[1:])
    padded[: len(local_slice)] = local_slice
    parts = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(parts, padded, group=ranks.group)
    slices = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(slices).movedim(0, dim).contiguous()


def broadcast_from(x: torch.Tensor, ranks: Ranks, owner: int, shape: Sequence[int]) -> torch.Tensor:
    """Broadcasts a tensor with this shape from the process `owner` to the group. Has no
    gradient."""
    tensor = x.detach().contiguous() if ranks.rank == owner else x.new_empty(shape)
    distributed.broadcast(tensor, group=ranks.group, group_src=owner)
    return tensor


def _sum(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    total = x.contiguous().clone()
    distributed.all_reduce(total, group=ranks.group)
    return total


def _all_to_all(
    x: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], ranks: Ranks
) -> torch.Tensor:
    out = x.new_empty(sum(receive_sizes), *x.shape[1:])
    distributed.all_to_all_single(
        out, x.contiguous(), list(receive_sizes), list(send_sizes), group=ranks.group
    )
    return out
