"""An agent that is a program, in any language: one process for each attempt.

The program's environment variables (`variables`) contain the policy's URL, the task and the URL for
rewards. The program posts its reward to AGENTEVO_REWARD_URL, or prints it as the last line of
stdout (posted_rewards.py). An exit code other than 0 fails the attempt, with the end of stderr as
the reason. The trajectory's call `process` records the last 64 KB of stdout and stderr for any
outcome.

All processes that the program started end with the attempt (process_tree.py).
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import msgspec

from agentevo.agents.capture import client_variables
from agentevo.agents.policy import AttemptSession, Policy
from agentevo.agents.posted_rewards import outcome_of_rewards, printed_reward
from agentevo.agents.process_tree import GRACE_S, KILLING_S, EndedProcess, ProcessTree
from agentevo.config.agents import CommandAgentSection, agents
from agentevo.errors import CommandFailedError, ConfigError, NoCallError
from agentevo.runtime.daemon_threads import run_in_thread
from agentevo.runtime.trace_header import traceparent
from agentevo.types import Outcome, Task

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
