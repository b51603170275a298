"""The servers of a pipeline's stages: starts, monitors and ends them.

    starting -> answers -> ended, when no remaining stage needs it
             -> failed     ended unexpectedly, or did not answer in time

A server ends with this process and the stages that use it, in whatever way they end. Each of them
holds the pipe that keeps the server alive (inference/guarded_server.py). If a resumed stage needs a
server that has ended, the server restarts first (standing.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from agentevo.files import must_write
from agentevo.inference.guarded_server import GuardedServer
from agentevo.pipeline.serve_stages import LOG, key_of, key_variable
from agentevo.processes.client_door import SERVING, URL, read_url

if TYPE_CHECKING:
    from agentevo.pipeline.kinds import Job
    from agentevo.pipeline.standing import PipelineProgress, StageStart

ASK_TIMEOUT_S = 2.0
"""The timeout in seconds of a check whether a server answers."""


@dataclass(eq=False)
class StageServer:
    """One running server."""

    standing: PipelineProgress
    decided: StageStart
    process: GuardedServer
    name: str
    log: Path
    job: Job
    since: float = field(default_factory=time.monotonic)
    answers: bool = False

    @property
    def id(self) -> str:
        """The id of the server's stage."""
        return self.decided.instance.id

    @property
    def seconds(self) -> float:
        """The seconds since the server was started."""
        return time.monotonic() - self.since


class Servers:
    """The servers of a pipeline, for one process. Only one thread may use it."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self.active: list[StageServer] = []

    def start(
        self,
        standing: PipelineProgress,
        decided: StageStart,
        name: str,
        extra_environment: Mapping[str, str],
    ) -> StageServer:
        """Starts a stage's server. Raises OSError if it can't be started, and DiskError."""
        before = standing.state.stages[decided.instance.id].says.get("url", "")
        job = _with_port(standing.begin(decided), before)
        log = job.folder / LOG
        with must_write(log):
            (job.folder / SERVING / URL).unlink(missing_ok=True)

        environment = {**extra_environment, **self.keys_for(standing, decided)}
        process = GuardedServer(decided.instance.kind.words(job), log, environment)
        server = StageServer(standing, decided, process, name, log, job)
        self.active.append(server)
        return server

    def check_all(self) -> tuple[list[StageServer], list[tuple[StageServer, str]]]:
        """The servers that have become ready since the last call, and those that failed, with the
        reason."""
        ready = []
        failed = []
        for server in list(self.active):
            how = server.process.describe_end().partition(";")[0]
            limit = server.job.options.start_s
            if not how and not server.answers and server.seconds > limit:
                how = f"has not answered within {limit:g} s"

            if how:
                server.process.close()
                self.active.remove(server)
                failed.append((server, how))
            elif not server.answers and _answers(server.job):
                server.answers = True
                ready.append(server)

        return ready, failed

    def end_idle(self) -> None:
        """Ends the servers that no stage needs any more."""
        for server in list(self.active):
            is_kept = server.job.options.keep
            if server.answers and not is_kept and not server.standing.is_needed(server.id):
                self._note(f"{server.name}: ended, since no further stage needs it")
                self._end(server)

    def end_starting(self) -> None:
        """Ends the servers that do not answer yet, because the pipeline stops."""
        for server in list(self.active):
            if not server.answers:
                self._end(server)
                server.standing.record_end(server.decided, 130, server.seconds)

    def close(self) -> None:
        """Ends all servers."""
        for server in list(self.active):
            self._end(server)

    def _end(self, server: StageServer) -> None:
        server.process.close()
        self.active.remove(server)
        server.standing.alive.discard(server.id)

    @property
    def is_starting(self) -> bool:
        """Whether some servers do not answer yet."""
        return any(not server.answers for server in self.active)

    def used_by(self, standing: PipelineProgress, decided: StageStart) -> list[StageServer]:
        """The servers that a stage calls."""
        used = {used_input.stage for used_input in decided.inputs}
        return [
            server for server in self.active if server.standing is standing and server.id in used
        ]

    def keys_for(self, standing: PipelineProgress, decided: StageStart) -> dict[str, str]:
        """Environment variables with the keys of the servers that a stage calls."""
        return {
            key_variable(server.id): key_of(server.job)
            for server in self.used_by(standing, decided)
        }


def _with_port(job: Job, url: str) -> Job:
    """The job with its previous port, if options.port is 0 and that port is free."""
    port = urlsplit(url).port
    if port is None or job.options.port:
        return job

    from agentevo.errors import ConfigError
    from agentevo.inference.http_server import open_socket

    try:
        with open_socket("127.0.0.1", port):
            pass
    except ConfigError:
        return job

    return replace(job, options=job.options.model_copy(update={"port": port}))


def _answers(job: Job) -> bool:
    url = read_url(job.folder / SERVING)
    if url is None:
        return False

    headers = {"Authorization": f"Bearer {key_of(job)}"}
    try:
        answer = httpx.get(  # a proxy must not see the key
            f"{url}/v1/models", headers=headers, timeout=ASK_TIMEOUT_S, trust_env=False
        )
    except httpx.HTTPError:
        return False

    return answer.status_code == 200
