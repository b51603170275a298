"""A stage that serves a model. Later stages call it by its URL, as a judge, a writer or a
player."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from agentevo.config import RunConfig, Section
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.inference.secret import RunSecret
from agentevo.pipeline.kinds import AGENTEVO, Job, StageKind, StageResult
from agentevo.processes.client_door import SERVING, read_url

LOG = "server.log"
"""The name of the log in the stage's folder."""


class ServeOptions(Section):
    """How a model is served."""

    port: int = Field(default=0, ge=0, le=65535)
    """The port on this machine. 0 chooses a free port. After a stop, the same port is used again if
    it is still free."""
    keep: bool = False
    """Whether the server keeps running after all other stages are done, until Ctrl-C."""
    start_s: float = Field(default=600.0, gt=0, le=86_400)
    """Time limit until the server answers, in seconds."""


class ServeStage(StageKind):
    about: ClassVar[str] = "a model for later stages by its URL, as `agentevo serve --openai`"
    Options: ClassVar[type[Section]] = ServeOptions
    needs_environment: ClassVar[bool] = False
    chooses_engine: ClassVar[bool] = True
    serves: ClassVar[bool] = True
    says: ClassVar[Mapping[str, str]] = {
        "url": "http://127.0.0.1:1/v1",
        "key": "${env:AGENTEVO_KEY}",
    }

    def check(self, config: RunConfig | None, options: Any, model: str | None) -> None:
        assert config is not None
        if model is None and config.model.name == "tiny":
            raise ConfigError(
                "model: a tiny model has random weights in each run: set the model to serve, "
                "such as ${stages.NAME.checkpoint}"
            )

    def words(self, job: Job) -> list[str]:
        options: ServeOptions = job.options
        words = [*AGENTEVO, "serve", "--openai", str(job.recipe), "--name", job.id]
        return [*words, "--port", str(options.port)]

    def is_finished(self, job: Job) -> bool:
        return False  # a server that ended by itself has failed

    def can_resume(self, job: Job) -> bool:
        return True  # with the same key as before

    def made(self, job: Job) -> StageResult:
        url = read_url(job.folder / SERVING)
        if url is None:
            raise ConfigError(f"{job.folder / SERVING}: no server runs there")
        return StageResult({}, says={"url": f"{url}/v1", "key": f"${{env:{key_variable(job.id)}}}"})


def key_variable(id_: str) -> str:
    """The environment variable with the key of a stage's server, for other stages."""
    return f"AGENTEVO_KEY_{hashlib.sha256(id_.encode()).hexdigest()[:8].upper()}"


def key_of(job: Job) -> str:
    """The key of a stage's server. Empty if there is none yet."""
    try:
        return RunSecret(job.folder / SERVING).file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError, AgentEvoError):
        return ""


SERVE = ServeStage()
