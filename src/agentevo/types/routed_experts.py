"""The experts that the routers of a mixture chose for each token.

A turn has a row for each token that was first computed for it: the last token of the turn that it
continues, its prompt, and its completion without the last token, after which no token was predicted
yet. So along a path of the turn tree, the rows of its turns, one after the other, are those of its
tokens except the last:

    rows(path) = sum over its turns of (prompt tokens + completion tokens) - 1

The row of a token is from the pass in which the token after it was sampled. For a prompt's other
tokens, it is from the pass before that sampling. A wrong number of rows is always refused, and
never padded or cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np


class RoutedExperts(msgspec.Struct, frozen=True):
    """Rows of chosen experts, [tokens, layers, top_k]. Raises ValueError for bytes that are not
    valid rows."""

    layers: int
    """The number of routers of a pass, in the order of the model's modules: one per layer with
    experts."""
    top_k: int
    """The number of experts that each router chooses for a token."""
    num_experts: int
    """The number of experts that each router chooses from."""
    data: bytes
    """The numbers of experts: a byte each up to 256 experts, else two, the lower byte first. The
    experts of a token are in the order in which the router returned them."""

    def __post_init__(self) -> None:
        if min(self.layers, self.top_k, self.num_experts) < 1 or self.num_experts > 2**15:
            raise ValueError(
                f"routed experts: {self.layers} layers that choose {self.top_k} of "
                f"{self.num_experts} experts are not a valid routing"
            )

        if len(self.data) % self.bytes_per_token:
            raise ValueError(
                f"routed experts: {len(self.data)} bytes can't be divided into rows of "
                f"{self.bytes_per_token}"
            )

        if self.data and int(self.array().max()) >= self.num_experts:
            raise ValueError(
                f"routed experts: expert {int(self.array().max())} of {self.num_experts}"
            )

    @classmethod
    def of(cls, rows: np.ndarray, num_experts: int) -> RoutedExperts:
        """Rows [tokens, layers, top_k] of integers."""
        _, layers, top_k = rows.shape
        return cls(layers, top_k, num_experts, rows.astype(row_dtype(num_experts)).tobytes())

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.top_k * row_dtype(self.num_experts).itemsize

    @property
    def num_tokens(self) -> int:
        """The number of rows."""
        return len(self.data) // self.bytes_per_token

    def array(self) -> np.ndarray:
        """[tokens, layers, top_k] uint8 or uint16, which can't be written to."""
        rows = np.frombuffer(self.data, dtype=row_dtype(self.num_experts))
        return rows.reshape(-1, self.layers, self.top_k)

    def within(self, start: int, stop: int) -> RoutedExperts:
        """The rows from `start` up to `stop`. Raises ValueError if there are fewer."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(
                f"routed experts: rows {start} to {stop} of {self.num_tokens} are requested"
            )
        size = self.bytes_per_token
        return msgspec.structs.replace(self, data=self.data[start * size : stop * size])


def rows_of_turn(prompt: int, completion: int, *, is_root: bool) -> int:
    """The number of rows of a turn whose prompt adds that many tokens."""
    return max(prompt + completion - is_root, 0)


def why_misaligned(turn: Any) -> str:
    """The problem with the number of rows of a turn (types.Turn) that has rows. Empty if there is
    none."""
    routed: RoutedExperts = turn.routed_experts
    sizes = len(turn.prompt_ids), len(turn.completion_ids)
    expected = rows_of_turn(*sizes, is_root=turn.parent is None)
    if routed.num_tokens == expected:
        return ""
    return (
        f"turn {turn.index} has routed experts of {routed.num_tokens} tokens, and {expected} were "
        f"computed for it ({sizes[0]} of its prompt, {sizes[1]} of its completion)"
    )


def join_experts(parts: Sequence[RoutedExperts]) -> RoutedExperts:
    """The rows of several parts, one after the other. Raises ValueError for parts of different
    routers."""
    shapes = {(part.layers, part.top_k, part.num_experts) for part in parts}
    if len(shapes) != 1:
        raise ValueError(
            f"routed experts of different routers (layers, top_k, experts): {sorted(shapes)}"
        )
    return msgspec.structs.replace(parts[0], data=b"".join(part.data for part in parts))


def row_dtype(num_experts: int) -> np.dtype[Any]:
    """The type for the number of an expert: a byte for up to 256 experts, else two bytes."""
    return np.dtype("u1" if num_experts <= 256 else "<u2")
