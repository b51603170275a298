"""The stage that merges adapters, and the stage that runs any program."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from agentevo.config import RunConfig, Section
from agentevo.errors import ConfigError
from agentevo_evolve.pipeline.kinds import AGENTEVO, Job, StageKind, StageResult


class SourceOptions(Section):
    """The model to convert."""

    source: str
    """A model, such as ${stages.NAME.checkpoint}."""


class MergeStage(StageKind):
    about: ClassVar[str] = (
        "one plain model from adapters and their base, as `agentevo models --merge`"
    )
    Options: ClassVar[type[Section]] = SourceOptions
    reads_recipe: ClassVar[bool] = False
    makes: ClassVar[tuple[str, ...]] = ("checkpoint",)
    measured: ClassVar[bool] = True

    def words(self, job: Job) -> list[str]:
        return [*AGENTEVO, "models", job.options.source, "--merge", str(job.folder / "model")]

    def is_finished(self, job: Job) -> bool:
        return (job.folder / "model" / "config.json").is_file()

    def made(self, job: Job) -> StageResult:
        return StageResult({"checkpoint": job.folder / "model"})

    def planned_outputs(self, folder: Path) -> dict[str, Path]:
        return {"checkpoint": folder / "model"}


class CommandOptions(Section):
    """A program, and its outputs."""

    run: tuple[str, ...] = Field(min_length=1)
    """The program with its arguments, such as [agentevo, optimize, ...]. `agentevo` is this
    version. The program starts in the current folder, and can write to ${stage.folder}."""
    file: str | None = None
    """The file that the program makes in the stage's folder: `${stages.NAME.file}`."""
    checkpoint: str | None = None
    """The model's folder that the program makes in the stage's folder:
    `${stages.NAME.checkpoint}`."""
    resume: tuple[str, ...] | None = None
    """Arguments that are added when an interrupted stage is resumed. Default: its folder is
    emptied, and it starts over."""


class CommandStage(StageKind):
    about: ClassVar[str] = "any program: exit code 0 is success"
    Options: ClassVar[type[Section]] = CommandOptions
    reads_recipe: ClassVar[bool] = False

    def check(self, config: RunConfig | None, options: Any, model: str | None) -> None:
        for key in ("file", "checkpoint"):
            path = getattr(options, key)
            if path is not None and (Path(path).is_absolute() or ".." in Path(path).parts):
                raise ConfigError(f"options.{key}: {path} is not within the stage's own folder")

    def words(self, job: Job) -> list[str]:
        options: CommandOptions = job.options
        program, *arguments = options.run
        resume_words = options.resume or () if job.resume else ()
        first = list(AGENTEVO) if program == "agentevo" else [program]
        return [*first, *arguments, *resume_words]

    def is_finished(self, job: Job) -> bool:
        return all(path.exists() for path in self._outputs(job).values())

    def can_resume(self, job: Job) -> bool:
        return job.options.resume is not None

    def made(self, job: Job) -> StageResult:
        return StageResult(self._outputs(job))

    def _outputs(self, job: Job) -> dict[str, Path]:
        file_names = {key: getattr(job.options, key) for key in ("file", "checkpoint")}
        return {key: job.folder / name for key, name in file_names.items() if name is not None}

    def planned_outputs(self, folder: Path) -> dict[str, Path]:
        return {"file": folder / "file", "checkpoint": folder / "checkpoint"}


MERGE = MergeStage()
COMMAND = CommandStage()
