"""`agentevo launch-node`: the processes of a launch on one machine, as nodes.yaml lists them.

The trainer's ranks run to their end. Engines and samplers restart when they die
(runs/orchestration/supervisor.py). Node 0 writes a heartbeat to a file next to the run's folder,
and at the end how the trainer ended. Nodes without a rank then end with the same exit code. They
also end after LOST_S seconds without a heartbeat. The file's name contains the launch's id, so that
a restarted job does not read the end of the previous job as its own. SIGTERM and Ctrl-C reach the
trainer, which ends after its step. No part of the run is lost, and the same command resumes it.
"""

from __future__ import annotations

import ctypes
import itertools
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
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.runs.folder.resume_rules import changes
from agentevo.runs.launch.plan import LaunchPlan, read_file
from agentevo.runs.orchestration.supervisor import ChildProcess, Children, make_children
from agentevo.runtime.console import to_stderr
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.device_names import visible
from agentevo.runtime.files import write_atomic
from agentevo.runtime.signals import catch_stop_signals

POLL_INTERVAL_S = 0.2
HEARTBEAT_S = 5.0
LOST_S = 900.0
"""Longer than a cluster takes to replace a node."""
RECIPE_S = 900.0
"""The time in seconds that a trainer has to load its modules before it changes the run's recipe."""
OLD_END_S = 120.0
"""If node 0 recorded an end before this node started, the end counts only after this time, in
seconds."""
GRACE_S = 240.0
"""The time that the trainer has to end after its step, in seconds."""
RANK_END_S = 15.0
"""The time that the other ranks have to end after one has failed, in seconds."""
PR_SET_PDEATHSIG = 1
"""The option of prctl(2)."""
_LIBC = ctypes.CDLL(None)
STOPPED = 143
"""The exit code of a process that received a stop signal."""


class Heartbeat(msgspec.Struct):
    """The state that node 0 writes."""

    count: int
    code: int | None = None
    """The trainer's exit code, after it has ended."""


class LostNodeError(AgentEvoError):
    """Node 0 has written no heartbeat for too long."""


def run_node(
    path: Path,
    *,
    rank: int,
    head: str = "127.0.0.1",
    id: str = "0",
    parent: int | None = None,
    note: Callable[[str], None] = to_stderr,
) -> int:
    """Runs the processes of the node with that rank, and blocks. Returns the exit code of the
    trainer. `head` is the address of node 0. `parent` is the id of a process with which this one
    ends. Raises ConfigError for a rank that does not exist."""
    plan = read_file(path, LaunchPlan)
    if not 0 <= rank < len(plan.nodes):
        raise ConfigError(f"--rank {rank}: {path} has {len(plan.nodes)} nodes, counted from 0")
    if not re.fullmatch(r"[\w.-]{1,200}", id):
        raise ConfigError(f"--id {id[:40]!r} becomes the name of a file: use letters, digits and -")

    recipe = [str(path.parent / plan.recipe), *plan.overrides]
    config = load_config(recipe[0], recipe[1:])
    run_dir = config.run_dir
    heartbeats = run_dir.parent / f"{run_dir.name}.launch" / f"{id}.json"
    node = plan.nodes[rank]
    children = make_children(
        recipe,
        run_dir,
        engines=node.engines,
        samplers=node.samplers,
        machine=f"{socket.gethostname()}-",
        is_shared=len(plan.nodes) > 1,
    )
    reader = HeartbeatReader(heartbeats)
    trainer = None

    def poll() -> int | None:
        head_code = reader.poll() if rank else None
        return head_code if trainer is None else trainer.poll()

    with catch_stop_signals(parent) as stop, ExitStack() as stack:
        writer = stack.enter_context(HeartbeatWriter(heartbeats)) if rank == 0 else None
        if node.trainer:
            trainer = stack.enter_context(_TrainerProcess(plan, rank, head, recipe, run_dir))

        _run_children(children, config, poll, stop, note)
        code = trainer.end() if trainer is not None else None
        if not code and rank != 0:
            code = _wait_for_head(reader)
        if writer is not None:
            writer.code = code

        return STOPPED if code is None else code


def _run_children(
    children: list[ChildProcess],
    config: RunConfig,
    poll: Callable[[], int | None],
    stop: Callable[[], bool],
    note: Callable[[str], None],
) -> None:
    """Keeps the node's engines and samplers running. Starts when the run's folder exists with this
    recipe, and ends when `poll` returns the trainer's exit code or a stop is requested. Raises
    ChildFailedError."""
    run_dir = config.run_dir

    def goes_on() -> bool:
        time.sleep(POLL_INTERVAL_S)
        return poll() is None and not stop()

    started_at = time.monotonic()
    is_noted = False
    while not (is_there := (run_dir / "config.yaml").is_file()) or (changed := changes(config)):
        if is_there and time.monotonic() - started_at > RECIPE_S:
            break  # a process that starts now would report the difference and end
        if is_there and not is_noted:
            note(f"waiting for the trainer to use the new values of {', '.join(changed)}")
            is_noted = True
        if not goes_on():
            return

    with Children(children, note, run_dir / "logs") as supervised:
        while goes_on():
            supervised.check()


def _wait_for_head(reader: HeartbeatReader) -> int | None:
    """The trainer's exit code. A node that received a stop signal waits for the exit code. Some
    clusters end a job with its first node, so a node that ends first would end the trainer's node
    too."""
    deadline = time.monotonic() + GRACE_S
    while (code := reader.poll()) is None and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    return code


class _TrainerProcess:
    """The trainer's ranks on this node, which end with the context. A stop signal goes to the first
    rank of the node. That rank forwards the request to rank 0, which stops after its step and ends
    the others."""

    def __init__(
        self, plan: LaunchPlan, rank: int, head: str, recipe: list[str], run_dir: Path
    ) -> None:
        resume = ["--resume"] if (run_dir / "config.yaml").is_file() else []
        command = ["learn" if plan.is_apart else "train", *recipe, *resume]
        self._command = [sys.executable, "-m", "agentevo", *command]
        node = plan.nodes[rank]
        before = sum(node.trainer for node in plan.nodes[:rank])
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
        """The exit code. None while the ranks run. A failed rank ends the others, which would
        otherwise wait for it forever."""
        codes = [to_exit_code(process.poll()) for process in self._processes]
        failed = next((code for code in codes if code), None)
        return codes[0] if failed is None else failed

    def end(self) -> int:
        """Waits for the ranks for as long as the first one may take to end after its step. Then
        kills those that still run. Returns the exit code of the first rank, or of the rank that
        failed."""
        if self.poll() is None:
            self._processes[0].terminate()

        failed = self.poll()
        deadline = time.monotonic() + (GRACE_S if not failed else RANK_END_S)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))

        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

        codes = [to_exit_code(process.wait()) for process in self._processes]
        first = failed or (codes[0] if self._leads else next((c for c in codes if c), 0))
        assert first is not None
        return first


def _end_with_parent() -> None:
    """Runs in a rank before it starts. The rank is then killed when its node's process ends for any
    reason. Otherwise the trainer of the next start would find the run locked."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def to_exit_code(code: int | None) -> int | None:
    """The exit code as a shell reports it: 128 plus the signal's number."""
    return code if code is None or code >= 0 else 128 - code


class HeartbeatWriter:
    """Writes node 0's heartbeat, and at its end the trainer's exit code."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended = threading.Event()
        self.code: int | None = STOPPED
        self._thread = threading.Thread(target=self._write, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _write(self) -> None:
        for count in itertools.count():
            is_last = self._ended.is_set()
            heartbeat = Heartbeat(count, self.code if is_last else None)
            # the folder may be unavailable for a moment; the next heartbeat follows
            with suppress(OSError):
                write_atomic(self._path, msgspec.json.encode(heartbeat))
            if is_last:
                return
            self._ended.wait(HEARTBEAT_S)


class HeartbeatReader:
    """Reads node 0's heartbeat on the other nodes."""

    def __init__(self, path: Path, *, lost_s: float = LOST_S, old_s: float = OLD_END_S) -> None:
        self._path = path
        self._lost_s = lost_s
        self._old_s = old_s
        self._last: Heartbeat | None = None
        self._old: Heartbeat | None = None
        """The end of node 0 that was recorded when this node started. Node 0 may be restarting."""
        self._changed = time.monotonic()

    def poll(self) -> int | None:
        """The trainer's exit code, after it has ended. Raises LostNodeError."""
        with suppress(OSError, msgspec.DecodeError):
            heartbeat = decode_json(self._path.read_bytes(), Heartbeat)
            if self._last is None and heartbeat.code is not None:
                self._old = heartbeat

            if heartbeat != self._last:
                self._last = heartbeat
                self._changed = time.monotonic()

            is_old = heartbeat == self._old and time.monotonic() - self._changed < self._old_s
            if heartbeat.code is not None and not is_old:
                return heartbeat.code

        if time.monotonic() - self._changed > self._lost_s:
            raise LostNodeError(
                f"node 0 has written no heartbeat for {self._lost_s:g} s ({self._path}): check "
                "its log, and that all machines see the same folder"
            )

        return None
