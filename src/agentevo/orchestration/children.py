"""The samplers and engines of `agentevo train` with rollout.samplers above 0: child processes that are started again when they die.

They are `agentevo serve` and `agentevo sample` on the run's own configuration, with their output in RUN/logs/. A child that a signal has
killed is always replaced; one that ends by itself again and again, soon after its start, has something wrong with it: then `check` raises,
with the end of its log. The children end with this process, however it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from agentevo.config import RunConfig
from agentevo.errors import AgentEvoError

LOOK_S = 0.2
SOON_S = 20.0
"""A child that ends by itself within this time of its start has failed to start."""
MAX_FAILURES = 3
"""In a row."""
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 5.0
GRACE_S = 15.0
"""For a clean end."""
SHOWN_LINES = 15


class ChildFailedError(AgentEvoError):
    """A sampler or engine does not stay alive."""


@dataclass(eq=False)
class _Child:
    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    not_before: float = 0.0
    deaths: int = 0
    failures: int = 0
    """Early ends by itself, in a row."""

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        self.started = time.monotonic()

    def look(self) -> int | None:
        """Starts it when it is due; its exit code if it has just been found dead."""
        if self.process is None:
            if time.monotonic() >= self.not_before:
                self.start()
            return None
        code = self.process.poll()
        if code is None:
            return None
        early = time.monotonic() - self.started < SOON_S
        self.process, self.deaths = None, self.deaths + 1
        self.failures = self.failures + 1 if code >= 0 and early else 0
        self.not_before = time.monotonic() + min(FIRST_DELAY_S * 2.0**self.failures, MAX_DELAY_S)
        return code


class Children:
    """See the module. Enter it to start them."""

    def __init__(self, config: RunConfig, note: Callable[[str], None]) -> None:
        self._note, self._logs = note, config.run_dir / "logs"
        words = [sys.executable, "-m", "agentevo"]
        recipe = [str(config.run_dir / "config.yaml"), f"run.dir={config.run_dir}"]
        names = [("serve", f"engine-{n}") for n in range(config.rollout.engines)]
        names += [("sample", f"sampler-{n}") for n in range(config.rollout.samplers)]
        parent = ["--parent", str(os.getpid())]
        self._children = [
            _Child(name, [*words, command, *recipe, "--name", name, *parent], self._logs / f"{name}.log") for command, name in names
        ]
        self._ended = threading.Event()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._watch, name="children", daemon=True)

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        for child in self._children:
            child.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        processes = [child.process for child in self._children if child.process is not None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def check(self) -> None:
        """Raises ChildFailedError when a child can't be kept alive."""
        if self._failure is not None:
            raise ChildFailedError(self._failure)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S) and self._failure is None:
            for child in self._children:
                code = child.look()
                if code is not None:
                    self._note(f"{child.name} ended ({'signal' if code < 0 else 'exit code'} {abs(code)}) and is started again")
                if child.failures >= MAX_FAILURES:
                    lines = child.log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
                    self._failure = "\n".join(
                        [f"{child.name} ended {MAX_FAILURES} times soon after its start (exit code {code}); {child.log} ends with:", *lines]
                    )
                    break
