"""An agent that is a program, in any language: one process for each attempt.

The program's environment variables (`variables`) contain the policy's URL, the task and the URL for
rewards. The program posts its reward to AGENTEVO_REWARD_URL, or prints it as the last line of
stdout (posted_rewards.py). An exit code other than 0 fails the attempt, with the end of stderr as
the reason. The trajectory's call `process` records the last 64 KB of stdout and stderr for any
outcome.

All processes that the program started end with the attempt.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

import msgspec
import psutil

from agentevo.agents.capture import client_variables
from agentevo.agents.policy import AttemptSession, Policy
from agentevo.agents.posted_rewards import outcome_of_rewards, printed_reward
from agentevo.config.agents import CommandAgentSection, agents
from agentevo.errors import CommandFailedError, ConfigError, NoCallError
from agentevo.runtime.daemon_threads import run_in_thread
from agentevo.runtime.trace_header import traceparent
from agentevo.types import Outcome, Task

KEPT_BYTES = 64 * 2**10
"""The number of bytes of each stream that are kept."""
GRACE_S = 1.0
KILLING_S = 2.0
"""How long to search for further processes to kill, since processes can start others in that
time."""
POLL_INTERVAL_S = 0.02
DRAIN_S = 0.3
_CHUNK = 2**16

_alive: set[ProcessTree] = set()


@dataclass(frozen=True)
class EndedProcess:
    code: int
    """Exit code; negative for the signal that ended it."""
    stdout: str
    stderr: str


class ProcessTree:
    """Runs a process, and ends it together with all processes that it starts.

    The process has its own session, so that Ctrl-C does not reach it. Its descendants are found by
    their parents, and by a unique value in their environment. The value also finds processes that
    left the session and lost their parent. The remaining processes get SIGTERM, and are killed
    GRACE_S later. This happens when the process has ended, when `stop` is called, and at the end of
    this process. A process that changed both its environment and its parents is not found.

    The last KEPT_BYTES bytes of its output are kept, and any amount can be written.

    `run` is called once, on its own thread; `stop` on any thread."""

    def __init__(
        self, command: Sequence[str], *, cwd: Path | None, environment: Mapping[str, str], mark: str
    ) -> None:
        """`mark`: the environment variable with a value that no other process has."""
        self._command = list(command)
        self._cwd = cwd
        self._environment = dict(environment)
        self._mark = (mark, self._environment[mark])
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._written = {"stdout": bytearray(), "stderr": bytearray()}
        self.ended = threading.Event()
        """Set when `run` has returned or raised, and all processes of the tree have ended."""

    def stop(self) -> None:
        """Begins to end the tree, which takes seconds. `ended` is set afterwards."""
        self._stopped.set()

    def written(self, stream: str) -> str:
        """The last part of the process's output to `stdout` or `stderr`."""
        return bytes(self._written[stream][-KEPT_BYTES:]).decode("utf-8", "replace")

    def run(self) -> EndedProcess:
        """Runs the process until it ends or is stopped. Raises OSError if it can't be started."""
        _alive.add(self)
        try:
            with subprocess.Popen(
                self._command,
                cwd=self._cwd,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            ) as self._process:
                self._read_until_over(self._process)
        finally:
            _alive.discard(self)
            self.ended.set()

        return EndedProcess(
            self._process.returncode, self.written("stdout"), self.written("stderr")
        )

    def _read_until_over(self, process: subprocess.Popen[bytes]) -> None:
        with selectors.DefaultSelector() as streams:
            for name in self._written:
                stream: IO[bytes] = getattr(process, name)
                os.set_blocking(stream.fileno(), False)
                streams.register(stream, selectors.EVENT_READ, self._written[name])

            try:
                while process.poll() is None and not self._stopped.is_set():
                    self._read(streams)
                self._drain(streams)
            finally:
                self.kill(grace_s=GRACE_S)
                self._drain(streams)

    def _drain(self, streams: selectors.BaseSelector) -> None:
        """Reads the last output, for a limited time: other processes of the tree can still
        write."""
        until = time.monotonic() + DRAIN_S
        while self._read(streams, 0.0) and time.monotonic() < until:
            continue

    def _read(self, streams: selectors.BaseSelector, within_s: float = POLL_INTERVAL_S) -> bool:
        """Reads one piece of the available output. Returns whether there was any."""
        if not streams.get_map():
            self._stopped.wait(within_s)
            return False

        has_read = False
        for key, _ in streams.select(within_s):
            with contextlib.suppress(BlockingIOError):
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    streams.unregister(key.fileobj)
                    continue

                has_read = True
                recent: bytearray = key.data
                recent += chunk
                if len(recent) > 4 * KEPT_BYTES:
                    del recent[:-KEPT_BYTES]

        return has_read

    def kill(self, *, grace_s: float) -> None:
        """Ends the living processes of the tree."""
        living = self._living({})
        for process in living.values():
            with contextlib.suppress(psutil.Error):
                process.terminate()

        asked_at = time.monotonic()
        while living and time.monotonic() - asked_at < grace_s:
            time.sleep(POLL_INTERVAL_S / 2)
            living = self._living(living, is_thorough=False)

        living = self._living(living)
        asked_at = time.monotonic()
        while living and time.monotonic() - asked_at < KILLING_S:
            for process in living.values():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(POLL_INTERVAL_S / 2)
            living = self._living(living)

    def _living(
        self, processes: Mapping[int, psutil.Process], *, is_thorough: bool = True
    ) -> dict[int, psutil.Process]:
        """The running processes of the tree, by id: the root and `processes`, their descendants,
        and with `is_thorough` all processes with the mark in their environment."""
        process = self._process
        roots = list(processes.values())
        with contextlib.suppress(psutil.Error):
            if process is not None and process.poll() is None:
                roots.append(psutil.Process(process.pid))

        if is_thorough:
            roots += [
                candidate for candidate in psutil.process_iter() if self._is_marked(candidate)
            ]

        living: dict[int, psutil.Process] = {}
        for root in roots:
            with contextlib.suppress(psutil.Error):
                for member in (root, *root.children(recursive=True)):
                    if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                        living[member.pid] = member

        return living

    def _is_marked(self, process: psutil.Process) -> bool:
        name, value = self._mark
        try:
            return process.pid != os.getpid() and process.environ().get(name) == value
        except (psutil.Error, OSError):
            return False


@atexit.register
def _kill_all() -> None:
    """Kills the remaining processes if the interpreter ends immediately, as after a second
    Ctrl-C."""
    for tree in list(_alive):
        tree.kill(grace_s=0.0)


MAX_VARIABLE_BYTES = 64 * 2**10
"""The maximum bytes of a task or of texts in an environment variable. Larger ones are in a file."""
MAX_STDERR_CHARS = 1500
"""The number of characters of stderr in the reason of a failure."""
_ERROR = re.compile(r"(?:Uncaught )?[\w.]*(?:Error|Exception)\b[^\n]*")
"""The start of a line that names an exception, as Python, Node and the JVM write it."""
ENDING_S = GRACE_S + KILLING_S + 1.0
"""The time in which a cancelled attempt waits for the end of its processes. The processes also end
after this time."""


@agents.register("command")
class CommandAgent:
    """Runs a program for each attempt, which calls the policy through the gateway."""

    Config = CommandAgentSection

    def __init__(self, section: CommandAgentSection) -> None:
        """Raises ConfigError for a program that does not exist."""
        self._section = section
        self._command_line = shlex.join(section.command)

        self._cwd = section.cwd
        if self._cwd is not None and not self._cwd.is_dir():
            raise ConfigError(f"agent.cwd: {self._cwd} is not a folder")

        program = Path(section.command[0])
        path = section.env.get("PATH", os.environ.get("PATH"))
        is_path = os.sep in section.command[0]
        place = (self._cwd or Path.cwd()) / program if is_path else program
        if shutil.which(str(place), path=path) is None:
            raise ConfigError(
                f"agent.command: there is no program {section.command[0]!r}"
                + ("" if is_path else " on the PATH")
            )

        self._slots = asyncio.Semaphore(section.max_processes or 4 * (os.cpu_count() or 1))

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """See Agent.run. Raises CommandFailedError and NoCallError."""
        with policy.waiting():
            await self._slots.acquire()

        try:
            session = policy.session
            process = await self._run_to_end(task, policy, session)
        finally:
            self._slots.release()

        if process.code:
            raise CommandFailedError(self._failure(process))

        if not policy.was_asked:
            raise NoCallError(
                f"{self._command_line} made no call to the policy, which is at {session.base_url}: "
                "let its client take OPENAI_BASE_URL and OPENAI_API_KEY from the environment"
            )

        printed = printed_reward(process.stdout, has_posted=bool(session.posted))
        rewards = [*session.posted, *([printed] if printed is not None else [])]
        return outcome_of_rewards(rewards, policy.received)

    async def _run_to_end(
        self, task: Task, policy: Policy, session: AttemptSession
    ) -> EndedProcess:
        """Runs the program to its end. On cancellation, ends the program and all processes that it
        started."""
        with (
            policy.call("process", Path(self._section.command[0]).name) as call,
            variables(task, session, traceparent(), policy.texts.all_given()) as attempt_variables,
        ):
            tree = ProcessTree(
                self._section.command,
                cwd=self._cwd,
                environment=_with_changes(os.environ | self._section.env, attempt_variables),
                mark="AGENTEVO_API_KEY",
            )
            try:
                process = await run_in_thread(tree.run, "agent")
                call.note(exit_code=process.code)
                return process
            except OSError as error:
                raise CommandFailedError(
                    f"{self._command_line} can't be started: {error}"
                ) from error
            finally:
                tree.stop()
                deadline = time.monotonic() + ENDING_S
                while not tree.ended.is_set() and time.monotonic() < deadline:
                    await asyncio.sleep(0.01)
                call.keep(stdout=tree.written("stdout"), stderr=tree.written("stderr"))

    def _failure(self, process: EndedProcess) -> str:
        ending = f"ended with exit code {process.code}"
        if process.code < 0:
            number = -process.code
            is_known = number in set(signal.Signals)
            ending = (
                f"was ended by {signal.Signals(number).name if is_known else f'signal {number}'}"
            )

        stderr = process.stderr.rstrip()
        detail = f"\n{stderr[-MAX_STDERR_CHARS:]}" if "\n" in stderr else ""
        return f"{self._command_line} {ending}: {_reason(stderr)}{detail}"


def _reason(stderr: str) -> str:
    """The line with the reason of a program's failure: the last line that names an error, else the
    last line. Node, for example, writes its stack and version after the error."""
    lines = stderr.splitlines() or ["stderr is empty"]
    return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])


@contextmanager
def variables(
    task: Task,
    session: AttemptSession,
    trace: str | None = None,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[dict[str, str | None]]:
    """The changes of this process's environment variables for an attempt's program. None removes a
    variable. `trace`: the trace context for OpenTelemetry. `texts`: named texts, which the program
    gets as a JSON object."""
    environment: dict[str, str | None] = client_variables(session.base, session.key) | {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_BASE": session.base_url,
        "AGENTEVO_BASE_URL": session.base_url,
        "AGENTEVO_API_KEY": session.key,
        "AGENTEVO_REWARD_URL": session.reward_url,
        "AGENTEVO_TASK": None,
        "AGENTEVO_TASK_FILE": None,
        "AGENTEVO_TEXTS": None,
        "AGENTEVO_TEXTS_FILE": None,
        "TRACEPARENT": trace,
        "TRACESTATE": None,
    }
    contents = {"AGENTEVO_TASK": msgspec.json.encode(task)}
    if texts:
        contents["AGENTEVO_TEXTS"] = msgspec.json.encode(dict(texts))

    with tempfile.TemporaryDirectory(prefix="agentevo-task-", ignore_cleanup_errors=True) as folder:
        for name, content in contents.items():
            if len(content) <= MAX_VARIABLE_BYTES:
                environment[name] = content.decode()
                continue
            path = Path(folder) / f"{name.rpartition('_')[2].lower()}.json"
            path.write_bytes(content)
            environment[f"{name}_FILE"] = str(path)

        yield environment


def _with_changes(environment: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    """`environment`, which already includes `agent.env`, with the `changes` of `variables`."""
    return {name: value for name, value in {**environment, **changes}.items() if value is not None}
