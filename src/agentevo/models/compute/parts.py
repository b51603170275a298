"""Tensors that are split over several processes. This module describes the box of the whole tensor
that each process has, and assembles whole tensors on the first process, one after the other.

A part is a box. FSDP splits rows, tensor and expert parallelism split one dimension, and both
together take a box out of a box. Processes that have the same box are replicas, and one of them
sends it.

Whole tensors are assembled on the CPU, and the consumer frees each tensor before the next one. So
the first process holds its parts and one whole tensor, never a whole model. Tensors are sent as
bytes, so every bit is preserved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from agentevo.errors import ModelError


class Cut(NamedTuple):
    """This process's slice of a tensor along one dimension."""

    dim: int
    first: int
    length: int
    """The length of the whole tensor."""


class Spec(NamedTuple):
    """The dtype and shape of a whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Box(NamedTuple):
    """The position of a part in the whole tensor."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The indices of the part in the whole tensor."""
        return tuple(
            slice(first, first + size) for first, size in zip(self.offset, self.sizes, strict=True)
        )


Grid = Sequence[Sequence[int]]
"""The starts of a tensor's boxes along each dimension. The boxes are all combinations of these
starts."""


def boxes_of(grid: Grid, shape: Sequence[int]) -> list[Box]:
    """The boxes that fill a tensor of this shape. The last dimension changes fastest. Raises
    ValueError for starts that are not a grid of the shape."""
    if len(grid) != len(shape):
        raise ValueError(f"a grid of {len(grid)} dimensions for a tensor of {len(shape)}")

    for starts, length in zip(grid, shape, strict=True):
        ascends = all(begin < end for begin, end in itertools.pairwise([*starts, length]))
        if not starts or starts[0] != 0 or not ascends:
            raise ValueError(f"boxes that begin at {list(starts)} of {length}")

    sizes = [
        [end - begin for begin, end in itertools.pairwise([*starts, length])]
        for starts, length in zip(grid, shape, strict=True)
    ]
    return [
        Box(offset, size)
        for offset, size in zip(itertools.product(*grid), itertools.product(*sizes), strict=True)
    ]


def grid_of(boxes: Collection[Box], shape: Sequence[int]) -> Grid:
    """The grid of boxes, which may be in any order. The inverse of `boxes_of`. Raises ValueError if
    the boxes don't fill the tensor, or are not all combinations of their starts."""
    grid = [sorted({box.offset[dim] for box in boxes}) for dim in range(len(shape))]
    if len(boxes) != len(set(boxes)) or set(boxes) != set(boxes_of(grid, shape)):
        raise ValueError(f"boxes {sorted(boxes)} of a tensor {tuple(shape)}")
    return grid


@dataclass(frozen=True, eq=False)
class WeightPart:
    """This process's part of a tensor."""

    local: torch.Tensor
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    offset: tuple[int, ...]
    dtype: torch.dtype | None = None
    """The dtype in which the part is sent, if it is not `local`'s."""

    @classmethod
    def of(
        cls, tensor: torch.Tensor, parameter: torch.Tensor | None = None, cut: Cut | None = None
    ) -> WeightPart:
        """The part that a tensor has on this process. The tensor may be sharded by FSDP, and may be
        within a slice. Its placement is that of a parameter; by default, its own."""
        place = tensor if parameter is None else parameter
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        shape = list(place.shape)

        offset = [0] * place.dim()
        if isinstance(place, DTensor):
            offset = list(place.__create_chunk_list__()[0].offsets)

        if cut is not None:
            shape[cut.dim] = cut.length
            offset[cut.dim] += cut.first

        return cls(local, tuple(shape), tuple(offset))

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.local.shape))

    @property
    def spec(self) -> Spec:
        """The spec of the whole tensor."""
        return Spec(self.dtype or self.local.dtype, self.shape)

    @property
    def given(self) -> torch.Tensor:
        """The part that this process sends, on the CPU."""
        return self.local.detach().to(self.spec.dtype).cpu().contiguous()

    def to(self, dtype: torch.dtype) -> WeightPart:
        """The same part, which is sent in another dtype."""
        return WeightPart(self.local, self.shape, self.offset, dtype)

    def copy_to_cpu(self) -> WeightPart:
        """A copy on the CPU, which later steps don't change."""
        copy = self.local.detach().to("cpu", self.spec.dtype, copy=True)
        return WeightPart(copy, self.shape, self.offset)


@runtime_checkable
class Stored(Protocol):
    """A tensor in a file. Any box of it can be read separately."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, box: Box | None = None) -> torch.Tensor:
        """The content of the box, or of the whole tensor, on the CPU."""
        ...


Saved = torch.Tensor | Stored
"""A whole tensor of a checkpoint, in memory or in a file."""


def own_part(saved: Saved, parameter: torch.Tensor, cut: Cut | None = None) -> torch.Tensor:
    """This process's part of a whole tensor that is sharded like the parameter. The inverse of
    `WeightPart.of`. The result is on the parameter's device. Raises ValueError if a part is needed
    and the tensor has another shape."""
    if not isinstance(parameter, DTensor) and cut is None:
        return saved.to(parameter.device) if isinstance(saved, torch.Tensor) else saved.read()

    part = WeightPart.of(parameter, cut=cut)
    if tuple(saved.shape) != part.shape:
        raise ValueError(f"a tensor {tuple(saved.shape)} for one of {part.shape}")

    box = part.box
    local = saved.read(box) if not isinstance(saved, torch.Tensor) else saved[box.slices].clone()
    local = local.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return local

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class WholeTensors:
    """On the first process: iterates over (name, whole tensor on the CPU) in the order of the
    names, while the other processes call `give`. A consumer that stops early must call `close`,
    which receives the remaining tensors. Leaving it as a context manager does the same. Raises
    ModelError if the parts do not fill a tensor."""

    def __init__(
        self, parts: Mapping[str, WeightPart], group: distributed.ProcessGroup | None = None
    ) -> None:
        """`group`: the group of all processes, for tensors on the CPU. All processes have the same
        names."""
        self._parts = parts
        self._group = group
        self._boxes = boxes_of_all(parts, group)
        self._waiting = iter(parts)
        self.specs = {name: part.spec for name, part in parts.items()}
        """The tensors, in the order in which they are yielded."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        name = next(self._waiting)
        part = self._parts[name]
        givers = self._givers(name)
        tensor = _with_own_part(part)
        self._take(tensor, givers)

        num_found = sum(math.prod(box.sizes) for box in givers.values())
        num_expected = tensor.numel()
        if num_found != num_expected:
            raise ModelError(
                f"{name}: processes have parts of {num_found} elements of a tensor of "
                f"{num_expected}: this is a defect, please report it"
            )

        return name, tensor

    def close(self) -> None:
        """Receives the remaining tensors and discards them."""
        for name in self._waiting:
            part = self._parts[name]
            self._take(torch.empty(part.shape, dtype=part.spec.dtype), self._givers(name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _givers(self, name: str) -> dict[int, Box]:
        return givers_of([boxes[name] for boxes in self._boxes])

    def _take(self, tensor: torch.Tensor, givers: Mapping[int, Box]) -> None:
        """Copies the parts of the other processes into the whole tensor `tensor`."""
        for process, box in givers.items():
            if process == 0:
                continue
            received = torch.empty(box.sizes, dtype=tensor.dtype)
            distributed.recv(as_bytes(received), group=self._group, group_src=process)
            tensor[box.slices] = received


def give(parts: Mapping[str, WeightPart], group: distributed.ProcessGroup | None = None) -> None:
    """On the other processes: sends their parts while the first process iterates over
    `WholeTensors`."""
    boxes = boxes_of_all(parts, group)
    me = distributed.get_rank(group)
    for name, part in parts.items():
        if me in givers_of([of_one[name] for of_one in boxes]):
            distributed.send(as_bytes(part.given), group=group, group_dst=0)


def boxes_of_all(
    parts: Mapping[str, WeightPart], group: distributed.ProcessGroup | None
) -> list[dict[str, Box]]:
    """The positions of the parts of each process. All processes must call it."""
    boxes = {name: part.box for name, part in parts.items()}
    if not distributed.is_initialized():
        return [boxes]
    of_all: list[dict[str, Box]] = [{}] * distributed.get_world_size(group)
    distributed.all_gather_object(of_all, boxes, group=group)
    return of_all


def givers_of(boxes: list[Box]) -> dict[int, Box]:
    """Process -> the box of one tensor that it sends. Of the processes with the same box, the first
    one sends it."""
    givers: dict[Box, int] = {}
    for process, box in enumerate(boxes):
        if math.prod(box.sizes):
            givers.setdefault(box, process)
    return {process: box for box, process in givers.items()}


def _with_own_part(part: WeightPart) -> torch.Tensor:
    """An otherwise empty whole tensor with this process's part in it."""
    if tuple(part.local.shape) == part.shape:
        return part.given
    tensor = torch.empty(part.shape, dtype=part.spec.dtype)
    tensor[part.box.slices] = part.given
    return tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor on the CPU, as a view."""
    return tensor.reshape(-1).view(torch.uint8)
