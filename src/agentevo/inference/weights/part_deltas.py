"""The changes of weights in parts on several processes: each process compares its current part with
the published one, and sends only the difference to the first process.

    keep      each process copies the boxes that it gives: these were published
    compare   each compares them with what it has now, and sends the first one the sizes of what
              changed, and the checksum of each box
    give      the others send what changed; the first one writes it (`PartsDelta.taken`)

If several processes have a box (a replica, or a norm under tensor parallelism), only the first of
them keeps and compares it. Each box packs its changes with indices within the box, and a reader
applies them to the box (`Grid`). All processes make each of these calls, in the same order. Only
the first process knows whether it has written the version, so the others keep their copies until
the first one calls `keep`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import distributed

from agentevo.errors import ModelError
from agentevo.inference.weights.weight_delta import box_keys, change_of, checksum, combine_checksums
from agentevo.models.compute.parts import (
    Box,
    Grid,
    Spec,
    WeightPart,
    as_bytes,
    boxes_of,
    boxes_of_all,
    give,
    givers_of,
    grid_of,
)
from agentevo.models.files.split_models import (
    CompareParts,
    GiveChanges,
    GiveParts,
    KeepParts,
    PartsCommand,
)


class BoxDifference(NamedTuple):
    """The result of comparing one box on one process."""

    box: Box
    changes: dict[str, Spec]
    """Kind -> sizes: `gaps` and `values`, or `whole`. Empty if nothing changed."""
    sha256: str
    """The checksum of the box's current content."""


class PublishedParts:
    """This process's part of the version that was published last; see the module."""

    def __init__(
        self,
        own_parts: Callable[[bool], Mapping[str, WeightPart]],
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        """`own_parts`: see InParts; trained tensors alone are published. `group`: all
        processes, for tensors on the CPU."""
        self._own_parts = own_parts
        self._group = group
        self._kept: dict[str, tuple[Box, torch.Tensor]] = {}
        self._changes: dict[str, dict[str, torch.Tensor]] = {}
        """The changes of the boxes that are not sent whole."""

    def carry_out(self, command: PartsCommand) -> None:
        """On the others: does this process's part of what the first one begins."""
        match command:
            case GiveParts(only_trained):
                give(self._own_parts(only_trained), self._group)
            case CompareParts():
                self.compare()
            case GiveChanges():
                self.give()
            case KeepParts():
                self.keep()

    def keep(self) -> None:
        """Keeps a copy of the current weights, which were just published."""
        self._changes = {}
        old = self._kept
        self._kept = {}
        for name, part in self._given().items():
            previous = old.pop(name, None)
            spec = Spec(part.spec.dtype, part.box.sizes)
            if previous is None or Spec(previous[1].dtype, tuple(previous[1].shape)) != spec:
                copy = torch.empty(spec.shape, dtype=spec.dtype)
            else:
                copy = previous[1]
            self._kept[name] = (part.box, copy.copy_(part.given))

    def compare(self) -> PartsDelta | None:
        """On the first process: the changes; None if they are unknown, because nothing was kept or
        other tensors are trained now. None on the others."""
        own_parts = self._own_parts(True)
        differences = self._compare_boxes()
        of_all: list[dict[str, BoxDifference] | None] = [differences]
        if distributed.is_initialized():
            first = distributed.get_rank(self._group) == 0
            of_all *= distributed.get_world_size(self._group)
            distributed.gather_object(
                differences, of_all if first else None, group=self._group, group_dst=0
            )
            if not first:
                return None

        answers = [answer for answer in of_all if answer is not None]
        return PartsDelta.of(own_parts, answers, self) if len(answers) == len(of_all) else None

    def give(self) -> None:
        """On the other processes: sends the changes that `compare` found."""
        for name in list(self._changes):
            for tensor in self.pop(name).values():
                distributed.send(as_bytes(tensor.contiguous()), group=self._group, group_dst=0)

    def pop(self, name: str) -> dict[str, torch.Tensor]:
        """Returns and drops the changes of this process's box."""
        changes = self._changes.pop(name)
        return changes or {"whole": self._own_parts(True)[name].given}

    def take(self, process: int, spec: Spec) -> torch.Tensor:
        """On the first process: receives the next tensor from another process."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        distributed.recv(as_bytes(tensor), group=self._group, group_src=process)
        return tensor

    def _given(self) -> dict[str, WeightPart]:
        """This process's parts without those that another one gives."""
        own_parts = self._own_parts(True)
        boxes = boxes_of_all(own_parts, self._group)
        me = distributed.get_rank(self._group) if distributed.is_initialized() else 0
        return {
            name: part
            for name, part in own_parts.items()
            if me in givers_of([of_one[name] for of_one in boxes])
        }

    def _compare_boxes(self) -> dict[str, BoxDifference] | None:
        """The difference of each box that this process sends; None if it has copies of other
        boxes."""
        parts = self._given()
        self._changes = {}

        expected = {name: (p.box, p.spec.dtype) for name, p in parts.items()}
        if expected != {name: (box, tensor.dtype) for name, (box, tensor) in self._kept.items()}:
            return None

        differences = {}
        for name, part in parts.items():
            now = part.given
            change = change_of(self._kept[name][1], now)
            specs = {
                kind: Spec(tensor.dtype, tuple(tensor.shape)) for kind, tensor in change.items()
            }
            if change:  # a box that is sent whole is read again when it is sent
                self._changes[name] = {} if "whole" in change else change
            differences[name] = BoxDifference(part.box, specs, checksum(now))

        return differences


@dataclass(frozen=True, eq=False)
class PartsDelta:
    """On the first process: the changes of the whole tensors."""

    specs: dict[str, Spec]
    """The tensors of a delta's files, in this order."""
    grids: dict[str, Grid]
    """The grids of the tensors that are split into several boxes."""
    state: dict[str, str]
    """The checksum of the current content of every tensor."""
    _givers: list[tuple[str, int, dict[str, str]]]
    """(tensor, process, kind -> key of `specs`) of each box that changed, in the same order."""
    _parts: PublishedParts

    @classmethod
    def of(
        cls,
        own_parts: Mapping[str, WeightPart],
        differences: list[dict[str, BoxDifference]],
        parts: PublishedParts,
    ) -> PartsDelta:
        """`differences`: the differences on each process. Raises ModelError if the boxes do not
        cover a tensor."""
        delta = cls({}, {}, {}, [], parts)
        for name, part in own_parts.items():
            of_boxes = {
                of_one[name].box: (process, of_one[name])
                for process, of_one in enumerate(differences)
                if name in of_one
            }
            delta._add(name, part.spec, of_boxes)

        return delta

    def _add(
        self, name: str, spec: Spec, differences: Mapping[Box, tuple[int, BoxDifference]]
    ) -> None:
        if not math.prod(spec.shape):
            self.state[name] = checksum(torch.empty(spec.shape, dtype=spec.dtype))
            return

        try:
            grid = grid_of(list(differences), spec.shape)
        except ValueError as error:
            raise ModelError(
                f"{name}: processes have {error}: this is a defect, please report it"
            ) from error

        boxes = boxes_of(grid, spec.shape)
        checksums = [differences[box][1].sha256 for box in boxes]
        self.state[name] = checksums[0] if len(boxes) == 1 else combine_checksums(checksums)
        if len(boxes) > 1:
            self.grids[name] = grid

        for key, box in zip(box_keys(name, len(boxes)), boxes, strict=True):
            process, difference = differences[box]
            keys = {kind: f"{kind}:{key}" for kind in difference.changes}
            if keys:
                self.specs.update({keys[kind]: difference.changes[kind] for kind in keys})
                self._givers.append((name, process, keys))

    @property
    def num_bytes(self) -> int:
        """The size of all changes in bytes."""
        return sum(spec.num_bytes for spec in self.specs.values())

    @contextmanager
    def taken(self) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Yields the changes with their keys, in the order of `specs`, while the other processes
        call `give`. If the caller stops early, this function still receives the remaining tensors,
        so that the others finish."""
        waiting = iter(self._givers)

        def coming() -> Iterator[tuple[str, torch.Tensor]]:
            for name, process, keys in waiting:
                if process == 0:
                    change = self._parts.pop(name)
                else:
                    change = {
                        kind: self._parts.take(process, self.specs[key])
                        for kind, key in keys.items()
                    }

                for kind, key in keys.items():
                    yield key, change.pop(kind)

        try:
            yield coming()
        finally:
            for _ in coming():
                pass
