"""The work of a stage: a kind is a program that runs in the stage's own folder, and a reader of its
results.

A kind keeps no state in memory. Whether a stage is finished, whether it can be resumed, and its
results are read from its folder, also after a pipeline was killed and restarted.
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
"""The command that starts this version of agentevo."""


class NoOptions(Section):
    """A kind without its own keys."""


@dataclass(frozen=True)
class Job:
    """One stage ready to run: every reference is resolved."""

    id: str
    """Its name, with the round if it is repeated: `rl`, `spin.2`, `improve.2.rl`."""
    folder: Path
    """Its own folder, absolute."""
    options: Any
    """The kind's `Options`."""
    recipe: Path | None = None
    """The file with the resolved recipe, for a kind that reads one."""
    config: RunConfig | None = None
    """The configuration in that file."""
    model: str | None = None
    """The stage's `model`."""
    resume: bool = False
    """Resume from what an interrupted process left in the folder."""
    take: str = "last"
    """Which checkpoint is passed on: `last` or `best`."""


@dataclass(frozen=True)
class StageResult:
    """What a finished stage has made."""

    outputs: Mapping[str, Path]
    """Paths that other stages refer to by `${stages.NAME.KEY}`, in addition to `folder`:
    `checkpoint`, `file`."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Its numeric results. Other stages can refer to them, too."""
    tokens: int = 0
    """Tokens that it generated and trained on, for the budget."""
    cost: float = 0.0
    """Its cost of remote models."""


class StageKind:
    """Base of every kind. `words` is run as a process; exit code 0 and `is_finished` are success,
    130 and 143 a clean stop."""

    about: ClassVar[str] = ""
    """Its line in `agentevo list stages`."""
    Options: ClassVar[type[Section]] = NoOptions
    """The keys under `options`."""
    reads_recipe: ClassVar[bool] = True
    """Whether it has a recipe, with the keys `recipe`, `config` and `model`."""
    needs_environment: ClassVar[bool] = True
    """Whether that recipe must have an environment or tasks."""
    chooses_engine: ClassVar[bool] = False
    """Whether its program chooses an engine by the machine if the recipe sets none."""
    makes_folder: ClassVar[bool] = False
    """Whether its program makes the folder, as the commands that train do."""
    makes: ClassVar[tuple[str, ...]] = ()
    """Outputs that it always makes."""
    trains_on: ClassVar[TrainsOn] = ""
    """The part of its recipe that it trains on, or stores for training. No held-out task may be in
    it."""
    measured: ClassVar[bool] = False
    """Whether its `checkpoint` is a policy, which is measured unless the stage sets measure:
    false."""
    makes_texts: ClassVar[bool] = False
    """Whether its `file` holds `agent.texts`, which are measured with the model that it began
    with."""

    def fixed_settings(self, options: Any) -> Mapping[str, Any]:
        """Settings that it fixes in its recipe, nested."""
        return {}

    def check(self, config: RunConfig | None, options: Any, model: str | None) -> None:
        """Raises ConfigError, before anything is created, for unsupported settings. References are
        given as paths that do not exist yet."""

    def words(self, job: Job) -> list[str]:
        """The program with its arguments."""
        raise NotImplementedError

    def is_finished(self, job: Job) -> bool:
        """Whether its work in the folder is complete."""
        raise NotImplementedError

    def can_resume(self, job: Job) -> bool:
        """Whether `words` of a job with `resume` continues from the folder's contents. If not, the
        folder is emptied, and the stage starts over."""
        return False

    def made(self, job: Job) -> StageResult:
        """Its results. Raises ConfigError for a damaged folder."""
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
        "command": "agentevo.pipeline.model_stages:COMMAND",
    },
)
"""Kinds of stages by name."""
