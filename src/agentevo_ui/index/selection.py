"""The attempts that a page shows, their order, and where the page begins. All of it is read from a
page's address and written to it, so that every list is a link."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from agentevo.errors import ConfigError
from agentevo.store.records import SPLITS, TRAJECTORY_STATES
from agentevo.types import Status

ORDERS: dict[str, tuple[str, bool, str]] = {
    "newest": ("seq", True, "newest first"),
    "oldest": ("seq", False, "oldest first"),
    "best": ("reward", True, "highest reward"),
    "worst": ("reward", False, "lowest reward"),
    "longest": ("num_completion_tokens", True, "longest"),
    "shortest": ("num_completion_tokens", False, "shortest"),
    "advantage": ("surprise", True, "largest |advantage|"),
    "moved": ("moved", True, "largest log-prob change"),
    "unlikely": ("lowest_logprob", False, "least likely token"),
    "judge": ("judge_gap", True, "judge against rule"),
    "oldest-tokens": ("age", True, "oldest tokens"),
    "slowest": ("duration_s", True, "slowest"),
}
"""Maps an order to its column, whether large values come first, and its name on a page. A row
without a value is not in the list."""
RANGES = {"reward": "reward", "tokens": "num_completion_tokens", "age": "age"}
"""Maps a range in an address to its column."""
CHOICES: dict[str, tuple[str, ...]] = {
    "split": SPLITS,
    "state": TRAJECTORY_STATES,
    "status": get_args(Status),
    "outcome": ("success", "no success"),
}
WORDS = {
    "split": "split",
    "state": "state",
    "status": "status",
    "kind": "kind",
    "difficulty": "difficulty",
    "decoding": "decoding",
    "agent": "agent",
    "error": "error_kind",
    "reason": "drop_reason",
}
"""Maps a filter by a word to its column."""
MAX_TEXT = 500


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The selection of a page. An empty choice selects everything."""

    step: int | None = None
    """Attempts trained in this step, or sampled for it, of the split `train` unless another is
    chosen."""
    choices: dict[str, str] = {}
    """The chosen words, by the names in CHOICES and WORDS."""
    task: str = ""
    """Only attempts at this task."""
    ranges: dict[str, tuple[float, float]] = {}
    """By the names in RANGES: (lowest, highest), both included."""
    text: str = ""
    """A text that the attempt contains."""
    order: str = "newest"
    after: tuple[float, int] | None = None
    """The value and number of the last row of the page before."""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Selection:
        """Reads an address. Raises ConfigError for a value that a filter does not have. Keys of
        other parts of the page are ignored."""
        choices = {}
        for name in {**CHOICES, **WORDS}:
            value = query.get(name, "")
            if value and name in CHOICES and value not in CHOICES[name]:
                raise ConfigError(
                    f"{name}={value[:50]!r} is unknown: use one of {', '.join(CHOICES[name])}"
                )
            if value:
                choices[name] = value[:200]

        ranges = {name: bounds for name in RANGES if (bounds := _range(name, query)) is not None}
        order = query.get("order") or "newest"
        if order not in ORDERS:
            raise ConfigError(f"order={order[:50]!r} is unknown: use one of {', '.join(ORDERS)}")

        step = query.get("step") or None
        return cls(
            step=None if step is None else int(_number("step", step)),
            choices=choices,
            task=query.get("task", "")[:MAX_TEXT],
            ranges=ranges,
            text=query.get("q", "")[:MAX_TEXT].strip(),
            order=order,
            after=_after(query.get("after", "")),
        )

    def query(self, **changes: Any) -> dict[str, str]:
        """The keys of an address. `changes` replace some keys, and None removes a key. Another
        filter or order begins at the first page."""
        keys: dict[str, str] = dict(self.choices)
        for name, (low, high) in self.ranges.items():
            keys |= {f"{name}_from": exact(low)} if math.isfinite(low) else {}
            keys |= {f"{name}_to": exact(high)} if math.isfinite(high) else {}

        keys |= {"step": str(self.step)} if self.step is not None else {}
        keys |= {"task": self.task} if self.task else {}
        keys |= {"q": self.text} if self.text else {}
        keys |= {"order": self.order} if self.order != "newest" else {}
        keys |= {name: str(value) for name, value in changes.items() if value is not None}
        return {name: value for name, value in keys.items() if changes.get(name, "") is not None}


def exact(value: float) -> str:
    """A number in an address. Read again, it is exactly the same, so that an attempt at the edge of
    a range stays within the range."""
    return str(int(value)) if value.is_integer() else repr(value)


def cursor(value: float, seq: int) -> str:
    """`after` of the page that begins after this row."""
    return f"{value!r}~{seq}"


def _after(text: str) -> tuple[float, int] | None:
    if not text:
        return None
    value, _, seq = text.partition("~")
    return _number("after", value), int(_number("after", seq))


def _range(name: str, query: Mapping[str, str]) -> tuple[float, float] | None:
    low = query.get(f"{name}_from", "")
    high = query.get(f"{name}_to", "")
    if not low and not high:
        return None
    return (
        _number(f"{name}_from", low) if low else -math.inf,
        _number(f"{name}_to", high) if high else math.inf,
    )


def _number(name: str, text: str) -> float:
    try:
        value = float(text[:40])
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 2**53:
        raise ConfigError(f"{name}={text[:40]!r} is not a number: give one such as 3 or 0.5")
    return value
