"""The keys of a pipeline's file, as pydantic models, with their defaults and meanings.

Stages have names. A stage refers to another stage's output by `${stages.NAME.KEY}` (`references`),
and then waits for that stage. Recipes are those of runs. A stage uses the pipeline's `recipe` with
the changes of the pipeline's `config`, and then those of its own `config`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentevo.config import Section
from agentevo.config.sections import RunSection
from agentevo.runtime.section import Texts
from agentevo.types import LARGEST_TEMPERATURE, LOWEST_TEMPERATURE

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,60}")
MAX_ROUNDS = 1000
MAX_STAGES = 1000
"""The maximum number of planned stages. Every round counts."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


class HeldOutSection(Section):
    """The fixed held-out tasks, on which the model of every stage is measured. They are the same in
    every stage, round and seed."""

    recipe: str | None = None
    """The recipe of the held-out tasks. Default: the pipeline's recipe."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Changes of that recipe, such as other rewards."""
    tasks: int = Field(default=64, ge=1)
    """Number of tasks."""
    attempts: int = Field(default=1, ge=1, le=4096)
    """Attempts per task. A single attempt is greedy."""
    temperature: float | None = Field(default=None, ge=LOWEST_TEMPERATURE, le=LARGEST_TEMPERATURE)
    """Softmax temperature of several attempts. Default: evaluation.temperature."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Chooses the tasks of an environment: those that a run with this run.seed holds out. They are
    never training tasks of any seed."""


class PipelineBudgetSection(Section):
    """The limits of the whole pipeline. Beyond a limit, no further stage starts. The time limit
    also stops running stages cleanly after their step. To continue, use `--resume` with a larger
    budget."""

    hours: float | None = Field(default=None, gt=0)
    """Running time in hours, over all resumptions of the pipeline."""
    tokens: int | None = Field(default=None, gt=0)
    """Number of tokens that stages generate and train on."""
    cost: float | None = Field(default=None, gt=0)
    """Cost of remote models, by the prices in the recipes."""


class StopSection(Section):
    """The rule that ends the rounds of a repeated stage early."""

    rounds_without_gain: int = Field(default=2, ge=1)
    """Number of rounds in a row without a gain over the best round before them."""
    min_gain: float = Field(default=0.0, ge=0, lt=1)
    """Minimum gain: an increase counts if it is above this, as a share of success on the held-out
    tasks."""


class StageConfig(Section):
    """A stage, or a group of stages (`stages`) that is repeated."""

    kind: str = "train"
    """The kind of the stage (`agentevo list stages`)."""
    recipe: str | None = None
    """The stage's recipe: a file next to the pipeline's file, or a packaged recipe. Default: the
    pipeline's recipe."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Changes of the recipe, nested or with dotted keys."""
    model: str | None = None
    """The stage's initial model, such as ${stages.NAME.checkpoint}. Default: the recipe's model."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The kind's own keys (docs/pipelines.md)."""
    needs: Texts = ()
    """Stages that must be done before this one, in addition to those that it refers to."""
    when: Texts = ()
    """Conditions, such as `${stages.rl.success} > 0.5`. If a condition does not hold, the stage is
    skipped."""
    measure: bool | None = None
    """Whether the stage's model is measured on the held-out tasks. Default: true if the stage
    trains a policy."""
    take: Literal["last", "best"] = "last"
    """Which checkpoint the stage passes on: the last one, or the one with the best evaluation in
    its run."""
    optimizer: Literal["fresh", "carried"] = "fresh"
    """The initial state of the optimizer: new, or AdamW's moments from the checkpoint in `model`
    (trainer.optimizer_from)."""
    reference: str = "start"
    """The reference model of the KL and preference losses: the stage's initial model (`start`), or
    another one, such as ${stages.NAME.checkpoint} (algorithm.reference_model)."""
    repeat: int = Field(default=1, ge=1, le=MAX_ROUNDS)
    """Number of rounds. `${previous.KEY}` (in a group `${previous.NAME.KEY}`) is an output of the
    previous round, and `${round}` is the round's number, from 1."""
    stop: StopSection | None = None
    """Rule that ends the rounds early. Default: none."""
    stages: dict[str, StageConfig] = Field(default_factory=dict)
    """The stages of a round."""

    @field_validator("stages")
    @classmethod
    def _names(cls, value: dict[str, StageConfig]) -> dict[str, StageConfig]:
        return _checked_names(value)

    @model_validator(mode="after")
    def _check_stage_or_group(self) -> Self:
        if self.stop is not None and self.repeat == 1:
            raise ValueError("stop ends rounds early, but there is only one round: set repeat")
        if self.optimizer == "carried" and self.model is None:
            raise ValueError("optimizer=carried continues the optimizer of `model`: give model")
        if not self.stages:
            return self

        stage_keys = self.model_fields_set - {"repeat", "stop", "stages", "needs"}
        if stage_keys:
            raise ValueError(
                "a group of stages has only repeat, stop, needs and stages, not "
                f"{sorted(stage_keys)[0]}: set that in the stages of the group"
            )

        for name, stage in self.stages.items():
            if stage.stages or stage.repeat > 1:
                raise ValueError(
                    f"stages.{name} is repeated within a group, and groups can't be nested: move "
                    "it out of the group"
                )

        return self

    @property
    def is_repeated(self) -> bool:
        """Whether the stage has rounds, because it is repeated or a group."""
        return self.repeat > 1 or bool(self.stages)


class PipelineConfig(Section):
    """The configuration of a pipeline."""

    name: str = "pipeline"
    """The pipeline's name, used in its report and for its folder. Default: the file's name."""
    description: str = ""
    """A line or two for the report."""
    dir: Path | None = None
    """The pipeline's folder. Default: runs/NAME."""
    overwrite: bool = False
    """Delete an earlier run of the pipeline in the folder first."""
    seed: Seed = 0
    """The seed of every random choice. A stage's run.seed is derived from it, the stage's name and
    the round."""
    seeds: tuple[Seed, ...] = ()
    """Run the pipeline once with each of these seeds, in the folder seed-N, and make a table of
    means with intervals."""
    recipe: str | None = None
    """The recipe of the stages that set none: a file next to the pipeline's file, or a packaged
    recipe."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Changes of all stages' recipes. Without `recipe`, the keys that all stages share."""
    held_out: HeldOutSection | None = HeldOutSection()
    """The fixed held-out tasks. null measures nothing."""
    budget: PipelineBudgetSection = PipelineBudgetSection()
    parallel: int = Field(default=1, ge=1, le=256)
    """Maximum number of concurrent stages, each a separate process."""
    table: Path | None = None
    """A Markdown file. When every stage has succeeded, the table is written between its lines `<!--
    table -->` and `<!-- /table -->`."""
    stages: dict[str, StageConfig] = Field(min_length=1)
    """The stages, by name."""

    @field_validator("name")
    @classmethod
    def _check_dir(cls, value: str) -> str:
        return RunSection(name=value).name

    @field_validator("dir", "table", mode="before")
    @classmethod
    def _expand_home(cls, value: object) -> object:
        if value == "":
            raise ValueError("got an empty path")
        return Path(value).expanduser() if isinstance(value, (str, Path)) else value

    @field_validator("seeds")
    @classmethod
    def _check_seeds_differ(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a seed is listed twice, and the same seed gives the same run")
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
            raise ValueError(
                f"the pipeline has {planned:,} stages, and the maximum is {MAX_STAGES:,}: lower "
                "repeat"
            )

        needs_held_out = [name for name, stage in self.stages.items() if stage.stop is not None]
        if needs_held_out and self.held_out is None:
            raise ValueError(
                f"stages.{needs_held_out[0]}.stop needs gains on held-out tasks: give held_out"
            )

        return self


def _checked_names(value: dict[str, StageConfig]) -> dict[str, StageConfig]:
    for name in value:
        if not NAME.fullmatch(name):
            raise ValueError(
                f"got the name {name[:80]!r}: use letters, digits, _ and -, a letter first"
            )
    return value
