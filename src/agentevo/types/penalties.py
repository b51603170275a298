"""Penalties on tokens that a text already contains, and biases on tokens: how they change a model's
logits. Both sampling and the recomputation of the distribution use this module.

With logits z, r = repetition and c the number of times that a token was sampled in this completion:

    z' = R(z) - presence * [c > 0] - frequency * c + logit_bias
    R(z) = z / r if z > 0 else z * r    for a token of the prompt or of the completion, else z

(https://platform.openai.com/docs/api-reference/chat for the first two and the bias, arXiv
1909.05858, section 4.1, for R). Temperature, filters and grammar apply afterwards. The changes at a
position follow from the tokens before it, so only the penalties of a turn are recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

LARGEST_PENALTY = 2.0
"""The largest presence and frequency penalty, positive or negative."""
LARGEST_BIAS = 100.0
"""The largest bias, positive or negative."""
LARGEST_REPETITION = 100.0
"""The largest value of repetition and of its inverse."""
MAX_BIASES = 1024


class Penalties(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The penalties and biases of a request."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, the amount added)."""

    @property
    def problem(self) -> str | None:
        """What is wrong with the values. None if they are valid."""
        for name in ("presence", "frequency"):
            value = getattr(self, name)
            if not abs(value) <= LARGEST_PENALTY:  # NaN is refused too
                return f"{name} is {value:g}: give -{LARGEST_PENALTY:g} to {LARGEST_PENALTY:g}"

        if not 1 / LARGEST_REPETITION <= self.repetition <= LARGEST_REPETITION:
            return (
                f"repetition is {self.repetition:g}: give {1 / LARGEST_REPETITION:g} to "
                f"{LARGEST_REPETITION:g}"
            )

        if len(self.logit_bias) > MAX_BIASES:
            return f"logit_bias has {len(self.logit_bias)} tokens: give at most {MAX_BIASES}"

        for token, bias in self.logit_bias:
            if token < 0 or not abs(bias) <= LARGEST_BIAS:
                return (
                    f"logit_bias of token {token} is {bias:g}: give ids of tokens and "
                    f"-{LARGEST_BIAS:g} to {LARGEST_BIAS:g}"
                )

        return None

    @property
    def last_token(self) -> int:
        """The highest token id in `logit_bias`. -1 if it is empty."""
        return max((token for token, _ in self.logit_bias), default=-1)

    @property
    def or_none(self) -> Penalties | None:
        """The penalties, or None if they change nothing."""
        return None if self == Penalties() else self


class PenaltyChanges(NamedTuple):
    """The changes from penalties at one position, for K different tokens."""

    tokens: np.ndarray
    """[K] int64"""
    offsets: np.ndarray
    """[K] float32, the amounts added"""
    repeated: np.ndarray
    """[K] float32: `repetition` where R applies, else 1"""


class PenaltyState:
    """The penalties during one completion."""

    def __init__(self, penalties: Penalties, prompt_ids: Sequence[int]) -> None:
        self._penalties = penalties
        self._places: dict[int, int] = {}
        self._offsets: list[float] = []
        self._repeated: list[float] = []
        self._sampled: set[int] = set()

        for token, bias in penalties.logit_bias:
            self._offsets[self._place(token)] += bias

        if penalties.repetition != 1:
            for token in set(prompt_ids):
                self._repeated[self._place(token)] = penalties.repetition

    def take(self, token: int) -> None:
        """Adds the next token of the completion."""
        place = self._place(token)
        penalties = self._penalties
        self._repeated[place] = penalties.repetition
        self._offsets[place] -= penalties.frequency
        if token not in self._sampled:
            self._sampled.add(token)
            self._offsets[place] -= penalties.presence

    def changes(self) -> PenaltyChanges:
        """The changes at the next token."""
        return PenaltyChanges(
            np.fromiter(self._places, dtype=np.int64, count=len(self._places)),
            np.array(self._offsets, dtype=np.float32),
            np.array(self._repeated, dtype=np.float32),
        )

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._offsets):
            self._offsets.append(0.0)
            self._repeated.append(1.0)
        return place


class TokenPenalties(NamedTuple):
    """The penalties under which the tokens of a text were sampled."""

    table: list[Penalties]
    rows: np.ndarray
    """[T] int32: the row of each token in `table`, -1 for a token without penalties."""
    starts: np.ndarray
    """[T] int32: the position at which the token's completion begins."""

    @classmethod
    def join(cls, parts: Sequence[tuple[int, Penalties | None]]) -> TokenPenalties | None:
        """The penalties of a text from those of its parts, each with its length."""
        table = [penalties for _, penalties in parts if penalties is not None]
        if not table:
            return None

        sizes = [size for size, _ in parts]
        numbers = np.cumsum([penalties is not None for _, penalties in parts]) - 1
        rows = [
            -1 if penalties is None else n for (_, penalties), n in zip(parts, numbers, strict=True)
        ]
        starts = np.cumsum([0, *sizes[:-1]])

        return cls(
            table,
            np.repeat(np.array(rows, dtype=np.int32), sizes),
            np.repeat(starts.astype(np.int32), sizes),
        )

    def changes(self, ids: np.ndarray, places: np.ndarray) -> Mapping[int, PenaltyChanges]:
        """Maps a position to the changes there. `places` [M] are the positions, in ascending order.
        Positions without penalties are left out. `ids` [T] is the text."""
        changes_by_place: dict[int, PenaltyChanges] = {}
        state = None
        start = -1
        done = 0
        for place in places.tolist():
            if self.rows[place] < 0:
                continue

            if state is None or start != self.starts[place]:
                start = done = int(self.starts[place])
                state = PenaltyState(self.table[self.rows[place]], ids[:start].tolist())

            for token in ids[done:place].tolist():
                state.take(token)

            done = place
            changes_by_place[place] = state.changes()

        return changes_by_place
