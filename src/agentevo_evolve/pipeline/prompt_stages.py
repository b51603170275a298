"""A stage that changes no weights: `prompts` searches for better texts of the same agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from agentevo.config import RunConfig
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.runtime.parsing import read_json_object
from agentevo_evolve.pipeline.kinds import AGENTEVO, Job, StageKind, StageResult


class PromptsStage(StageKind):
    about: ClassVar[str] = (
        "better prompts and examples for the same weights, as `agentevo optimize`"
    )
    makes_folder: ClassVar[bool] = True
    makes: ClassVar[tuple[str, ...]] = ("file",)
    measured: ClassVar[bool] = True
    makes_texts: ClassVar[bool] = True

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

    def planned_outputs(self, folder: Path) -> dict[str, Path]:
        return {"file": folder / "texts.yaml"}


PROMPTS = PromptsStage()
