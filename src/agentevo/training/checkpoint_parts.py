"""The contribution of each of several processes to a checkpoint of a model whose parts they hold.

    first    tensors -> the model's files, one whole tensor after the other
             finish(folder) ----------+-> its own part of the trainer's state, hashed
    others   give(): tensors, then ---+-> theirs, and the hashes go to the first process

The first process makes the folder, and tells the others in between whether there is one to write
to: if it could not write its own files, no process writes. A process that fails reports its error
to the first process, which raises it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed

from agentevo.models.compute.parts import WeightPart, WholeTensors, give
from agentevo.runtime.files import sync_to_disk
from agentevo.training.state_parts import METADATA, PartsError, write_parts


@dataclass(frozen=True, eq=False)
class Contribution:
    """See the module."""

    weights: Mapping[str, WeightPart]
    """The model's weights, as they are saved; empty if the first process has all of them."""
    state: Mapping[str, WeightPart]
    """Parts of the trainer's state (`split_state`)."""
    group: distributed.ProcessGroup | None = None
    """The group of all processes, for tensors on the CPU."""

    def copy(self) -> Contribution:
        """A copy of the present state, even if training continues."""
        return Contribution(
            {name: part.copy_to_cpu() for name, part in self.weights.items()},
            {name: part.copy_to_cpu() for name, part in self.state.items()},
            self.group,
        )

    def tensors(self) -> WholeTensors:
        """On the first process: the model's weights; the caller has to take all of them."""
        return WholeTensors(self.weights, self.group)

    def finish(self, folder: Path | None) -> dict[str, str]:
        """On the first process: name of a file in the folder -> its sha256, once all processes have
        written theirs. None: nothing is written. Raises PartsError."""
        payload: list[Any] = [None if folder is None else str(folder)]
        if distributed.is_initialized():
            distributed.broadcast_object_list(payload, group=self.group, group_src=0)
        return {} if folder is None or not self.state else self._write(folder)

    def give(self) -> None:
        """The whole contribution of the other processes."""
        if self.weights:
            give(self.weights, self.group)

        payload: list[Any] = [None]
        distributed.broadcast_object_list(payload, group=self.group, group_src=0)
        if payload[0] is not None and self.state:
            try:
                self._write(Path(payload[0]))
            except PartsError:
                return  # which the first process raises, too

    def _write(self, folder: Path) -> dict[str, str]:
        folder.mkdir(parents=True, exist_ok=True)  # where folders are not shared, `seal` says so
        write_parts(folder, self.state, self.group)

        process = distributed.get_rank(self.group) if distributed.is_initialized() else 0
        local_result: dict[str, str] | str
        try:
            paths = sorted(folder.glob(f"__{process}_*"))
            paths += [folder / METADATA] if process == 0 else []
            local_result = {path.name: _hash_and_sync(path) for path in paths}
        except OSError as error:
            local_result = f"{folder}: process {process} could not read its part again ({error})"

        of_all: list[Any] = [local_result]
        if distributed.is_initialized():
            of_all *= distributed.get_world_size(self.group)
            distributed.all_gather_object(of_all, local_result, group=self.group)

        failed = [result for result in of_all if isinstance(result, str)]
        if failed:
            raise PartsError(failed[0])

        return {name: digest for result in of_all for name, digest in result.items()}


def _hash_and_sync(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    sync_to_disk(path)
    return digest
