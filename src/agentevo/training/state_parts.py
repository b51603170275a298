"""A trainer's state whose tensors several processes hold in parts, in torch's distributed
checkpoint format (`torch.distributed.checkpoint`): each process writes its part, and any number of
processes can read the parts that each needs.

    trainer.pt               the state, with `{"dcp": NAME}` in place of such a tensor
    trainer/.metadata        which part is where
    trainer/__0_0.distcp     the parts of the first process, and so on

Nothing here makes a folder appear whole: `checkpoint.py` does, when all have written and hashed.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from agentevo.errors import CheckpointError, UnusableCheckpointError
from agentevo.models.compute.parts import Box, WeightPart

warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)  # each process reads its own parts
FOLDER = "trainer"
METADATA = ".metadata"
_KEY = "dcp"
_RECORDS = {
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
    "_StorageInfo",
}
"""Classes of torch's format, all of which are plain data."""


def split_state(state: Any, name: str = "") -> tuple[Any, dict[str, WeightPart]]:
    """(the state with names in place of its parts, the parts by these names)."""
    if isinstance(state, WeightPart):
        return {_KEY: name}, {name: state}

    if isinstance(state, dict):
        plain: dict[Any, Any] = {}
        parts: dict[str, WeightPart] = {}
        for key, value in state.items():
            plain[key], value_parts = split_state(value, f"{name}.{key}" if name else str(key))
            parts |= value_parts
        return plain, parts

    if isinstance(state, list):
        items = [split_state(value, f"{name}.{at}") for at, value in enumerate(state)]
        return [item for item, _ in items], {
            k: v for _, item_parts in items for k, v in item_parts.items()
        }

    return state, {}


def write_parts(
    folder: Path, parts: Mapping[str, WeightPart], group: distributed.ProcessGroup | None
) -> None:
    """Writes this process's parts; all processes of the group call it. Raises PartsError on all of
    them if one can't write."""
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    entries = {name: _StateEntry(part) for name, part in parts.items()}
    try:
        dcp.save(entries, storage_writer=writer, planner=_Saving(), process_group=group)
    except dcp.CheckpointException as error:
        reasons = {process: failed[0] for process, failed in error.failures.items()}
        process, first = min(reasons.items())
        raise PartsError(
            f"{folder}: process {process} could not write its part ({first})"
        ) from error


class PartsError(CheckpointError):
    """A process could not write its part of a checkpoint."""


class StoredPart:
    """A tensor of a checkpoint: a `Stored`."""

    def __init__(self, reader: _StateReader, name: str) -> None:
        self._reader = reader
        self._name = name
        tensor_metadata = reader.metadata.state_dict_metadata.get(name)
        if not isinstance(tensor_metadata, TensorStorageMetadata):
            raise UnusableCheckpointError(f"{reader.path} has no tensor {name}: it is not whole")
        self.dtype = tensor_metadata.properties.dtype
        self.shape = tuple(tensor_metadata.size)

    def read(self, box: Box | None = None) -> torch.Tensor:
        """The part in the box, or the whole tensor, on the CPU; the caller owns it."""
        box = Box((0,) * len(self.shape), self.shape) if box is None else box
        into = torch.empty(box.sizes, dtype=self.dtype)
        if into.numel():
            target_state = {self._name: _StateEntry(WeightPart(into, self.shape, box.offset))}
            try:
                dcp.load(
                    target_state, storage_reader=self._reader, planner=_StateLoading(), no_dist=True
                )
            except dcp.CheckpointException as error:
                raise UnusableCheckpointError(
                    f"{self._reader.path}: {self._name} can't be read ({error}): resume from an "
                    "older checkpoint"
                ) from error

        return into


def join_state(plain: Any, folder: Path) -> Any:
    """The inverse of `split_state`: names become `StoredPart`. Raises UnusableCheckpointError for a
    state that `write_parts` would not write."""
    reader: _StateReader | None = None

    def join(state: Any) -> Any:
        nonlocal reader
        if isinstance(state, dict):
            if state.keys() == {_KEY}:
                reader = _StateReader(folder) if reader is None else reader
                return StoredPart(reader, state[_KEY])
            return {key: join(value) for key, value in state.items()}
        return [join(value) for value in state] if isinstance(state, list) else state

    return join(plain)


class _StateEntry:
    """A part as the planners see it."""

    def __init__(self, part: WeightPart) -> None:
        self.part = part

    def size(self) -> torch.Size:
        return torch.Size(self.part.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self.part.offset), self.part.local.shape)]

    def __create_write_items__(self, name: str, entry: object) -> list[WriteItem]:
        if not self.part.local.numel():
            return []
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(
            chunk, TensorProperties.create_from_tensor(self.part.local), self.size()
        )
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, None, data)]


class _Saving(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        entry: _StateEntry = self.state_dict[index.fqn]
        return entry.part.local


class _StateLoading(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        entry: _StateEntry = self.state_dict[index.fqn]
        return entry.part.local

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> NoReturn:
        raise UnusableCheckpointError(
            "a checkpoint's parts contain objects other than tensors, which are not read"
        )


class _StateReader(dcp.FileSystemReader):
    """Reads the metadata once, and nothing in it that could be a program."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with (Path(path) / METADATA).open("rb") as file:
            self.metadata: Metadata = _Restricted(file).load()

        if not isinstance(self.metadata, Metadata):
            raise UnusableCheckpointError(f"{path}/{METADATA} is not in torch's format")

        outside = [
            info.relative_path
            for info in self.metadata.storage_data.values()
            if Path(info.relative_path).name != info.relative_path
        ]
        if outside:
            raise UnusableCheckpointError(f"{path}/{METADATA} names a file {outside[0]!r}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class _Restricted(pickle.Unpickler):
    """Makes records of torch's format, sizes and dtypes, and no other object."""

    def find_class(self, module: str, name: str) -> Any:
        is_record = module.startswith("torch.distributed.checkpoint.") and name in _RECORDS
        is_value = module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        )
        is_layout = (module, name) == ("torch.serialization", "_get_layout")
        is_path = module.partition(".")[0] == "pathlib" and name == "PosixPath"  # of the writer
        if not (is_record or is_value or is_layout or is_path):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")
        return super().find_class(module, name)
