"""A cache that is bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """The values that were used last, up to `max_bytes`. The newest one always stays."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: K) -> V | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Adds a value under a key that has none."""
        self._values[key] = (value, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes and len(self._values) > 1:
            self.num_bytes -= self._values.popitem(last=False)[1][1]

    def clear(self) -> None:
        self._values.clear()
        self.num_bytes = 0
