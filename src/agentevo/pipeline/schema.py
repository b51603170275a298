"""What the file of a pipeline may say, as pydantic models: every key, its default and what it does.

Stages are named. One refers to what another made by `${stages.NAME.KEY}` (`references`), which also
makes it wait for that one. Recipes are those of runs: a stage's is the pipeline's `recipe`, with
the pipeline's `config` and then the stage's on top.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentevo.config import Section
from agentevo.config.section import Texts
from agentevo.config.sections import RunSection
from agentevo.types import LARGEST_TEMPERATURE, LOWEST_TEMPERATURE

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,60}")
MAX_ROUNDS = 1000
MAX_STAGES = 1000
"""Stages that are planned, every round counted."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


class HeldOutSection(Section):
    """The fixed held-out tasks, on which the model of every stage is measured. They are the same in
    every stage, round and seed."""

    recipe: str | None = None
    """The recipe that says what is played. Default: that of the pipeline."""
    config: dict[str, Any] = Field(default_factory=dict)
    """What differs in it from the pipeline's, such as other rewards."""
    tasks: int = Field(default=64, ge=1)
    """How many tasks."""
    attempts: int = Field(default=1, ge=1, le=4096)
    """Attempts at each; one is greedy."""
    temperature: float | None = Field(default=None, ge=LOWEST_TEMPERATURE, le=LARGEST_TEMPERATURE)
    """Softmax temperature of several attempts. Default: evaluation.temperature."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Which tasks of an environment: those that a run with this run.seed holds out. No training
    task of any seed is among them."""


class PipelineBudgetSection(Section):
    """What the whole pipeline may use. Once it is used, no further stage starts; the time also ends
    the stages under way, cleanly after their step. A larger budget goes on with `--resume`."""

    hours: float | None = Field(default=None, gt=0)
    """Time, the sum of all lives of the pipeline."""
    tokens: int | None = Field(default=None, gt=0)
    """Tokens that stages generated and trained on."""
    cost: float | None = Field(default=None, gt=0)
    """Money for remote models, by the prices of the recipes."""


class StopSection(Section):
    """When the rounds of a repeated stage end early."""

    rounds_without_gain: int = Field(default=2, ge=1)
    """So many rounds in a row that bring nothing: none is better than the best before them."""
    min_gain: float = Field(default=0.0, ge=0, lt=1)
    """A gain is what adds more than this to the success on the held-out tasks, as a share."""


class StageConfig(Section):
    """One stage, or with `stages` a group of stages that is repeated."""

    kind: str = "train"
    """What it does (`agentevo list stages`)."""
    recipe: str | None = None
    """Its recipe: a file beside the pipeline's, or a packaged one. Default: the pipeline's."""
    config: dict[str, Any] = Field(default_factory=dict)
    """What differs in the recipe, nested or with dotted keys."""
    model: str | None = None
    """The model that it begins with, such as ${stages.NAME.checkpoint}. Default: that of the
    recipe."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The kind's own keys (docs/pipelines.md)."""
    needs: Texts = ()
    """Stages that must be done before, besides those that it refers to."""
    when: Texts = ()
    """Conditions, such as `${stages.rl.success} > 0.5`; where one does not hold, the stage is left
    out."""
    measure: bool | None = None
    """Whether its model is measured on the held-out tasks. Default: where it trains one."""
    take: Literal["last", "best"] = "last"
    """Which checkpoint it passes on: the last, or the one with the best evaluation within its own
    run."""
    optimizer: Literal["fresh", "carried"] = "fresh"
    """What of the optimizer is kept: nothing, or AdamW's moments as they are in the checkpoint that
    `model` is (trainer.optimizer_from)."""
    reference: str = "start"
    """What the KL and preference losses compare with: the model as this stage begins (`start`), or
    another one, such as ${stages.NAME.checkpoint} (algorithm.reference_model)."""
    repeat: int = Field(default=1, ge=1, le=MAX_ROUNDS)
    """Rounds. `${previous.KEY}` (in a group `${previous.NAME.KEY}`) is what the round before made,
    and `${round}` its number, from 1."""
    stop: StopSection | None = None
    """When the rounds end early. Default: never."""
    stages: dict[str, StageConfig] = Field(default_factory=dict)
    """The stages of a round."""

    @field_validator("stages")
    @classmethod
    def _names(cls, value: dict[str, StageConfig]) -> dict[str, StageConfig]:
        return _checked_names(value)

    @model_validator(mode="after")
    def _a_stage_or_a_group(self) -> Self:
        if self.stop is not None and self.repeat == 1:
            raise ValueError("stop ends rounds early, and there is but one: set repeat")
        if self.optimizer == "carried" and self.model is None:
            raise ValueError("optimizer=carried goes on with that of `model`: give model")
        if not self.stages:
            return self

        stage_keys = self.model_fields_set - {"repeat", "stop", "stages", "needs"}
        if stage_keys:
            raise ValueError(
                f"a group of stages has repeat, stop, needs and stages, and no "
                f"{sorted(stage_keys)[0]}: give that to the stages in it"
            )

        for name, stage in self.stages.items():
            if stage.stages or stage.repeat > 1:
                raise ValueError(
                    f"stages.{name} is repeated within a group, and one level is all there is: "
                    "give it a place of its own"
                )

        return self

    @property
    def is_repeated(self) -> bool:
        """Whether its name stands for rounds."""
        return self.repeat > 1 or bool(self.stages)


class PipelineConfig(Section):
    """Everything about one pipeline."""

    name: str = "pipeline"
    """Its name, used in its report and for its folder. Default: the file's name."""
    description: str = ""
    """A line or two for the report."""
    dir: Path | None = None
    """Its folder. Default: runs/NAME."""
    overwrite: bool = False
    """Delete what an earlier run of the pipeline left in the folder first."""
    seed: Seed = 0
    """Every random choice follows from it: a stage's run.seed from the pipeline's, the stage's name
    and the round."""
    seeds: tuple[Seed, ...] = ()
    """Runs the pipeline once with each of these, each in the folder seed-N, and makes a table of
    means with intervals."""
    recipe: str | None = None
    """Recipe of the stages that name none: a file beside this one, or a packaged one."""
    config: dict[str, Any] = Field(default_factory=dict)
    """What all stages change in their recipes, or without `recipe` all that they have in common."""
    held_out: HeldOutSection | None = HeldOutSection()
    """The fixed held-out tasks. null measures nothing."""
    budget: PipelineBudgetSection = PipelineBudgetSection()
    parallel: int = Field(default=1, ge=1, le=256)
    """Stages at once, each a process of its own, of those that need not wait for one another."""
    table: Path | None = None
    """A Markdown file that gets the table between its lines `<!-- table -->` and `<!-- /table -->`
    when every stage has ended well."""
    stages: dict[str, StageConfig] = Field(min_length=1)
    """The stages, by name."""

    @field_validator("name")
    @classmethod
    def _a_folder(cls, value: str) -> str:
        return RunSection(name=value).name

    @field_validator("dir", "table", mode="before")
    @classmethod
    def _expand_home(cls, value: object) -> object:
        if value == "":
            raise ValueError("got an empty path")
        return Path(value).expanduser() if isinstance(value, (str, Path)) else value

    @field_validator("seeds")
    @classmethod
    def _different(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a seed is there twice, and the same seed is the same run")
        return value

    @field_validator("stages")
    @classmethod
    def _names(cls, value: dict[str, StageConfig]) -> dict[str, StageConfig]:
        taken = sorted(set(value) & (set(cls.model_fields) | {"stage", "previous", "round"}))
        if taken:
            raise ValueError(f"no stage can be called {taken[0]}, which is a key: rename it")
        return _checked_names(value)

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        planned = sum(stage.repeat * max(1, len(stage.stages)) for stage in self.stages.values())
        if planned > MAX_STAGES:
            raise ValueError(f"there are {planned:,} stages, and at most {MAX_STAGES:,} are run")

        needs_held_out = [name for name, stage in self.stages.items() if stage.stop is not None]
        if needs_held_out and self.held_out is None:
            raise ValueError(
                f"stages.{needs_held_out[0]}.stop asks for gains on held-out tasks: give held_out"
            )

        return self


def _checked_names(value: dict[str, StageConfig]) -> dict[str, StageConfig]:
    for name in value:
        if not NAME.fullmatch(name):
            raise ValueError(
                f"got the name {name[:80]!r}: use letters, digits, _ and -, a letter first"
            )
    return value
