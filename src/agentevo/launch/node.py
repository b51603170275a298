"""`agentevo launch node`: the processes of one machine of a launch, as nodes.yaml has them.

The trainer's ranks run to their end; engines and samplers are started again when they die
(processes/supervisor.py). Node 0 says in a file beside the run's folder that it lives, and how the
trainer ended; nodes without a rank end with it, by the same exit code, and give up when nothing has
been heard of it for LOST_S. The file's name holds the launch's id, so that a job that is started
again does not take the end of the former one for its own. SIGTERM and Ctrl-C go to the trainer,
which ends after its step; nothing of the run is lost, and the same command goes on with it.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import msgspec

from agentevo.config import RunConfig, load_config
from agentevo.console import to_stderr
from agentevo.device_names import visible
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.files import write_atomic
from agentevo.inference.directory import EngineDirectory
from agentevo.launch.fleet import FleetNode
from agentevo.launch.plan import LaunchPlan, read_plan
from agentevo.processes.supervisor import ChildProcess, Children
from agentevo.runs.resume_rules import changes
from agentevo.signals import asked_to_stop

LOOK_S = 0.2
BEAT_S = 5.0
LOST_S = 900.0
"""Longer than a node takes to be replaced."""
RECIPE_S = 900.0
"""For a trainer to load what it needs before it changes the run's recipe."""
OLD_S = 120.0
"""An end that was there before this node began counts after so long."""
GRACE_S = 240.0
"""For the trainer to end after its step."""
SOON_S = 15.0
"""For the ranks beside one that failed."""
PR_SET_PDEATHSIG = 1
"""prctl(2)."""
_LIBC = ctypes.CDLL(None)
STOPPED = 143
"""Exit code of who was asked to end."""


class HeartbeatThread(msgspec.Struct):
    """What node 0 says of itself."""

    count: int
    code: int | None = None
    """The trainer's exit code, once it has ended."""


class LostNodeError(AgentEvoError):
    """Node 0 is not heard of any more."""


def run_node(
    path: Path,
    *,
    rank: int,
    head: str = "127.0.0.1",
    id: str = "0",
    parent: int | None = None,
    note: Callable[[str], None] = to_stderr,
) -> int:
    """Runs what the node of that rank has to; blocks. Returns the exit code of the trainer. `head`
    is where node 0 is reached; `parent` a process with which it ends. Raises ConfigError for a rank
    that there is not."""
    plan = read_plan(path)
    if not 0 <= rank < len(plan.nodes):
        raise ConfigError(f"--rank {rank}: {path} has {len(plan.nodes)} nodes, from 0")
    if not re.fullmatch(r"[\w.-]{1,200}", id):
        raise ConfigError(f"--id {id[:40]!r} becomes the name of a file: use letters, digits and -")

    words = [str(path.parent / plan.recipe), *plan.overrides]
    config = load_config(words[0], words[1:])
    run_dir = config.run_dir
    beat = run_dir.parent / f"{run_dir.name}.launch" / f"{id}.json"
    node = plan.nodes[rank]
    watch = HeadWatch(beat)
    trainer = None

    def exit_code() -> int | None:
        of_head = watch.poll() if rank else None
        return of_head if trainer is None else trainer.poll()

    with asked_to_stop(parent) as stop, ExitStack() as stack:
        heart = stack.enter_context(Heart(beat)) if rank == 0 else None
        if node.trainer:
            trainer = stack.enter_context(_TrainerProcess(plan, rank, head, words, run_dir))

        _look_after(node, words, config, len(plan.nodes) > 1, exit_code, stop, note)
        code = trainer.end() if trainer is not None else None
        if not code and rank != 0:
            code = _end_of_head(watch.poll)
        if heart is not None:
            heart.code = code

        return STOPPED if code is None else code


def _look_after(
    node: FleetNode,
    words: list[str],
    config: RunConfig,
    is_shared: bool,
    ended: Callable[[], int | None],
    stop: Callable[[], bool],
    note: Callable[[str], None],
) -> None:
    """Keeps the node's engines and samplers alive from when the run's folder is there, with this
    recipe, until the trainer has ended or somebody asks to stop. Raises ChildFailedError."""
    run_dir = config.run_dir

    def goes_on() -> bool:
        time.sleep(LOOK_S)
        return ended() is None and not stop()

    began = time.monotonic()
    is_told = False
    while not (is_there := (run_dir / "config.yaml").is_file()) or (changed := changes(config)):
        if is_there and time.monotonic() - began > RECIPE_S:
            break  # who is started now says what differs, and ends
        if is_there and not is_told:
            note(f"waiting for the trainer to go on with {', '.join(changed)} as given here")
            is_told = True
        if not goes_on():
            return

    with Children(_children(node, words, run_dir, is_shared), note, run_dir / "logs") as children:
        while goes_on():
            children.check()


def _end_of_head(ended: Callable[[], int | None]) -> int | None:
    """The trainer's exit code, for which a node that was asked to end waits: one that ends first
    would take the trainer's node with it, where the cluster ends a job with its first node."""
    deadline = time.monotonic() + GRACE_S
    while (code := ended()) is None and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return code


def _children(
    node: FleetNode, words: list[str], run_dir: Path, is_shared: bool
) -> list[ChildProcess]:
    """`is_shared`: other machines ask these engines too."""
    announced = EngineDirectory(run_dir / "engines")
    agentevo = [sys.executable, "-m", "agentevo"]
    parent = ["--parent", str(os.getpid())]
    machine = socket.gethostname()
    logs = run_dir / "logs"
    host = ["--host", "0.0.0.0"] if is_shared else []

    def child(
        command: str, name: str, more: list[str], devices: tuple[int, ...], is_engine: bool
    ) -> ChildProcess:
        return ChildProcess(
            name,
            [*agentevo, command, *words, "--name", name, *more, *parent],
            logs / f"{name}.log",
            announced if is_engine else None,
            environment=visible(devices),
        )

    engines = [
        child("serve", f"engine-{machine}-{n}", host, devices, True)
        for n, devices in enumerate(node.engines)
    ]
    samplers = [
        child("sample", f"sampler-{machine}-{n}", [], (), False) for n in range(node.samplers)
    ]
    return engines + samplers


class _TrainerProcess:
    """The trainer's ranks on this node, which are ended with the context. One of them is asked to
    end: the first of all, which others pass it on to, stops after its step and sends them home."""

    def __init__(
        self, plan: LaunchPlan, rank: int, head: str, words: list[str], run_dir: Path
    ) -> None:
        going_on = ["--resume"] if (run_dir / "config.yaml").is_file() else []
        command = ["learn" if plan.is_apart else "train", *words, *going_on]
        self._command = [sys.executable, "-m", "agentevo", *command]
        node = plan.nodes[rank]
        before = sum(other.trainer for other in plan.nodes[:rank])
        self._environments = [
            {
                **os.environ,
                **visible(node.trainer_devices),
                "RANK": str(before + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(plan.ranks),
                "LOCAL_WORLD_SIZE": str(node.trainer),
                "MASTER_ADDR": head,
                "MASTER_PORT": str(plan.port),
            }
            for local in range(node.trainer)
        ]
        self._leads = rank == 0

    def __enter__(self) -> Self:
        self._processes = [
            subprocess.Popen(
                self._command,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
            for environment in self._environments
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def poll(self) -> int | None:
        """None while they go on. One that failed ends it: the others wait for it in vain."""
        codes = [_exit_code(process.poll()) for process in self._processes]
        failed = next((code for code in codes if code), None)
        return codes[0] if failed is None else failed

    def end(self) -> int:
        """Waits for the ranks for as long as the first one may take to end after its step; kills
        what is left then. Returns the exit code of the first one, or of the one that failed."""
        if self.poll() is None:
            self._processes[0].terminate()

        failed = self.poll()
        deadline = time.monotonic() + (GRACE_S if not failed else SOON_S)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))

        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

        codes = [_exit_code(process.wait()) for process in self._processes]
        first = failed or (codes[0] if self._leads else next((c for c in codes if c), 0))
        assert first is not None
        return first


def _end_with_parent() -> None:
    """In a rank before it begins: it is killed when its node's process is, whatever killed that.
    The trainer of the next start would find the run taken otherwise."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _exit_code(code: int | None) -> int | None:
    """As a shell has it: 128 and the signal's number."""
    return code if code is None or code >= 0 else 128 - code


class Heart:
    """Node 0's: says that it lives, and at its end the trainer's exit code."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done = threading.Event()
        self.code: int | None = STOPPED
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _beat(self) -> None:
        count = 0
        is_last = False
        while not is_last:
            is_last = self._done.is_set()
            beat = HeartbeatThread(count, self.code if is_last else None)
            count += 1
            with suppress(OSError):  # the folder is away for a moment; the next beat comes
                write_atomic(self._path, msgspec.json.encode(beat))
            self._done.wait(BEAT_S)


class HeadWatch:
    """What other nodes know of node 0."""

    def __init__(self, path: Path, *, lost_s: float = LOST_S, old_s: float = OLD_S) -> None:
        self._path = path
        self._lost_s = lost_s
        self._old_s = old_s
        self._seen: HeartbeatThread | None = None
        self._old: HeartbeatThread | None = None
        """How node 0 had ended when this node began: perhaps it is about to begin again."""
        self._changed = time.monotonic()

    def poll(self) -> int | None:
        """The trainer's exit code, once it has ended. Raises LostNodeError."""
        with suppress(OSError, msgspec.DecodeError):
            beat = msgspec.json.decode(self._path.read_bytes(), type=HeartbeatThread)
            if self._seen is None and beat.code is not None:
                self._old = beat

            if beat != self._seen:
                self._seen = beat
                self._changed = time.monotonic()

            is_old = beat == self._old and time.monotonic() - self._changed < self._old_s
            if beat.code is not None and not is_old:
                return beat.code

        if time.monotonic() - self._changed > self._lost_s:
            raise LostNodeError(
                f"node 0 has not been heard of for {self._lost_s:g} s ({self._path}): look at its "
                "log, and whether all machines see the same folder"
            )

        return None
