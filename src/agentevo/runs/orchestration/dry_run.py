"""What `--dry-run` checks of `agentevo train` and `sft`."""

from __future__ import annotations

from typing import Literal

from agentevo.config import RunConfig
from agentevo.config.parallel import follows
from agentevo.observability import LiveView
from agentevo.runs.folder.chain import is_given_up
from agentevo.runs.folder.creation import check_place
from agentevo.runs.orchestration.checks import (
    check_recipe,
    check_unloaded,
    check_weights,
    startup_notes,
)
from agentevo.runs.orchestration.conversations import read_sft_data
from agentevo.runs.orchestration.refusals import Refusals


def check_dry(
    config: RunConfig, command: Literal["train", "sft"] = "train", *, resume: bool = False
) -> list[str]:
    """Does the checks of `train` before it samples, and raises all problems in one ConfigError,
    without reading the weights of a saved model. Downloads and writes nothing. Returns the lines of
    `startup_notes`, and a line for each model whose weights were too large to compare with their
    digests. Raises ModelError and TornError too."""
    refusals = Refusals()
    given_tasks = refusals.collect(check_recipe, config, command, resume=resume, may_fetch=False)
    if follows():
        refusals.raise_all()
        return []

    goes_on = resume and not is_given_up(config.run_dir)
    lines: list[str] = []
    refusals.collect(check_place, config, command, resume=goes_on, may_create=False)
    if not goes_on:
        lines = refusals.collect(check_weights, config) or []
        loaded = refusals.collect(check_unloaded, config)
        if command == "sft" and loaded is not None:
            view = LiveView(config.run.name)
            refusals.collect(read_sft_data, config, loaded, view, lambda: False)

    refusals.raise_all()
    return startup_notes(config, given_tasks) + lines
