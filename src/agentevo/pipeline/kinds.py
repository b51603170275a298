"""The work of a stage: a kind is a program that runs in a folder of the stage's own, and a reader
of what it left there.

A kind never keeps anything in memory: whether a stage is finished, can be resumed, and what it
made, is read from its folder, also by a pipeline that is restarted after it was killed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from agentevo.config import RunConfig, Section
from agentevo.registry import Registry

TrainsOn = Literal["", "tasks", "conversations", "pairs"]
AGENTEVO = (sys.executable, "-m", "agentevo")
"""How this version's commands are started."""


class NoOptions(Section):
    """A kind without its own keys."""


@dataclass(frozen=True)
class Job:
    """One stage ready to run: every reference is resolved."""

    id: str
    """Its name, with the round of a repeated one: `rl`, `spin.2`, `improve.2.rl`."""
    folder: Path
    """Its own, absolute."""
    options: Any
    """The kind's `Options`."""
    recipe: Path | None = None
    """The file with the resolved recipe, of a kind that reads one."""
    config: RunConfig | None = None
    """What that file says."""
    model: str | None = None
    """The stage's `model`."""
    resume: bool = False
    """Go on with what an interrupted life has left in the folder."""
    take: str = "last"
    """Which checkpoint is passed on."""


@dataclass(frozen=True)
class StageResult:
    """What a finished stage has made."""

    outputs: Mapping[str, Path]
    """What other stages refer to by `${stages.NAME.KEY}`, besides `folder`: `checkpoint`,
    `file`."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Its results, which other stages may refer to as well."""
    tokens: int = 0
    """Generated and trained on, for the budget."""
    cost: float = 0.0
    """Money that it spent on remote models."""
    says: Mapping[str, str] = field(default_factory=dict)
    """What others refer to likewise that is no file, such as a URL."""


class StageKind:
    """Base of every kind. `words` is run as a process; exit code 0 and `is_finished` are success,
    130 and 143 a clean stop."""

    about: ClassVar[str] = ""
    """A line for `agentevo list stages`."""
    Options: ClassVar[type[Section]] = NoOptions
    """The keys under `options`."""
    reads_recipe: ClassVar[bool] = True
    """Whether it has a recipe: `recipe`, `config` and `model` mean something to it."""
    needs_environment: ClassVar[bool] = True
    """Whether that recipe must have an environment or tasks."""
    chooses_engine: ClassVar[bool] = False
    """Whether its program takes an engine by the machine where the recipe names none."""
    makes_folder: ClassVar[bool] = False
    """Whether its program makes the folder, as the commands that train do."""
    makes: ClassVar[tuple[str, ...]] = ()
    """Outputs that it always has."""
    trains_on: ClassVar[TrainsOn] = ""
    """What of its recipe it trains on, or keeps to be trained on: no held-out task may be there."""
    measured: ClassVar[bool] = False
    """Whether its `checkpoint` is a policy, which is measured unless the stage says otherwise."""
    serves: ClassVar[bool] = False
    """Whether it is finished when its program answers, which runs on until no other stage needs it
    (servers.py)."""
    says: ClassVar[Mapping[str, str]] = {}
    """What it says of itself that is no file, each with an example for checks before it has run."""
    makes_texts: ClassVar[bool] = False
    """Whether its `file` is `agent.texts`, which are measured with the model it began with."""

    def fixed_settings(self, options: Any) -> Mapping[str, Any]:
        """What it sets in its recipe, nested."""
        return {}

    def check(self, config: RunConfig | None, options: Any, model: str | None) -> None:
        """Raises ConfigError, before anything is created, for what the stage can't do. References
        are given as paths that do not exist yet."""

    def words(self, job: Job) -> list[str]:
        """The program with its arguments."""
        raise NotImplementedError

    def is_finished(self, job: Job) -> bool:
        """Whether its work in the folder is whole."""
        raise NotImplementedError

    def can_resume(self, job: Job) -> bool:
        """Whether `words` of a job with `resume` continues with what is in the folder; if not, the
        folder is emptied, and the stage starts over."""
        return False

    def made(self, job: Job) -> StageResult:
        """What it made. Raises ConfigError for a folder that was damaged."""
        raise NotImplementedError

    def planned_outputs(self, folder: Path) -> dict[str, Path]:
        """Where its outputs will be, for checks before it has run."""
        return {name: folder / name for name in self.makes}


stage_kinds: Registry[StageKind] = Registry(
    "stage_kinds",
    {
        "train": "agentevo.pipeline.training_stages:TRAIN",
        "sft": "agentevo.pipeline.training_stages:SFT",
        "rm": "agentevo.pipeline.training_stages:REWARD_MODEL",
        "sample": "agentevo.pipeline.training_stages:SAMPLE",
        "evaluate": "agentevo.pipeline.data_stages:EVALUATE",
        "score": "agentevo.pipeline.data_stages:SCORE",
        "filter": "agentevo.pipeline.data_stages:FILTER",
        "preferences": "agentevo.pipeline.data_stages:PREFERENCES",
        "prompts": "agentevo.pipeline.prompt_stages:PROMPTS",
        "merge": "agentevo.pipeline.model_stages:MERGE",
        "export": "agentevo.pipeline.model_stages:EXPORT",
        "serve": "agentevo.pipeline.serve_stages:SERVE",
        "command": "agentevo.pipeline.model_stages:COMMAND",
    },
)
"""Kinds of stages by name."""
