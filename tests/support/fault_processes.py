"""Processes that are killed with SIGKILL and started again: the harness of tests/faults and of
`make soak`.

Every process is forked from one that has everything imported, so a start costs tens of milliseconds
and not seconds. In a shared page a process leaves marks: which phases it is in (PHASES), and how
long each took last. A kill comes from outside after a random time, or from inside, a random way
into the n-th call of a phase. Either is SIGKILL: nothing is cleaned up, flushed or reported.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import importlib
import inspect
import mmap
import multiprocessing
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

from agentevo.config import RunConfig

PRELOADED = [
    "agentevo.cli.main",
    "agentevo.runs.processes.learn",
    "agentevo.runs.orchestration.run",
    "agentevo.runs.processes.sample",
    "agentevo.runs.processes.serve",
    "agentevo.store.mongodb",
    "agentevo.store.postgresql",
    "agentevo.store.sqlite",
    "agentevo.training.trainer",
    "transformers.models.llama.modeling_llama",
    "fault_processes",
    "fault_preload",
]
_STORE = "agentevo.store.store:Store."
PHASES = {
    "begin": ["agentevo.runs.orchestration.run:find_resume_point"],
    "replay": ["agentevo.runs.orchestration.run:TrainingRun._replay_step"],
    "collect": ["agentevo.runs.orchestration.collect:Collector.collect"],
    "prepare": ["agentevo.training.trainer:Trainer.prepare"],
    "reserve": ["agentevo.runs.orchestration.run:reserve"],
    "train": ["agentevo.training.trainer:Trainer.step"],
    "evaluate": ["agentevo.runs.orchestration.evaluation:RunEvaluation.evaluate"],
    "checkpoint": ["agentevo.training.checkpoint:Checkpoints.save"],
    "commit": ["agentevo.runs.orchestration.run_record:RunRecord.commit"],
    "prune": ["agentevo.training.checkpoint:Checkpoints.prune"],
    "weights written": ["agentevo.inference.weights.weights_folder:WeightsFolder.write"],
    "weights read": ["agentevo.inference.weights.weights_folder:WeightsFolder.read"],
    "publish": ["agentevo.inference.embedded.torch_engine:TorchEngine.publish"],
    "generate": [
        "agentevo.inference.embedded.torch_engine:TorchEngine.generate",
        "agentevo.inference.serving.remote:RemoteEngine.generate",
    ],
    "tasks added": [_STORE + "add_tasks"],
    "lease": [
        "agentevo.store.sql:SQLStore.lease_tasks",
        "agentevo.store.mongodb:MongoDBStore.lease_tasks",
    ],
    "renew": [_STORE + "renew"],
    "attempts written": [_STORE + "write_trajectories"],
}
"""Phase -> the functions during which a process is in it. A process in no phase starts, waits or
ends."""
NAMES = list(PHASES)
TRAINER_PHASES = (
    "begin",
    "replay",
    "collect",
    "prepare",
    "reserve",
    "train",
    "checkpoint",
    "commit",
    "prune",
)
SAMPLER_PHASES = ("generate", "tasks added", "lease", "attempts written")
PHASES_OF = {
    "sample": SAMPLER_PHASES,
    "serve": ("generate", "publish", "weights read"),
    "learn": (*TRAINER_PHASES, "weights written"),
    "train": (*TRAINER_PHASES, "publish", *SAMPLER_PHASES),
}
"""Component -> phases in which it is killed."""
AIMED_AT = {
    "sample": SAMPLER_PHASES,
    "serve": PHASES_OF["serve"],
    "learn": ("begin", "commit", "weights written"),
    "train": (*TRAINER_PHASES, "publish"),
}
"""The same where each phase is aimed at once. What a trainer does on its own is aimed at without
samplers, and what samplers do without a trainer."""
PROGRESS = {"sample": "attempts written", "serve": "generate", "learn": "commit", "train": "commit"}
"""Component -> the phase whose first end shows that a process has made progress."""


class Marks(ctypes.Structure):
    """What a process leaves behind however it ends: one page of shared memory."""

    _fields_ = (
        ("active", ctypes.c_int32 * len(NAMES)),
        ("entered", ctypes.c_int32 * len(NAMES)),
        ("took_s", ctypes.c_double * len(NAMES)),
        ("progress_s", ctypes.c_double),
        ("hold_at", ctypes.c_int64),  # the attack's: no step begins after so many; 0: no bound
    )

    @classmethod
    def at(cls, path: Path) -> Marks:
        if not path.exists():
            path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            return cls.from_buffer(mmap.mmap(file.fileno(), mmap.PAGESIZE))

    def where(self) -> list[str]:
        return [name for name, active in zip(NAMES, self.active, strict=True) if active]


@dataclass(frozen=True)
class PlannedKill:
    """A kill from inside: `delay_s` into the `number`-th call of a phase, and at the call's end at
    the latest."""

    phase: str
    number: int
    delay_s: float


@dataclass(frozen=True)
class Launch:
    """What a process is started with."""

    component: str
    name: str
    config: RunConfig
    log: Path
    marks: Path
    kill: PlannedKill | None = None
    before: str | None = None
    """`module:function` of a fault (fault_hooks.py), called first with this launch."""


def run_launched(launch: Launch) -> None:
    """Runs in the new process."""
    started = time.monotonic()
    log = os.open(launch.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    marks = Marks.at(launch.marks)
    ctypes.memset(ctypes.byref(marks), 0, Marks.hold_at.offset)

    for index, name in enumerate(NAMES):
        for place in PHASES[name]:
            _watch(place, index, marks, launch, started)

    _hold(marks)
    if launch.before is not None:
        _find(launch.before)[2](launch)

    run_component(launch)


def run_component(launch: Launch) -> None:
    import torch

    from agentevo.observability import LiveView

    torch.set_num_threads(1)
    config = launch.config
    view = LiveView(launch.name, stream=sys.stdout, plain=True)
    if launch.component == "train":
        from agentevo.api.run import train

        train(config, resume=(config.run_dir / "config.yaml").is_file(), view=view)
    elif launch.component == "learn":
        from agentevo.runs.processes.learn import learn

        learn(config, view=view)
    elif launch.component == "serve":
        from agentevo.runs.processes.serve import serve

        serve(config, host="127.0.0.1", port=0, name=launch.name)
    else:
        from agentevo.runs.processes.sample import sample

        sample(config, name=launch.name)


def _find(place: str) -> tuple[Any, str, Any]:
    """(owner, name, function) of `module:Class.method` or `module:function`."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name, getattr(owner, name)


def _watch(place: str, index: int, marks: Marks, launch: Launch, started: float) -> None:
    """Wraps a function so that it marks when it runs, and kills the process where that is
    planned."""
    owner, name, function = _find(place)
    planned = launch.kill if launch.kill and launch.kill.phase == NAMES[index] else None

    def enter() -> tuple[float, bool]:
        marks.active[index] += 1
        marks.entered[index] += 1
        if planned is None or marks.entered[index] != planned.number:
            return time.monotonic(), False
        threading.Timer(planned.delay_s, _die).start()
        return time.monotonic(), True

    def leave(entered: float, is_planned: bool) -> None:
        if is_planned:
            _die()
        marks.active[index] -= 1
        marks.took_s[index] = time.monotonic() - entered
        if NAMES[index] == PROGRESS[launch.component] and not marks.progress_s:
            marks.progress_s = time.monotonic() - started

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def watched(*args: Any, **kwargs: Any) -> Any:
            entered = enter()
            try:
                return await function(*args, **kwargs)
            finally:
                leave(*entered)

    else:

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            entered = enter()
            try:
                return function(*args, **kwargs)
            finally:
                leave(*entered)

    setattr(owner, name, watched)


def _hold(marks: Marks) -> None:
    """No run is over before all its kills were, however quick the machine: steps wait while as many
    are committed as `hold_at` says."""
    owner, name, step = _find("agentevo.runs.orchestration.run:TrainingRun.step")

    @wraps(step)
    async def held(self: Any) -> Any:
        while marks.hold_at and self.record.progress.step >= marks.hold_at:
            await asyncio.sleep(0.01)
        return await step(self)

    setattr(owner, name, held)


def _end_with_the_tests() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class ForkServer:
    """The process that all others are forked from. One per test session: it takes seconds to
    start."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        needed = {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        before = {name: os.environ.get(name) for name in needed}
        os.environ.update(needed)

        resource_tracker.ensure_running()
        try:
            with mock.patch.object(multiprocessing.util, "spawnv_passfds", self._start):
                first = self._context.Process(target=_nothing)
                first.start()
            first.join()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def _start(self, path: str, words: Sequence[str], descriptors: Sequence[int]) -> int:
        """Starts it as `subprocess` does, so that it begins warm (warm_processes.py)."""
        program = f"import agentevo\n{words[-1]}"
        self._process = subprocess.Popen([sys.executable, "-c", program], pass_fds=descriptors)
        return self._process.pid

    def fork(self, launch: Launch) -> Any:
        process = self._context.Process(target=run_launched, args=(launch,), name=launch.name)
        process.start()
        return process

    def run(self, target: Callable[..., None], *arguments: Any) -> int:
        """Runs a function in a process of its own; returns the exit code."""
        process = self._context.Process(target=target, args=arguments)
        process.start()
        process.join()
        return int(process.exitcode or 0)


def _nothing() -> None:
    return


class Component:
    """One member of a run, started as often as it was killed."""

    def __init__(
        self,
        fork_server: ForkServer,
        kind: str,
        name: str,
        config: RunConfig,
        folder: Path,
        *,
        before: str | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.before = before
        self.log = folder / f"{name}.log"
        self._fork_server = fork_server
        self.config = config
        self._marks_file = folder / f"{name}.marks"
        self.marks = Marks.at(self._marks_file)
        self.took_s = dict.fromkeys(NAMES, 0.02)
        """Usual duration of each phase, as measured so far."""
        self.progress_s = 1.5
        self.num_fruitless = 0
        """Starts in a row that made no progress."""
        self.process: Any = None

    def start(self, planned: PlannedKill | None = None) -> None:
        launch = Launch(
            self.kind, self.name, self.config, self.log, self._marks_file, planned, self.before
        )
        self.process = self._fork_server.fork(launch)
        self.started = time.monotonic()

    def kill(self) -> None:
        self.process.kill()
        self.reap()

    def reap(self) -> int:
        """Waits for the end of the process and keeps its measurements; returns the exit code."""
        self.process.join()
        for index, name in enumerate(NAMES):
            if self.marks.took_s[index]:
                self.took_s[name] = self.marks.took_s[index]

        self.num_fruitless = 0 if self.marks.progress_s else self.num_fruitless + 1
        if self.marks.progress_s:
            self.progress_s = 0.7 * self.progress_s + 0.3 * self.marks.progress_s
        return int(self.process.exitcode)

    def end(self, within_s: float = 300.0) -> int:
        """Sends SIGTERM; returns the exit code. Raises AssertionError if it goes on."""
        self.process.terminate()
        self.process.join(within_s)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(
                f"{self.name} did not end within {within_s:g} s of SIGTERM:\n{self.tail()}"
            )

        return int(self.process.exitcode)

    def tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(text[-lines:])
