"""The kinds of stages: those that train, those that measure and choose attempts, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from agentevo.agents.tools.toolbox import METRICS
from agentevo.config import RunConfig, Section, check_sft
from agentevo.config.sft import check_rm
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.observability.finding_monitor import TITLES
from agentevo.observability.metrics import read_metrics
from agentevo.observability.summary import is_complete, read_summary
from agentevo.runs.folder.run_folder import is_run_folder
from agentevo.runtime.parsing import read_json_object
from agentevo.types import LARGEST_TEMPERATURE, LOWEST_TEMPERATURE
from agentevo_evolve.pipeline.kinds import AGENTEVO, Job, StageKind, StageResult, TrainsOn

CALLS = tuple(f"agent/{name}" for name in METRICS)
"""The metrics of a step that count its attempts' calls of tools, also those without an answer."""
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
    places: ClassVar[Mapping[str, str]] = {"checkpoint": "model"}
    measured: ClassVar[bool] = True

    def words(self, job: Job) -> list[str]:
        return [*AGENTEVO, "models", job.options.source, "--merge", str(job.folder / "model")]

    def is_finished(self, job: Job) -> bool:
        return (job.folder / "model" / "config.json").is_file()

    def made(self, job: Job) -> StageResult:
        return StageResult({"checkpoint": job.folder / "model"})


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
    places: ClassVar[Mapping[str, str]] = {"file": "file", "checkpoint": "checkpoint"}

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


class PromptsStage(StageKind):
    about: ClassVar[str] = (
        "better prompts and examples for the same weights, as `agentevo optimize`"
    )
    makes_folder: ClassVar[bool] = True
    makes: ClassVar[tuple[str, ...]] = ("file",)
    measured: ClassVar[bool] = True
    makes_texts: ClassVar[bool] = True
    places: ClassVar[Mapping[str, str]] = {"file": "texts.yaml"}

    def check(self, config: RunConfig | None, options: Any, model: str | None) -> None:
        assert config is not None
        if config.agents:
            raise ConfigError(
                "agents: a search of the texts of several agents in one rollout is not "
                "supported: remove the stage"
            )

    def words(self, job: Job) -> list[str]:
        words = [*AGENTEVO, "optimize", str(job.recipe), "--out", str(job.folder)]
        if job.model is not None:
            words += ["--checkpoint", job.model]
        return [*words, "--resume"] if job.resume else words

    def is_finished(self, job: Job) -> bool:
        return (job.folder / "texts.yaml").is_file()

    def can_resume(self, job: Job) -> bool:
        return (job.folder / "optimize.json").is_file()

    def made(self, job: Job) -> StageResult:
        file = job.folder / "summary.json"
        try:
            result = read_json_object(file)
            difference = result["held_out"]["difference"]
            numbers = {
                "better": float(result["better"]),
                "difference": 0.0 if difference is None else float(difference["value"]),
                "attempts": float(result["budget"]["attempts"]),
            }
            cost = sum(float(totals["cost"]) for totals in result["remote_models"])
        except (AgentEvoError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{file} is damaged: delete the stage's folder") from error

        return StageResult({"file": job.folder / "texts.yaml"}, numbers, cost=cost)


class RunStage(StageKind):
    """A run of `agentevo train` or `sft`, which resumes after its last step."""

    makes_folder: ClassVar[bool] = True
    places: ClassVar[Mapping[str, str]] = {"checkpoint": "checkpoints/last"}
    makes: ClassVar[tuple[str, ...]] = ("checkpoint",)
    command: ClassVar[str] = "train"

    def words(self, job: Job) -> list[str]:
        option = "--resume" if job.resume else "run.overwrite=true"
        return [*AGENTEVO, self.command, str(job.recipe), option]

    def is_finished(self, job: Job) -> bool:
        summary = _summary(job.folder)
        return summary is not None and is_complete(summary, summary.get("planned_steps") or 0)

    def can_resume(self, job: Job) -> bool:
        return is_run_folder(job.folder)

    def made(self, job: Job) -> StageResult:
        from agentevo.training.checkpoint import Checkpoints

        summary = _summary(job.folder)
        assert summary is not None

        which = "best" if summary.get("kept") else job.take  # sft.stop_at_gap chose the best one
        checkpoint = Checkpoints(job.folder / "checkpoints", 1).find(which)
        evaluation = summary["eval"]
        numbers = {
            f"own_{name}": float(evaluation[name])
            for name in ("before", "after")
            if evaluation.get(name) is not None
        }
        if summary.get("kept"):
            numbers |= {"kept_step": float(summary["kept"]["step"]), "gap": summary["kept"]["gap"]}
        model_totals = (summary.get("remote_models") or {}).get("asked", [])

        return StageResult(
            {"checkpoint": checkpoint},
            {**numbers, "steps": float(summary["steps"])},
            sum(summary.get("tokens", {}).values()),
            sum(float(totals["cost"]) for totals in model_totals),
            self._remark(job.folder, summary),
        )

    def _remark(self, folder: Path, summary: Mapping[str, Any]) -> str:
        """Why the run taught little: it trained on no token, no attempt at a training task made a
        call of a tool, or findings of the run lasted to its end. Empty if nothing is known. Raises
        ConfigError for damaged metrics."""
        try:
            rows = read_metrics(folder / "metrics.jsonl")
        except AgentEvoError as error:
            raise ConfigError(str(error)) from error

        calls = [row[name] for row in rows for name in CALLS if row.get(name) is not None]
        num_trained = (summary.get("tokens") or {}).get("trained")
        remarks = ["trained on no token"] if self.measured and num_trained == 0 else []
        remarks += ["no call was made"] if calls and not any(calls) else []
        remarks += [
            TITLES[span["code"]]
            for span in summary.get("findings", [])
            if span.get("end") is None and span.get("code") in TITLES
        ]
        return ", ".join(remarks)


def _summary(folder: Path) -> dict[str, Any] | None:
    """The summary.json of a completed run. None for a run that is not completed, or whose summary
    is damaged."""
    file = folder / "summary.json"
    if not is_run_folder(folder) or not file.is_file():
        return None
    try:
        return read_summary(file)
    except ConfigError:
        return None


class TrainStage(RunStage):
    about: ClassVar[str] = "reinforcement or preference learning, as `agentevo train`"
    chooses_engine: ClassVar[bool] = True
    trains_on: ClassVar[TrainsOn] = "tasks"
    measured: ClassVar[bool] = True

    def check(self, config: RunConfig | None, options: Any, model: str | None) -> None:
        assert config is not None
        if config.trainer.epochs == 0:
            raise ConfigError("trainer.epochs=0 disables training: set the stage's kind to sample")


class SftStage(RunStage):
    about: ClassVar[str] = "supervised fine-tuning on conversations, as `agentevo sft`"
    trains_on: ClassVar[TrainsOn] = "conversations"
    measured: ClassVar[bool] = True
    needs_environment: ClassVar[bool] = False
    command: ClassVar[str] = "sft"

    def check(self, config: RunConfig | None, options: Any, model: str | None) -> None:
        assert config is not None
        check_sft(config)


class SampleStage(RunStage):
    about: ClassVar[str] = "attempts at training tasks, scored and kept, without any update"
    chooses_engine: ClassVar[bool] = True
    trains_on: ClassVar[TrainsOn] = "tasks"

    def fixed_settings(self, options: Any) -> Mapping[str, Any]:
        return {"trainer": {"epochs": 0}, "cold_start": {"episodes": 0}}

    def check(self, config: RunConfig | None, options: Any, model: str | None) -> None:
        assert config is not None
        if config.algorithm.preference() is not None or config.data.given:
            raise ConfigError(
                "algorithm.name: a stage of the kind sample does not train: set the preset of a "
                "preference loss, and data.pairs, in the stage that trains"
            )


class RewardModelStage(StageKind):
    about: ClassVar[str] = "a reward model of pairs, as `agentevo sft --reward-model`"
    trains_on: ClassVar[TrainsOn] = "pairs"
    makes_folder: ClassVar[bool] = True
    needs_environment: ClassVar[bool] = False
    makes: ClassVar[tuple[str, ...]] = ("checkpoint",)
    places: ClassVar[Mapping[str, str]] = {"checkpoint": "model"}

    def check(self, config: RunConfig | None, options: Any, model: str | None) -> None:
        assert config is not None
        check_rm(config)

    def words(self, job: Job) -> list[str]:
        return [*AGENTEVO, "sft", str(job.recipe), "--reward-model", "run.overwrite=true"]

    def is_finished(self, job: Job) -> bool:
        files = ("reward_model.json", "model/config.json", "config.yaml")
        return all((job.folder / name).is_file() for name in files)

    def made(self, job: Job) -> StageResult:
        try:
            report = read_json_object(job.folder / "reward_model.json")
            numbers = {
                name: float(report[key])
                for name, key in (
                    ("accuracy", "rm/eval/accuracy"),
                    ("accuracy_before", "rm/eval/accuracy_before"),
                    ("pairs", "pairs"),
                )
            }
        except (AgentEvoError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{job.folder / 'reward_model.json'} is damaged: delete the stage's folder"
            ) from error

        return StageResult({"checkpoint": job.folder / "model"}, numbers)


EVALUATE = EvaluateStage()
SCORE = ScoreStage()
FILTER = FilterStage()
PREFERENCES = PreferencesStage()
MERGE = MergeStage()
COMMAND = CommandStage()
PROMPTS = PromptsStage()
TRAIN = TrainStage()
SFT = SftStage()
SAMPLE = SampleStage()
REWARD_MODEL = RewardModelStage()
