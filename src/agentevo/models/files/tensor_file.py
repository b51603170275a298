"""Writes safetensors files tensor by tensor, so that at most one tensor is in memory. The caller
specifies the dtype and shape of each tensor beforehand. The header, which has the position of each
tensor, is therefore written first, and the tensors may follow in any order.

The format: https://github.com/huggingface/safetensors (8 bytes of length, a JSON header, tensors
without gaps; tensors with wider elements first, so that all are aligned).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from agentevo.models.compute.parts import Spec

FILE_BYTES = 5 * 2**30
"""The most bytes of a file in a model's folder, unless a single tensor is larger."""
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes in the words of the format."""


class TensorFile:
    """A safetensors file that is being written. Raises OSError if the file can't be written."""

    def __init__(self, file: BinaryIO, specs: Mapping[str, Spec]) -> None:
        """Writes the header. `specs`: all tensors of the file. The caller has to close the file."""
        self._specs = specs
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        end = 0
        for name in sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name)):
            spec = specs[name]
            self._offsets[name] = end
            entries[name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [end, end + spec.num_bytes],
            }
            end += spec.num_bytes

        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._data_start = 8 + len(header)
        self._file = file
        file.write(len(header).to_bytes(8, "little") + header)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor. The caller may free it afterwards."""
        spec = self._specs[name]
        if Spec(tensor.dtype, tuple(tensor.shape)) != spec:
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)}, not {spec.dtype} {spec.shape}"
            )

        self._file.seek(self._data_start + self._offsets[name])
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._file.write(flat.numpy().data)

    def add_all(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Writes all tensors of the file, which are the next items of `tensors`."""
        for _ in self._specs:
            name, tensor = next(tensors)
            self.add(name, tensor)
            del tensor


def write_files(
    folder: Path,
    files: Mapping[str, Mapping[str, Spec]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Writes files (name -> specs of its tensors) one after the other. `tensors` yields the tensors
    in this order. Each tensor is freed before the next. Raises OSError."""
    remaining = iter(tensors)
    for name, specs in files.items():
        with (folder / name).open("wb") as file:
            TensorFile(file, specs).add_all(remaining)
    for name, _ in remaining:
        raise ValueError(f"{name} belongs to no file")


def split_files(stem: str, specs: Mapping[str, Spec], max_bytes: int) -> dict[str, dict[str, Spec]]:
    """Splits tensors into files, in the order of `specs`: name of a file -> specs of its tensors. A
    file has at most `max_bytes`, unless a single tensor is larger."""
    groups: list[dict[str, Spec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if groups[-1] and size + spec.num_bytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = spec
        size += spec.num_bytes

    return dict(zip(file_names(stem, len(groups)), groups, strict=True))


def file_names(stem: str, count: int) -> list[str]:
    """The names of `count` files with the weights of one model."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
