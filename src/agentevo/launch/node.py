"""`agentevo launch node`: the processes of one machine of a launch, as nodes.yaml has them.

The trainer's ranks run to their end; engines and samplers are started again when they die
(processes/supervisor.py). Node 0 says in a file beside the run's folder that it lives, and how the
trainer ended; nodes without a rank end with it, by the same exit code, and give up when nothing has
been heard of it for LOST_S. The file's name holds the launch's id, so that a job that is started
again does not take the end of the former one for its own. SIGTERM and Ctrl-C go to the trainer,
which ends after its step; nothing of the run is lost, and the same command goes on with it.
"""

from __future__ import annotations

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

from agentevo.config import load_config
from agentevo.console import to_stderr
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.files import write_atomic
from agentevo.inference.directory import EngineDirectory
from agentevo.launch.fleet import Node
from agentevo.launch.plan import Plan, read_plan
from agentevo.processes.supervisor import Child, Children
from agentevo.signals import asked_to_stop

LOOK_S = 0.2
BEAT_S = 5.0
LOST_S = 900.0
"""Longer than a node takes to be replaced."""
GRACE_S = 240.0
"""For the trainer to end after its step."""
STOPPED = 143
"""Exit code of who was asked to end."""
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


class Beat(msgspec.Struct):
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
    note: Callable[[str], None] = to_stderr,
) -> int:
    """Runs what the node of that rank has to; blocks. Returns the exit code of the trainer. `head`
    is where node 0 is reached. Raises ConfigError for a rank that there is not."""
    plan = read_plan(path)
    if not 0 <= rank < len(plan.nodes):
        raise ConfigError(f"--rank {rank}: {path} has {len(plan.nodes)} nodes, from 0")
    if not re.fullmatch(r"[\w.-]{1,200}", id):
        raise ConfigError(f"--id {id[:40]!r} becomes the name of a file: use letters, digits and -")
    words = [str(path.parent / plan.recipe), *plan.overrides]
    run_dir = load_config(words[0], words[1:]).run_dir
    beat = run_dir.parent / f"{run_dir.name}.launch" / f"{id}.json"
    node = plan.nodes[rank]
    with asked_to_stop() as stop, ExitStack() as stack:
        heart = stack.enter_context(Heart(beat)) if rank == 0 else None
        if node.trainer:
            trainer = stack.enter_context(_Trainer(plan, rank, head, words, run_dir))
            ended: Callable[[], int | None] = trainer.poll
        else:
            trainer, ended = None, HeadWatch(beat).poll
        _look_after(node, words, run_dir, len(plan.nodes) > 1, ended, stop, note)
        code = trainer.end() if trainer is not None else ended()
        if heart is not None:
            heart.code = code
        return STOPPED if code is None else code


def _look_after(
    node: Node,
    words: list[str],
    run_dir: Path,
    is_shared: bool,
    ended: Callable[[], int | None],
    stop: Callable[[], bool],
    note: Callable[[str], None],
) -> None:
    """Keeps the node's engines and samplers alive from when the run's folder is there until the
    trainer has ended or somebody asks to stop. Raises ChildFailedError."""

    def goes_on() -> bool:
        time.sleep(LOOK_S)
        return ended() is None and not stop()

    while not (run_dir / "config.yaml").is_file():  # whoever makes it wants the folder empty
        if not goes_on():
            return
    with Children(_children(node, words, run_dir, is_shared), note, run_dir / "logs") as children:
        while goes_on():
            children.check()


def _children(node: Node, words: list[str], run_dir: Path, is_shared: bool) -> list[Child]:
    """`is_shared`: other machines ask these engines too."""
    announced = EngineDirectory(run_dir / "engines")
    agentevo, parent = [sys.executable, "-m", "agentevo"], ["--parent", str(os.getpid())]
    machine, logs = socket.gethostname(), run_dir / "logs"
    host = ["--host", "0.0.0.0"] if is_shared else []

    def child(
        command: str, name: str, more: list[str], devices: tuple[int, ...], is_engine: bool
    ) -> Child:
        return Child(
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


def visible(devices: tuple[int, ...]) -> dict[str, str]:
    """The environment in which a process sees these devices alone; empty for a CPU's."""
    names = ",".join(str(device) for device in devices)
    return dict.fromkeys(DEVICE_VARIABLES, names) if devices else {}


class _Trainer:
    """The trainer's ranks on this node; they are ended with the context."""

    def __init__(self, plan: Plan, rank: int, head: str, words: list[str], run_dir: Path) -> None:
        node = plan.nodes[rank]
        command = ["learn", *words]
        if not plan.is_apart:
            going_on = (run_dir / "config.yaml").is_file()
            command = ["train", *words, *(["--resume"] if going_on else [])]
        launcher = [sys.executable]
        if plan.ranks > 1:
            launcher += ["-m", "torch.distributed.run", f"--nnodes={plan.trainer_nodes}"]
            launcher += [f"--nproc-per-node={node.trainer}", f"--node-rank={rank}"]
            launcher += [f"--master-addr={head}", f"--master-port={plan.port}"]
        self._command = [*launcher, "-m", "agentevo", *command]
        self._environment = {**os.environ, **visible(node.trainer_devices)}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, env=self._environment, start_new_session=True
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def poll(self) -> int | None:
        return _exit_code(self._process.poll())

    def end(self) -> int:
        """Asks it to end after its step; kills it after GRACE_S."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = _exit_code(self._process.wait())
        assert code is not None
        return code


def _exit_code(code: int | None) -> int | None:
    """As a shell has it: 128 and the signal's number."""
    return code if code is None or code >= 0 else 128 - code


class Heart:
    """Node 0's: says that it lives, and at its end the trainer's exit code."""

    def __init__(self, path: Path) -> None:
        self._path, self._done = path, threading.Event()
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
        count, is_last = 0, False
        while not is_last:
            is_last = self._done.is_set()
            beat = Beat(count, self.code if is_last else None)
            count += 1
            with suppress(OSError):  # the folder is away for a moment; the next beat comes
                write_atomic(self._path, msgspec.json.encode(beat))
            self._done.wait(BEAT_S)


class HeadWatch:
    """What other nodes know of node 0."""

    def __init__(self, path: Path, *, lost_s: float = LOST_S) -> None:
        self._path, self._lost_s = path, lost_s
        self._seen: Beat | None = None
        self._changed = time.monotonic()

    def poll(self) -> int | None:
        """The trainer's exit code, once it has ended. Raises LostNodeError."""
        with suppress(OSError, msgspec.DecodeError):
            beat = msgspec.json.decode(self._path.read_bytes(), type=Beat)
            if beat != self._seen:
                self._seen, self._changed = beat, time.monotonic()
            if beat.code is not None:
                return beat.code
        if time.monotonic() - self._changed > self._lost_s:
            raise LostNodeError(
                f"node 0 has not been heard of for {self._lost_s:g} s ({self._path}): look at its "
                "log, and whether all machines see the same folder"
            )
        return None
