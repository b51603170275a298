"""What a block of code allocates for tensors on the CPU, in bytes, without the noise of the
process's memory."""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Within it, `peak` is the largest sum of the storages that were made in it and lived at the
    same time; `largest` is the largest storage."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and type(leaf) is torch.Tensor:
                self._see(leaf, before)

        return result

    def _see(self, tensor: torch.Tensor, before: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()

        if key in before or key in self._known or tensor.device.type != "cpu":
            return

        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
