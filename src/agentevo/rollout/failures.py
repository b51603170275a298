"""Reports failed attempts: at once the first failure of each kind, with its traceback, and later
the number of failures of each kind.

The kind of a failure is the exception's class, `timeout`, `no_reward`, `teacher`, or, for a
scorer's failure, the scorer's kind after `scorer_`. The kind is read from the error in the store,
so attempts of other processes and of earlier starts of the run count too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from agentevo.errors import storable

ShowFailure = Callable[[str, str, str], None]
"""Called for each failure as it happens, with (trajectory, error, traceback). The traceback may be
empty."""

MAX_LENGTH = 400
"""The maximum number of characters of a failure in a message."""
MAX_KINDS = 20
"""The maximum number of kinds that are counted separately. All further kinds count as `other`."""
TIMEOUT_PREFIX = "the episode took longer than"
TEACHER_PREFIX = "the teacher"
"""The beginning of the error of an attempt whose teacher failed."""
NO_REWARD = (
    "the agent returned no reward, and no scorer decides: return a number, or set the recipe's "
    "rewards=[NAME] or the task's scorer"
)
_SCORER = re.compile(r"the reward '[^']*' failed: ")
_CLASS = re.compile(r"([A-Za-z_]\w{0,59})[:(]")


def failure_kind(error: str | None) -> str:
    """The kind of a failed attempt, a word that can be part of a metric's name."""
    text = error or ""
    if text.startswith(TIMEOUT_PREFIX) or text.startswith("no score within"):
        return "timeout"
    if text == NO_REWARD:
        return "no_reward"
    if text.startswith(TEACHER_PREFIX):
        return "teacher"
    if scorer := _SCORER.match(text):
        return f"scorer_{failure_kind(text[scorer.end() :])}"

    named = _CLASS.match(text)
    return named[1] if named is not None and named[1].isascii() else "other"


def count_kinds(errors: Iterable[str | None]) -> dict[str, int]:
    """The number of failures of each kind, the most frequent kind first."""
    counts = Counter(map(failure_kind, errors))
    kinds = dict(counts.most_common(MAX_KINDS))
    num_rest = sum(counts.values()) - sum(kinds.values())
    return kinds | ({"other": kinds.get("other", 0) + num_rest} if num_rest else {})


def summarize_failures(errors: list[str | None], num_attempts: int) -> str:
    """A summary such as `58 of 256 failed: 50 took longer than agent.timeout_s=300 s, 8 ValueError:
    bad`."""
    first: dict[str, str] = {}
    for error in errors:
        first.setdefault(failure_kind(error), error or "no reason")

    kinds = [
        f"{count} {_shorten(first.get(kind, kind))}" for kind, count in count_kinds(errors).items()
    ]
    suffix = f", and {len(kinds) - 3} other kinds" if len(kinds) > 3 else ""
    return f"{len(errors)} of {num_attempts} failed: {', '.join(kinds[:3])}{suffix}"


def _shorten(error: str) -> str:
    line = storable(error.removeprefix("the episode ").partition("\n")[0])
    return line if len(line) <= MAX_LENGTH else f"{line[: MAX_LENGTH - 3]}..."


class FirstFailures:
    """Reports the first failure of each kind."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._traces: dict[str, str] = {}
        """Maps a kind to the traceback of its first failure."""

    def show(self, name: str, error: str, trace: str) -> None:
        """See ShowFailure."""
        kind = failure_kind(error)
        if kind in self._traces or len(self._traces) >= MAX_KINDS:
            return

        self._traces[kind] = trace
        self._notify(
            f"the attempt {name} failed: {_shorten(error)}"
            + (f"\n{trace}\n" if trace else "\n")
            + "(later failures of this kind are counted)"
        )

    def trace_of(self, error: str | None) -> str:
        """The traceback of the first failure of this error's kind. Empty if there is none."""
        return self._traces.get(failure_kind(error), "")
