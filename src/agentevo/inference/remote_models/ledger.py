"""The price log of one remote model, and its budget.

The log is an append-only file of JSON lines in the run's folder. A request has one line, written at
its end: model, role, attempt, tokens, cost, status. With a budget, another line is written before
the request, with the most that the request can use. The request counts with this maximum until its
end is recorded. Usage is the sum over the file, from all processes:

    sum of ended usage + sum of the maximum of requests under way <= budget, at every moment

So killed processes and interrupted requests, which may cost money, can't make the run exceed its
budget. The lines have no prompts, answers or keys.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock

from agentevo.config.remote_models import BudgetSection
from agentevo.errors import AgentEvoError
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.files import must_write

SUMMED = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "tokens", "cost")
LOCK_S = 30.0
"""The time limit for getting the lock of a log. Other processes hold it while they write a line."""


class RemoteModelError(AgentEvoError):
    """A remote model has not answered. `status` is its server's, 0 if there is none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class BudgetExceededError(RemoteModelError):
    """A call was not made because it might exceed the budget of a remote model."""


class Spent(msgspec.Struct, kw_only=True):
    """A sum of usage, or a maximum of it."""

    requests: int = 0
    tokens: int = 0
    cost: float = 0.0

    def add(self, amount: Spent) -> None:
        self.requests += amount.requests
        self.tokens += amount.tokens
        self.cost += amount.cost


class LedgerLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of the log."""

    id: str
    state: str
    """`begun`: tokens and cost are the most that the request can use. `ended`: they are its
    usage."""
    model: str
    role: str = ""
    attempt: str = ""
    """The id of the trajectory that made the request."""
    at: float
    """Unix time in seconds."""
    seconds: float = 0.0
    status: int = 0
    """The server's status; 0 if it has not answered."""
    requests: int = 1
    """The number of requests; 0 for an answer from the cache."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    tokens: int = 0
    cost: float = 0.0
    is_estimated: bool = False
    """Whether the server did not report its usage. The largest possible usage is then recorded."""
    error: str = ""


class Ledger:
    """See the module. Any thread may use it. Without a path, it is only in memory."""

    def __init__(self, path: Path | None, budget: BudgetSection, name: str) -> None:
        self._path = path
        self._budget = budget
        self._name = name
        self._thread_lock = threading.Lock()
        self._read_to = 0
        self._rest = b""
        self._used = Spent()
        self._open = dict[str, Spent]()
        self._own = 0
        """The running requests of this process."""
        self._settled = threading.Condition(self._thread_lock)
        self._totals: dict[str, dict[str, Any]] = {}
        """Role -> the usage so far."""

    def begin(self, most: Spent, *, role: str, until: float) -> str:
        """Reserves budget for a request, and returns the request's id. Waits up to the monotonic
        time `until` for running requests of this process, whose end may free budget. Raises
        BudgetExceededError."""
        if not self._budget.limits:
            return secrets.token_hex(8)

        line = LedgerLine(
            id=secrets.token_hex(8),
            state="begun",
            model=self._name,
            role=role,
            at=time.time(),
            tokens=most.tokens,
            cost=most.cost,
        )
        with self._thread_lock:
            while True:
                with self._lock():
                    self._read()
                    problem = self._exceeded_limit(most)
                    if not problem:
                        self._write(line)
                        self._own += 1
                        return line.id

                if not self._own or time.monotonic() >= until:
                    raise BudgetExceededError(problem)

                self._settled.wait(max(0.0, min(1.0, until - time.monotonic())))

    def end(self, line: LedgerLine) -> None:
        """Records the end of a request and its usage."""
        with self._thread_lock:
            with self._lock():
                self._write(line)
            if self._budget.limits and line.requests:
                self._own -= 1
                self._settled.notify_all()

    def totals(self) -> list[dict[str, Any]]:
        """The usage of each role so far, in all processes: the numbers of answers (including cached
        ones) and of failed requests, and the sums with the names of SUMMED."""
        if self._path is not None and not self._path.exists():
            return []

        with self._thread_lock, self._lock():
            self._read()
            return [
                row | {"failed_requests": row["requests"] - row["answers"] + row["from_cache"]}
                for row in self._totals.values()
            ]

    def remaining(self) -> dict[str, float]:
        """What is left of each limit of the budget, by its name, over all processes. A running
        request counts with the most that it can use, and so does a request whose process was
        killed."""
        with self._thread_lock:
            if self._path is not None and self._path.exists():
                with self._lock():
                    self._read()
            used = self._largest_usage()

        limits = {name: getattr(self._budget, name) for name in Spent.__struct_fields__}
        return {
            name: max(0.0, limit - getattr(used, name))
            for name, limit in limits.items()
            if limit is not None
        }

    def _exceeded_limit(self, most: Spent) -> str:
        """A sentence about the limit that a request with this usage would exceed, or an empty
        text."""
        used = self._largest_usage()
        for what in Spent.__struct_fields__:
            limit = getattr(self._budget, what)
            now = getattr(used, what)
            extra = getattr(most, what)
            if limit is not None and now + extra > limit:
                return (
                    f"remote model {self._name}: {now:g} of budget.{what}={limit:g} are used, and "
                    f"the next request could need {extra:g}: raise "
                    f"remote_models.{self._name}.budget.{what}, or ask for shorter answers"
                )

        return ""

    def _largest_usage(self) -> Spent:
        """The usage so far, plus the maximum of running requests."""
        used = Spent()
        for spent in (self._used, *self._open.values()):
            used.add(spent)
        return used

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """During this block, no other process of the run writes."""
        if self._path is None:
            yield
            return
        with must_write(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._path.with_name(f".{self._path.name}.lock"), timeout=LOCK_S):
                yield

    def _write(self, line: LedgerLine) -> None:
        if self._path is None:
            self._take(line)
            return

        text = msgspec.json.encode(line) + b"\n"
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if self._has_partial_line():  # left by a process that was killed
                text = b"\n" + text
            os.write(handle, text)
        finally:
            os.close(handle)

    def _has_partial_line(self) -> bool:
        assert self._path is not None
        size = self._path.stat().st_size
        if not size:
            return False
        with self._path.open("rb") as file:
            file.seek(size - 1)
            return file.read(1) != b"\n"

    def _read(self) -> None:
        """Reads the lines that were written since the last call."""
        if self._path is None or not self._path.exists():
            return

        with self._path.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()

        self._read_to += len(new)
        *complete_lines, self._rest = (self._rest + new).split(b"\n")
        for text in complete_lines:
            try:
                self._take(decode_json(text, LedgerLine))
            except msgspec.MsgspecError:
                continue  # an incomplete line of a process that was killed

    def _take(self, line: LedgerLine) -> None:
        spent = Spent(requests=line.requests, tokens=line.tokens, cost=line.cost)
        if line.state == "begun":
            self._open[line.id] = spent
            return

        self._open.pop(line.id, None)
        self._used.add(spent)

        row = self._totals.setdefault(line.role, {"model": self._name, "role": line.role})
        for name, value in (
            ("answers", line.state in ("completed", "cached")),
            ("from_cache", line.state == "cached"),
            *((name, getattr(line, name)) for name in SUMMED),
        ):
            row[name] = row.get(name, 0) + value
