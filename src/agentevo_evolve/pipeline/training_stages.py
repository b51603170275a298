"""Stages that are runs: `train`, `sft`, `rm`, and `sample`, which trains nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from agentevo.config import RunConfig, check_sft
from agentevo.config.sft import check_rm
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.observability.summary import is_complete, read_summary
from agentevo.runs.folder.run_folder import is_run_folder
from agentevo.runtime.parsing import read_json_object
from agentevo_evolve.pipeline.kinds import AGENTEVO, Job, StageKind, StageResult, TrainsOn


class RunStage(StageKind):
    """A run of `agentevo train` or `sft`, which resumes after its last step."""

    makes_folder: ClassVar[bool] = True
    makes: ClassVar[tuple[str, ...]] = ("checkpoint",)

    def __init__(self, command: str) -> None:
        self.command = command

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

        checkpoint = Checkpoints(job.folder / "checkpoints", 1).find(job.take)
        evaluation = summary["eval"]
        numbers = {
            f"own_{name}": float(evaluation[name])
            for name in ("before", "after")
            if evaluation.get(name) is not None
        }
        model_totals = (summary.get("remote_models") or {}).get("asked", [])

        return StageResult(
            {"checkpoint": checkpoint},
            {**numbers, "steps": float(summary["steps"])},
            sum(summary.get("tokens", {}).values()),
            sum(float(totals["cost"]) for totals in model_totals),
        )

    def planned_outputs(self, folder: Path) -> dict[str, Path]:
        return {"checkpoint": folder / "checkpoints" / "last"}


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

    def __init__(self) -> None:
        super().__init__("train")

    def check(self, config: RunConfig | None, options: Any, model: str | None) -> None:
        assert config is not None
        if config.trainer.epochs == 0:
            raise ConfigError("trainer.epochs=0 disables training: set the stage's kind to sample")


class SftStage(RunStage):
    about: ClassVar[str] = "supervised fine-tuning on conversations, as `agentevo sft`"
    trains_on: ClassVar[TrainsOn] = "conversations"
    measured: ClassVar[bool] = True
    needs_environment: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__("sft")

    def check(self, config: RunConfig | None, options: Any, model: str | None) -> None:
        assert config is not None
        check_sft(config)


class SampleStage(RunStage):
    about: ClassVar[str] = "attempts at training tasks, scored and kept, without any update"
    chooses_engine: ClassVar[bool] = True
    trains_on: ClassVar[TrainsOn] = "tasks"

    def __init__(self) -> None:
        super().__init__("train")

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

    def planned_outputs(self, folder: Path) -> dict[str, Path]:
        return {"checkpoint": folder / "model"}


TRAIN = TrainStage()
SFT = SftStage()
SAMPLE = SampleStage()
REWARD_MODEL = RewardModelStage()
