"""Stages that measure, score, choose and compare attempts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from agentevo.config import RunConfig, Section
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.runtime.parsing import read_json_object
from agentevo.types import LARGEST_TEMPERATURE, LOWEST_TEMPERATURE
from agentevo_evolve.pipeline.kinds import AGENTEVO, Job, StageKind, StageResult

SUMMARY = "summary.json"
"""The result of an evaluation or of a scoring."""


class EvaluateOptions(Section):
    """The options of `evaluate`."""

    attempts: int = Field(default=1, ge=1, le=4096)
    """The number of attempts at each task. A single attempt is greedy."""
    temperature: float | None = Field(default=None, ge=LOWEST_TEMPERATURE, le=LARGEST_TEMPERATURE)
    """The softmax temperature of several attempts. Default: evaluation.temperature."""
    tasks: tuple[str, ...] = ()
    """Files of tasks, which replace the recipe's held-out tasks."""
    player: str | None = None
    """The model that plays instead of the policy: a name in remote_models, or URL#MODEL."""


class EvaluateStage(StageKind):
    about: ClassVar[str] = "plays held-out or given tasks, as `agentevo eval --out`"
    Options: ClassVar[type[Section]] = EvaluateOptions
    makes_folder: ClassVar[bool] = True

    def check(self, config: RunConfig | None, options: Any, model: str | None) -> None:
        player = options.player
        if player is None:
            return
        assert config is not None

        if model is not None:
            raise ConfigError(
                "options.player and `model` both set the model that plays: remove one of them"
            )

        if player not in config.remote_models and "://" not in player:
            model_names = ", ".join(config.remote_models) or "none"
            raise ConfigError(
                f"options.player: there is no remote model {player!r}: remote_models has "
                f"{model_names}; add it there, or give URL#MODEL"
            )

    def words(self, job: Job) -> list[str]:
        options: EvaluateOptions = job.options
        words = [*AGENTEVO, "eval", str(job.recipe), "--out", str(job.folder)]
        words += ["--attempts", str(options.attempts)]
        player = options.player or job.model
        if player is not None:
            words += ["--checkpoint", player]
        if options.temperature is not None:
            words += ["--temperature", str(options.temperature)]

        for file in options.tasks:
            words += ["--tasks", file]

        if job.resume and self._has_failed(job):
            return [*words, "--resume", "--retry-failed"]

        return [*words, "--resume"] if job.resume else words

    def is_finished(self, job: Job) -> bool:
        return (job.folder / SUMMARY).is_file() and not self._has_failed(job)

    def can_resume(self, job: Job) -> bool:
        return (job.folder / "eval.json").is_file()

    def _has_failed(self, job: Job) -> bool:
        """Whether the evaluation finished and every attempt failed, for example because the judge
        was unreachable."""
        try:
            model = read_json_object(job.folder / SUMMARY)["models"][0]
            return bool(model["failed"] == model["attempts"])
        except (AgentEvoError, OSError, KeyError, IndexError, TypeError):
            return False  # `made` reports a damaged summary

    def made(self, job: Job) -> StageResult:
        return read_measurements(job.folder)


def read_measurements(folder: Path) -> StageResult:
    """The result of the evaluation or scoring in a folder. Raises ConfigError if its summary is
    damaged."""
    try:
        model = read_json_object(folder / SUMMARY)["models"][0]
        numbers: dict[str, float] = {}
        for name, estimate in (("success", model["pass_at"]["1"]), ("reward", model["reward"])):
            if estimate is not None:
                numbers |= {
                    name: float(estimate["value"]),
                    f"{name}_low": float(estimate["low"]),
                    f"{name}_high": float(estimate["high"]),
                }

        tokens = round(float(model["tokens"] or 0.0) * int(model["attempts"]))
        return StageResult({}, numbers, tokens, float(model["cost"]))
    except (AgentEvoError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / SUMMARY} is damaged: delete that folder") from error


class ScoreOptions(Section):
    """The options of `score`."""

    source: str
    """The folder of a stage of the kind `evaluate`."""
    rewards: list[Any] = Field(min_length=1)
    """The rewards, in the form of a recipe."""


class ScoreStage(StageKind):
    about: ClassVar[str] = "scores kept attempts by other rewards, as `agentevo eval --rescore`"
    Options: ClassVar[type[Section]] = ScoreOptions
    reads_recipe: ClassVar[bool] = False
    makes_folder: ClassVar[bool] = True

    def words(self, job: Job) -> list[str]:
        import json

        rewards = f"rewards={json.dumps(job.options.rewards)}"
        return [
            *AGENTEVO,
            "eval",
            job.options.source,
            rewards,
            "--rescore",
            "--out",
            str(job.folder),
        ]

    def is_finished(self, job: Job) -> bool:
        return (job.folder / SUMMARY).is_file()

    def made(self, job: Job) -> StageResult:
        return read_measurements(job.folder)


class ExportStage(StageKind):
    """Attempts of a run as rows of a file, by `agentevo trajectories export`."""

    reads_recipe: ClassVar[bool] = False
    makes: ClassVar[tuple[str, ...]] = ("file",)
    name: ClassVar[str]
    """The file's name."""

    def is_finished(self, job: Job) -> bool:
        return (job.folder / self.name).is_file()

    def made(self, job: Job) -> StageResult:
        file = job.folder / self.name
        with file.open("rb") as rows:
            num_rows = sum(1 for line in rows if line.strip())
        return StageResult({"file": file}, {"rows": float(num_rows)})

    def planned_outputs(self, folder: Path) -> dict[str, Path]:
        return {"file": folder / self.name}

    def export_words(self, job: Job, form: str) -> list[str]:
        """The export command with the option `form`, without options that belong only to that
        form."""
        source = job.options.source
        out = str(job.folder / self.name)
        words = [*AGENTEVO, "trajectories", "export", source, out, form]
        return [*words, "--per-task", str(job.options.per_task)]


class FilterOptions(Section):
    """The options of `filter`."""

    source: str
    """The folder of a run, such as ${stages.NAME.folder}, whose training attempts are the
    candidates, or the folder of an evaluation."""
    min_reward: float | None = None
    """Minimum reward. Default: attempts that succeeded."""
    per_task: int = Field(default=1, ge=1)
    """Maximum number of attempts per task, the best first."""
    model: str | None = None
    """The model whose replies are exported: `policy` or a remote model."""


class FilterStage(ExportStage):
    about: ClassVar[str] = "the best attempts of a run as conversations for `sft` (best of n)"
    Options: ClassVar[type[Section]] = FilterOptions
    name: ClassVar[str] = "rows.jsonl"

    def words(self, job: Job) -> list[str]:
        options: FilterOptions = job.options
        words = self.export_words(job, "--sft")
        if options.min_reward is not None:
            words += ["--min-reward", str(options.min_reward)]
        return words if options.model is None else [*words, "--model", options.model]


class PreferencesOptions(Section):
    """The options of `preferences`."""

    source: str
    """The folder of a run, whose groups of training attempts are compared."""
    min_margin: float = Field(default=0.0, ge=0)
    """The chosen attempt's reward must exceed the rejected attempt's reward by more than this."""
    per_task: int = Field(default=1, ge=1)
    """Maximum number of pairs per group: the best against the worst, the second best against the
    second worst, and so on."""


class PreferencesStage(ExportStage):
    about: ClassVar[str] = (
        "better and worse attempts of a run as pairs for reward models and `data.pairs`"
    )
    Options: ClassVar[type[Section]] = PreferencesOptions
    name: ClassVar[str] = "pairs.jsonl"

    def words(self, job: Job) -> list[str]:
        return [*self.export_words(job, "--pairs"), "--margin", str(job.options.min_margin)]


EVALUATE = EvaluateStage()
SCORE = ScoreStage()
FILTER = FilterStage()
PREFERENCES = PreferencesStage()
