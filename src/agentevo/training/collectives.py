"""Communication of processes that compute one pass together, as differentiable functions.

There are two conventions. In a tensor group every process has the same loss, and a gradient that
reaches a value that all of them hold is complete: `copied` and `added` are a pair. In a context or
expert group the losses of the processes add up, and each function here has its true adjoint:
`stretches_gathered`, `exchanged` and `routed`. Every process of a group calls the same functions in
the same order, forwards and backwards.
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
    """The processes along one dimension of a device mesh, and which of them this one is."""

    group: distributed.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh, dimension: str) -> Ranks:
        group = mesh.get_group(dimension)
        return cls(group, distributed.get_rank(group), distributed.get_world_size(group))

    @classmethod
    def imagine(cls, size: int) -> Ranks:
        """The first of `size` processes that have not been started, for checks beforehand."""
        return cls(cast(distributed.ProcessGroup, None), 0, size)

    def __deepcopy__(self, memo: object) -> Ranks:
        """A copied model is computed by the same processes."""
        return self


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _sum(grads[0], ctx.ranks), None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return _sum(x, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


class _RankColumns(torch.autograd.Function):
    """Slices [..., n_i] of the last dimension -> all of them, on every process, whose loss is the
    same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.bounds = sum(sizes[: ranks.rank]), sum(sizes[: ranks.rank + 1])
        return slices_gathered(x, ranks, -1, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first, end = ctx.bounds
        return grads[0][..., first:end], None, None


class _Stretches(torch.autograd.Function):
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


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        ranks: Ranks,
    ) -> torch.Tensor:
        ctx.how = send_sizes, receive_sizes, ranks
        return _all_to_all(x, send_sizes, receive_sizes, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        send_sizes, receive_sizes, ranks = ctx.how
        return _all_to_all(grads[0], receive_sizes, send_sizes, ranks), None, None, None


def copy_to_group(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """x, which every process of a tensor group holds and uses in part: its gradient is the sum of
    the processes' gradients."""
    out: torch.Tensor = _Copied.apply(x, ranks)
    return out


def add_over_group(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum of the x of a tensor group; every process of the group then uses it alike."""
    out: torch.Tensor = _Added.apply(x, ranks)
    return out


def columns_gathered(x: torch.Tensor, ranks: Ranks, sizes: tuple[int, ...]) -> torch.Tensor:
    """Slices [..., sizes[i]] of a tensor group -> the whole tensor; every process then uses it
    alike."""
    out: torch.Tensor = _RankColumns.apply(x, ranks, sizes)
    return out


def stretches_gathered(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Equal stretches [n, ...] of a context group -> [size * n, ...], in order of ranks."""
    out: torch.Tensor = _Stretches.apply(x, ranks)
    return out


def exchange_rows(
    x: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], ranks: Ranks
) -> torch.Tensor:
    """Rows x in order of the process that they go to, `send_sizes[i]` of them to process i -> the
    rows that arrive, `receive_sizes[i]` of them from process i."""
    out: torch.Tensor = _Routed.apply(x, send_sizes, receive_sizes, ranks)
    return out


def heads_exchanged(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """A stretch of all heads [n, size * h, D] -> all stretches of this process's heads [size * n,
    h, D]."""
    length, heads, width = x.shape
    parts = x.view(length, ranks.size, heads // ranks.size, width).transpose(0, 1)
    even = [1] * ranks.size
    return exchange_rows(parts, even, even, ranks).flatten(0, 1)


def nodes_exchanged(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The inverse of `heads_exchanged`."""
    length, heads, width = x.shape
    even = [1] * ranks.size
    parts = exchange_rows(x.view(ranks.size, length // ranks.size, heads, width), even, even, ranks)
    return parts.transpose(0, 1).flatten(1, 2)


def slices_gathered(
    x: torch.Tensor, ranks: Ranks, dim: int, sizes: tuple[int, ...]
) -> torch.Tensor:
    """Slices of sizes[i] along `dim` -> the whole tensor, on every process; no gradient."""
    widest = max(sizes)
    local_slice = x.detach().movedim(dim, 0)
    padded = local_slice.new_zeros(widest, *local_slice.shape[1:])
    padded[: len(local_slice)] = local_slice
    parts = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(parts, padded, group=ranks.group)
    cut = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(cut).movedim(0, dim).contiguous()


def owned_given(x: torch.Tensor, ranks: Ranks, owner: int, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of this shape that one process of the group has and broadcasts; no gradient."""
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
