"""Samplers and engines as child processes that are restarted when they die: those of `agentevo
train` with rollout.samplers above 0, and those of one machine of a launch.

The children are `agentevo serve` and `agentevo sample`, with their output in RUN/logs/ and in
sessions of their own: Ctrl-C is for this process only. A child that was killed from outside is
always replaced. A child that fails MAX_FAILURES times in a row without having worked has a defect:
`check` then raises, with the end of its log. An engine counts as having worked once it was
announced for SOON_S, a sampler once it ran for LONG_S. The children always end with this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from agentevo.config import RunConfig
from agentevo.config.imports import TRUST
from agentevo.errors import AgentEvoError
from agentevo.inference.serving.directory import EngineDirectory
from agentevo.runs.orchestration.device_plan import plan_of
from agentevo.runtime.device_names import visible

POLL_INTERVAL_S = 0.2
SOON_S = 20.0
LONG_S = 200.0
FAULTS = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
"""Signals that a process causes itself. All others come from outside, and are not its fault."""
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
class ChildProcess:
    """A sampler or engine: one process after another."""

    name: str
    command: list[str]
    log: Path
    engines: EngineDirectory | None = None
    """The directory in which it announces itself, if it is an engine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to ours."""
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    announced: float | None = None
    """When the announcement of this process was first seen."""
    not_before: float = 0.0
    failures: int = 0
    """How often it has ended by itself since one of its processes last worked."""
    trouble: str = ""
    """Why it could not be started, as reported last."""

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, TRUST: "1", **self.environment},  # its recipe's code runs here
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        self.started = time.monotonic()
        self.announced = None
        self.trouble = ""

    def look(self) -> int | None:
        """Starts it when it is due. Returns its exit code if it has ended since the last look.
        Raises OSError if it can't be started."""
        if self.process is None:
            if time.monotonic() >= self.not_before:
                self.start()
            return None

        code = self.process.poll()
        if code is None:
            self._look_for_announcement(self.process.pid)
            return None

        if self._was_of_use():
            self.failures = 0
        elif (
            code > 0 or -code in FAULTS or (code == 0 and time.monotonic() - self.started < SOON_S)
        ):
            self.failures += 1  # 0: a requested end is unlikely so soon

        self.process = None
        self.not_before = time.monotonic() + min(FIRST_DELAY_S * 2.0**self.failures, MAX_DELAY_S)
        return code

    def _look_for_announcement(self, pid: int) -> None:
        if self.engines is None or self.announced is not None:
            return
        with suppress(OSError):  # the next look finds out
            announcement = self.engines.find(self.name)
            if announcement is not None and announcement.pid == pid:
                self.announced = time.monotonic()

    def _was_of_use(self) -> bool:
        if self.engines is None:
            return time.monotonic() - self.started >= LONG_S
        return self.announced is not None and time.monotonic() - self.announced >= SOON_S


class Children:
    """See the module. Entering it starts the processes."""

    def __init__(
        self, children: Sequence[ChildProcess], note: Callable[[str], None], logs: Path
    ) -> None:
        self._children = children
        self._note = note
        self._logs = logs
        self._ended = threading.Event()
        self._failure: ChildFailedError | None = None
        self._thread = threading.Thread(target=self._watch, name="children", daemon=True)

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        for child in self._children:
            child.start()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
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
            raise self._failure

    def _watch(self) -> None:
        try:
            while not self._ended.wait(POLL_INTERVAL_S) and self._failure is None:
                for child in self._children:
                    self._look_after(child)
        except Exception as error:  # noqa: BLE001 (it would be lost, and children no longer replaced)
            self._failure = ChildFailedError(
                f"samplers and engines are no longer supervised: {type(error).__name__}: {error}"
            )
            self._failure.__cause__ = error

    def _look_after(self, child: ChildProcess) -> None:
        try:
            code = child.look()
        except OSError as error:  # no memory, process or file is available at the moment
            child.not_before = time.monotonic() + MAX_DELAY_S
            if str(error) != child.trouble:
                child.trouble = str(error)
                self._note(
                    f"{child.name} can't be started ({error}): tried again every {MAX_DELAY_S:g} s"
                )
            return

        if code is None:
            return

        how = f"{'signal' if code < 0 else 'exit code'} {abs(code)}"
        if child.failures < MAX_FAILURES:
            self._note(f"{child.name} ended ({how}) and is started again")
            return

        what = (
            f"{child.name} failed {MAX_FAILURES} times before it did any work (the last time: "
            f"{how}); {child.log} ends with:"
        )
        self._failure = ChildFailedError("\n".join([what, *_end_of(child.log)]))


class ChildSupervisor(Children):
    """The children of `agentevo train`."""

    def __init__(self, config: RunConfig, note: Callable[[str], None]) -> None:
        plan = plan_of(config)
        if plan is not None:
            note(str(plan))

        children = make_children(
            [str(config.run_dir / "config.yaml"), f"run.dir={config.run_dir}"],
            config.run_dir,
            engines=[()] * config.rollout.engines if plan is None else plan.engines,
            samplers=config.rollout.samplers,
        )
        super().__init__(children, note, config.run_dir / "logs")


def make_children(
    recipe: Sequence[str],
    run_dir: Path,
    *,
    engines: Sequence[Sequence[int]],
    samplers: int,
    machine: str = "",
    is_shared: bool = False,
) -> list[ChildProcess]:
    """The engines, for each its devices by number, and samplers of a run whose recipe and overrides
    are `recipe`. `machine` begins their numbers in their names; `is_shared`: other machines ask
    these engines too."""
    announced = EngineDirectory(run_dir / "engines")
    parent = ["--parent", str(os.getpid())]
    host = ["--host", "0.0.0.0"] if is_shared else []

    def child(
        command: str,
        name: str,
        options: Sequence[str] = (),
        directory: EngineDirectory | None = None,
        devices: Sequence[int] = (),
    ) -> ChildProcess:
        words = [sys.executable, "-m", "agentevo", command, *recipe, "--name", name]
        log = run_dir / "logs" / f"{name}.log"
        environment = visible(devices)
        return ChildProcess(
            name, [*words, *options, *parent], log, directory, environment=environment
        )

    children = [
        child("serve", f"engine-{machine}{n}", host, announced, devices)
        for n, devices in enumerate(engines)
    ]
    return children + [child("sample", f"sampler-{machine}{n}") for n in range(samplers)]


def _end_of(log: Path) -> list[str]:
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
    except OSError as error:
        return [f"(it can't be read: {error})"]
