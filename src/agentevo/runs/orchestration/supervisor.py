"""Samplers and engines as child processes that are restarted when they die, and the devices that
they use. `agentevo train` with rollout.samplers above 0 has such children, and so does each machine
of a launch.

The children are `agentevo serve` and `agentevo sample`. They write to RUN/logs/, and run in their
own sessions, so Ctrl-C reaches only this process. A child that was killed from outside is always
replaced. If a child fails MAX_FAILURES times in a row without having worked, `check` raises an
error with the end of its log. The children always end with this process.
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
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

from agentevo.config import EngineSection, RunConfig
from agentevo.config.imports import TRUST
from agentevo.config.parallel import world_size
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.inference.serving.directory import EngineDirectory
from agentevo.runtime.device_names import visible

POLL_INTERVAL_S = 0.2
SOON_S = 20.0
"""An engine has worked if it was announced for this long."""
LONG_S = 200.0
"""A sampler has worked if it ran for this long."""
FAULTS = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
"""Signals that a process causes itself. Another signal comes from outside and is no failure."""
MAX_FAILURES = 3
"""The number of failures in a row after which a child is not restarted."""
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 5.0
GRACE_S = 15.0
"""The time in which the children may end cleanly."""
SHOWN_LINES = 15
_SGLANG_SIZES = ("--tp-size", "--tensor-parallel-size", "--tp")
"""SGLang's option for the number of devices that share a layer."""


class ChildFailedError(AgentEvoError):
    """A sampler or engine does not stay alive."""


@dataclass(eq=False)
class ChildProcess:
    """A sampler or engine: one process after another."""

    name: str
    command: list[str]
    log: Path
    engines: EngineDirectory | None = None
    """The directory in which an engine announces itself. None for a sampler."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of this process."""
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    announced_at: float | None = None
    """The time at which the announcement of the current process was first seen."""
    not_before: float = 0.0
    failures: int = 0
    """The number of failed processes since the last one that worked."""
    start_error: str = ""
    """The last reported reason why the child could not be started."""

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, TRUST: "1", **self.environment},  # the user trusts this recipe
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        self.started_at = time.monotonic()
        self.announced_at = None
        self.start_error = ""

    def poll(self) -> int | None:
        """Starts the process if `not_before` has passed. Returns the exit code of a process that
        has ended since the last call. Raises OSError if the process can't be started."""
        if self.process is None:
            if time.monotonic() >= self.not_before:
                self.start()
            return None

        code = self.process.poll()
        if code is None:
            self._find_announcement(self.process.pid)
            return None

        if self._has_worked():
            self.failures = 0
        elif (
            code > 0
            or -code in FAULTS
            or (code == 0 and time.monotonic() - self.started_at < SOON_S)
        ):
            self.failures += 1  # a requested end (code 0) is unlikely so soon

        self.process = None
        self.not_before = time.monotonic() + min(FIRST_DELAY_S * 2.0**self.failures, MAX_DELAY_S)
        return code

    def _find_announcement(self, pid: int) -> None:
        if self.engines is None or self.announced_at is not None:
            return
        with suppress(OSError):  # the next call tries again
            announcement = self.engines.find(self.name)
            if announcement is not None and announcement.pid == pid:
                self.announced_at = time.monotonic()

    def _has_worked(self) -> bool:
        if self.engines is None:
            return time.monotonic() - self.started_at >= LONG_S
        return self.announced_at is not None and time.monotonic() - self.announced_at >= SOON_S


class Children:
    """Restarts child processes. The `with` statement starts and ends them."""

    def __init__(
        self, children: Sequence[ChildProcess], note: Callable[[str], None], logs: Path
    ) -> None:
        self._children = children
        self._note = note
        self._logs = logs
        self._is_ending = threading.Event()
        self._failure: ChildFailedError | None = None
        self._thread = threading.Thread(target=self._watch, name="children", daemon=True)

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        for child in self._children:
            child.start()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_ending.set()
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
        """Raises ChildFailedError if a child has failed too often."""
        if self._failure is not None:
            raise self._failure

    def _watch(self) -> None:
        try:
            while not self._is_ending.wait(POLL_INTERVAL_S) and self._failure is None:
                for child in self._children:
                    self._supervise(child)
        except Exception as error:  # noqa: BLE001 (`check` raises it in the main thread)
            self._failure = ChildFailedError(
                f"samplers and engines are no longer supervised: {type(error).__name__}: {error}"
            )
            self._failure.__cause__ = error

    def _supervise(self, child: ChildProcess) -> None:
        try:
            code = child.poll()
        except OSError as error:  # no memory, process or file is available at the moment
            child.not_before = time.monotonic() + MAX_DELAY_S
            if str(error) != child.start_error:
                child.start_error = str(error)
                self._note(
                    f"{child.name} can't be started ({error}); "
                    f"it is tried again every {MAX_DELAY_S:g} s"
                )
            return

        if code is None:
            return

        exit_text = f"{'signal' if code < 0 else 'exit code'} {abs(code)}"
        if child.failures < MAX_FAILURES:
            self._note(f"{child.name} ended ({exit_text}) and is started again")
            return

        summary = (
            f"{child.name} failed {MAX_FAILURES} times before it did any work (the last time: "
            f"{exit_text}); {child.log} ends with:"
        )
        self._failure = ChildFailedError("\n".join([summary, *_end_of(child.log)]))


def sampling_children(config: RunConfig, note: Callable[[str], None]) -> Children:
    """The children of `agentevo train`."""
    plan = plan_of(config)
    if plan is not None:
        note(str(plan))

    children = make_children(
        [str(config.run_dir / "config.yaml"), f"run.dir={config.run_dir}"],
        config.run_dir,
        engines=[()] * config.rollout.engines if plan is None else plan.engines,
        samplers=config.rollout.samplers,
    )
    return Children(children, note, config.run_dir / "logs")


def make_children(
    recipe: Sequence[str],
    run_dir: Path,
    *,
    engines: Sequence[Sequence[int]],
    samplers: int,
    machine: str = "",
    is_shared: bool = False,
) -> list[ChildProcess]:
    """The engines and samplers of a run. `recipe`: the recipe's file and overrides; `engines`: the
    device numbers of each engine; `machine`: a prefix of the numbers in the names; `is_shared`:
    other machines use these engines too."""
    engine_directory = EngineDirectory(run_dir / "engines")
    parent = ["--parent", str(os.getpid())]
    host = ["--host", "0.0.0.0"] if is_shared else []

    def make_child(
        command: str,
        name: str,
        options: Sequence[str] = (),
        directory: EngineDirectory | None = None,
        devices: Sequence[int] = (),
    ) -> ChildProcess:
        arguments = [sys.executable, "-m", "agentevo", command, *recipe, "--name", name]
        log = run_dir / "logs" / f"{name}.log"
        environment = visible(devices)
        return ChildProcess(
            name, [*arguments, *options, *parent], log, directory, environment=environment
        )

    children = [
        make_child("serve", f"engine-{machine}{n}", host, engine_directory, devices)
        for n, devices in enumerate(engines)
    ]
    return children + [make_child("sample", f"sampler-{machine}{n}") for n in range(samplers)]


def _end_of(log: Path) -> list[str]:
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
    except OSError as error:
        return [f"(it can't be read: {error})"]


class DevicePlan(NamedTuple):
    """Devices by their numbers among those that this process sees. Invariant: a device belongs to
    one process, except for one that the trainer shares with the only engine."""

    trainer: tuple[int, ...]
    """One device for each rank."""
    engines: tuple[tuple[int, ...], ...]
    """The devices of each engine."""

    def __str__(self) -> str:
        trainer = ", ".join(map(str, self.trainer))
        engines = "; ".join(
            f"engine-{n}: {', '.join(map(str, devices))}" for n, devices in enumerate(self.engines)
        )
        shared = set(self.trainer) & {device for engine in self.engines for device in engine}
        return f"devices: trainer: {trainer}; {engines}{' (shared with it)' if shared else ''}"


def plan_devices(count: int, ranks: int, engines: int, per_engine: int) -> DevicePlan:
    """The plan for `ranks` of a trainer and that many engines, of `per_engine` devices each, on a
    machine with `count` devices. The trainer has the first devices, and the engines follow. A
    single engine of one device shares the trainer's device where none is left. Raises ConfigError
    if they don't fit."""
    trainer = tuple(range(ranks))
    if engines == per_engine == 1 and ranks == count:
        return DevicePlan(trainer, ((trainer[-1],),))

    needed = ranks + engines * per_engine
    if needed > count:
        fitting = max(0, (count - ranks) // per_engine)
        remedy = "set rollout.engines=1 with one device, which then shares the trainer's"
        if fitting:
            remedy = f"set rollout.engines={fitting}"
        elif ranks > count:
            remedy = f"start at most {count} ranks of the trainer"

        raise ConfigError(
            f"rollout.engines={engines}: {engines} x {per_engine} devices for engines and {ranks} "
            f"for the trainer are {needed}, and this machine has {count}: {remedy}, or start "
            "engines on other machines with `agentevo serve` and train with `agentevo learn`"
        )

    firsts = range(ranks, needed, per_engine)
    return DevicePlan(trainer, tuple(tuple(range(n, n + per_engine)) for n in firsts))


def devices_per_engine(section: EngineSection) -> int:
    """The number of devices that share the layers of one engine. Raises ConfigError for invalid
    options of vLLM."""
    if section.type == "vllm":
        from agentevo.inference.vllm.options import read_options

        return read_options(section).num_devices

    if section.type == "sglang":
        from agentevo.inference.sglang import options as sglang_options

        args = sglang_options.read_options(section).args
        for name, size in pairwise(args):
            if name in _SGLANG_SIZES and size.isdigit():
                return max(1, int(size))

    return 1


def plan_of(config: RunConfig) -> DevicePlan | None:
    """The plan for the engines that `agentevo train` starts; None if there are none, or the CPU
    computes. Raises ConfigError if they don't fit, ModelError without the device."""
    if not config.rollout.samplers:
        return None

    from agentevo.runtime.devices import all_of, find, is_accelerator

    device = find(config.model.device)
    if not is_accelerator(device):
        return None

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size())
    per_engine = devices_per_engine(config.engine)
    return plan_devices(len(all_of(device)), ranks, config.rollout.engines, per_engine)
