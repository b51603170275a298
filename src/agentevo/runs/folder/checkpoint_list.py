"""Lists the checkpoints of a run for readers of its folder. No checkpoint is loaded or verified."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentevo.config.model import ModelSection
from agentevo.errors import AgentEvoError
from agentevo.models.files.resolve import missing_model
from agentevo.runtime.parsing import read_json_object

_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class KeptCheckpoints:
    """The weights of a run that can be loaded."""

    steps: tuple[int, ...]
    """The steps, the newest first."""
    best: int | None
    model: str
    """The recipe's model: the weights that the run began with, before any training."""
    missing: str
    """Why the recipe's model can't be loaded here, and the remedy. Empty if it can."""
    needs_model: bool
    """Whether the checkpoints are adapters for the recipe's model."""

    @property
    def names(self) -> list[str]:
        """The names of all weights, as `agentevo.runs.evaluation.player` uses them."""
        steps = [] if self.needs_model and self.missing else [str(step) for step in self.steps]
        return [*steps, "start"]


def kept_checkpoints(folder: Path, config: Mapping[str, Any]) -> KeptCheckpoints:
    """The list for a run with this configuration, as written. Reads the disk, so call it on a
    thread."""
    steps = []
    needs_model = False
    inside = os.path.realpath(folder) + os.sep
    try:
        with os.scandir(folder / "checkpoints") as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                manifest = os.path.join(entry.path, "checkpoint.json")
                is_inside = os.path.realpath(manifest).startswith(inside)
                if match and is_inside and os.path.isfile(manifest):
                    steps.append(int(match[1]))
                    adapter = os.path.join(entry.path, "adapter_config.json")
                    needs_model = needs_model or os.path.isfile(adapter)
    except OSError:
        pass  # no checkpoint was saved yet

    section = config.get("model")
    model = section.get("name") if isinstance(section, Mapping) else None
    if not isinstance(model, str):
        model = str(ModelSection.model_fields["name"].default)

    try:
        missing = missing_model(model)
    except AgentEvoError as error:
        missing = str(error)

    steps.sort(reverse=True)
    best = _best(folder)
    return KeptCheckpoints(
        tuple(steps), best if best in steps else None, model, missing, needs_model
    )


def _best(folder: Path) -> int | None:
    try:
        best = read_json_object(folder / "checkpoints" / "index.json").get("best")
    except (AgentEvoError, OSError, ValueError):
        return None
    step = best.get("step") if isinstance(best, dict) else None
    return step if isinstance(step, int) else None
