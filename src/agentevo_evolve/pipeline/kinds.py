"""The kinds of stages. A kind consists of a program that runs in the stage's folder, and code that
reads the results.

A kind keeps no state in memory. The folder shows whether a stage is finished, whether it can be
resumed, and its results, even after the pipeline was killed and restarted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from agentevo.config import RunConfig, Section
from agentevo.runtime.registry import Registry

TrainsOn = Literal["", "tasks", "conversations", "pairs"]
AGENTEVO = (sys.executable, "-m", "agentevo")
"""The command that starts this version of agentevo."""


class NoOptions(Section):
    """For a kind without options."""


@dataclass(frozen=True)
class Job:
    """A stage that is ready to run: every reference is resolved."""

    id: str
    """The stage's name, with the round if it is repeated: `rl`, `spin.2`, `improve.2.rl`."""
    folder: Path
    """The stage's own folder, absolute."""
    options: Any
    """The kind's `Options`."""
    recipe: Path | None = None
    """The file with the resolved recipe, for a kind that reads one."""
    config: RunConfig | None = None
    """The configuration in that file."""
    model: str | None = None
    """The stage's `model`."""
    resume: bool = False
    """Whether to resume from the work of an interrupted process in the folder."""
    take: str = "last"
    """The checkpoint that is passed on: `last` or `best`."""


@dataclass(frozen=True)
class StageResult:
    """The results of a finished stage."""

    outputs: Mapping[str, Path]
    """Paths that other stages refer to by `${stages.NAME.KEY}`, in addition to `folder`:
    `checkpoint`, `file`."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The numeric results. Other stages can refer to them too."""
    tokens: int = 0
    """The number of tokens that the stage generated and trained on, for the budget."""
    cost: float = 0.0
    """The stage's cost of remote models."""
    remark: str = ""
    """Why the stage could not teach anything, for the table of stages. Empty if it could."""


class StageKind:
    """The base of every kind. `words` runs as a process. Exit code 0 with `is_finished` is success,
    and 130 or 143 is a clean stop."""

    about: ClassVar[str] = ""
    """The kind's line in `agentevo list stages`."""
    Options: ClassVar[type[Section]] = NoOptions
    """The keys under `options`."""
    reads_recipe: ClassVar[bool] = True
    """Whether the kind has a recipe, with the keys `recipe`, `config` and `model`."""
    needs_environment: ClassVar[bool] = True
    """Whether that recipe must have an environment or tasks."""
    chooses_engine: ClassVar[bool] = False
    """Whether the kind's program chooses an engine for the machine if the recipe sets none."""
    makes_folder: ClassVar[bool] = False
    """Whether the kind's program creates the folder, as the commands that train do."""
    makes: ClassVar[tuple[str, ...]] = ()
    """Outputs that the kind always makes."""
    places: ClassVar[Mapping[str, str]] = {}
    """The paths of the outputs in the folder, by name. Default: their names."""
    trains_on: ClassVar[TrainsOn] = ""
    """The part of the recipe that the kind trains on, or stores for training. No held-out task may
    be in that part."""
    measured: ClassVar[bool] = False
    """Whether the kind's `checkpoint` is a policy. A policy is measured unless the stage sets
    measure: false."""
    makes_texts: ClassVar[bool] = False
    """Whether the kind's `file` contains `agent.texts`. They are measured with the model that the
    stage began with."""

    def fixed_settings(self, options: Any) -> Mapping[str, Any]:
        """Settings that the kind fixes in its recipe, nested."""
        return {}

    def check(self, config: RunConfig | None, options: Any, model: str | None) -> None:
        """Raises ConfigError for unsupported settings, before anything is created. References are
        given as paths that do not exist yet."""

    def words(self, job: Job) -> list[str]:
        """The program with its arguments."""
        raise NotImplementedError

    def is_finished(self, job: Job) -> bool:
        """Whether the work in the folder is complete."""
        raise NotImplementedError

    def can_resume(self, job: Job) -> bool:
        """Whether `words` of a job with `resume` continues from the folder's contents. If not, the
        folder is emptied, and the stage starts over."""
        return False

    def made(self, job: Job) -> StageResult:
        """The stage's results. Raises ConfigError for a damaged folder."""
        raise NotImplementedError

    def planned_outputs(self, folder: Path) -> dict[str, Path]:
        """The paths of the outputs, for checks before the stage has run."""
        return {name: folder / self.places.get(name, name) for name in (*self.makes, *self.places)}


stage_kinds: Registry[StageKind] = Registry(
    "stage_kinds",
    {
        "train": "agentevo_evolve.pipeline.stages:TRAIN",
        "sft": "agentevo_evolve.pipeline.stages:SFT",
        "rm": "agentevo_evolve.pipeline.stages:REWARD_MODEL",
        "sample": "agentevo_evolve.pipeline.stages:SAMPLE",
        "evaluate": "agentevo_evolve.pipeline.stages:EVALUATE",
        "score": "agentevo_evolve.pipeline.stages:SCORE",
        "filter": "agentevo_evolve.pipeline.stages:FILTER",
        "preferences": "agentevo_evolve.pipeline.stages:PREFERENCES",
        "prompts": "agentevo_evolve.pipeline.stages:PROMPTS",
        "merge": "agentevo_evolve.pipeline.stages:MERGE",
        "command": "agentevo_evolve.pipeline.stages:COMMAND",
    },
)
"""Kinds of stages by name."""
