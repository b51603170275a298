"""The kinds of clusters by name, and how a launch's folder is made and submitted."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pydantic

from agentevo.config.entry_problems import entry_problem
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.files import must_write, write_atomic
from agentevo.launch import compose, kubernetes, ray, skypilot, slurm
from agentevo.launch.fleet import Fleet
from agentevo.launch.plan import NODES_FILE, PlannedLaunch
from agentevo.paths import check_new_folder

SUBMIT_S = 600.0


class WrittenLaunch(NamedTuple):
    """A launch's folder, and what submits it."""

    folder: Path
    command: list[str]
    notes: list[str]
    """Lines for whoever launches."""


class SubmitError(AgentEvoError):
    """The cluster's tool refused."""


class Target(NamedTuple):
    """A kind of cluster."""

    fleet: type[Fleet]
    """What it is asked for."""
    write: Callable[[PlannedLaunch, Any, str], dict[str, str]]
    """(the launch, what is asked for, the folder) -> the files that its tool reads, by name."""
    command: Callable[[PlannedLaunch, str], list[str]]
    """(the launch, the folder) -> what submits it."""
    runs: str = ""
    """The folder of runs in its containers."""


TARGETS: Mapping[str, Target] = {
    "slurm": Target(slurm.SlurmFleet, slurm.script, slurm.command),
    "kubernetes": Target(
        kubernetes.KubernetesFleet, kubernetes.manifest, kubernetes.command, kubernetes.RUNS
    ),
    "skypilot": Target(skypilot.SkyPilotFleet, skypilot.task, skypilot.command, skypilot.RUNS),
    "ray": Target(ray.RayFleet, ray.settings, ray.command),
    "compose": Target(compose.ComposeFleet, compose.compose, compose.command, compose.RUNS),
}


def fleet_of(target: str, values: Mapping[str, Any]) -> Fleet:
    """Raises ConfigError for unknown keys and values that don't fit."""
    model = TARGETS[target].fleet
    try:
        return model.model_validate(dict(values))
    except pydantic.ValidationError as error:
        lines = [entry_problem(target, model, problem) for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def make(
    target: str, recipe: str, overrides: list[str], fleet: Fleet, folder: Path
) -> WrittenLaunch:
    """Writes the folder; files of an earlier launch are replaced, others (logs) stay.

    Raises ConfigError for a recipe that can't run there, and a folder that holds something else.
    """
    _check_folder(folder)
    kind = TARGETS[target]
    launch = PlannedLaunch(recipe, overrides, fleet, kind.runs)
    files = launch.files() | kind.write(launch, fleet, str(folder))
    with must_write(folder, "give another --out"):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            write_atomic(folder / file, text)

    notes = [f"every node reads {key} under {path}" for key, path in launch.shared_paths.items()]
    notes += [f"warning: {line}" for line in launch.warnings]
    if fleet.gpus and "type" not in launch.config.engine.model_fields_set:
        notes.append(
            "the recipe names no engine.type, so the nodes sample with torch, which is slow on a "
            "GPU: set engine.type=vllm where they have vLLM"
        )
    return WrittenLaunch(folder, kind.command(launch, str(folder)), notes)


def submit_launch(made: WrittenLaunch) -> str:
    """What the cluster's tool says. Raises SubmitError if it refuses or is not there."""
    program = shutil.which(made.command[0])
    if program is None:
        raise SubmitError(
            f"{made.command[0]} is not installed here: copy {made.folder} to where it is, and run "
            f"`{' '.join(made.command)}` there"
        )

    try:
        done = subprocess.run(
            [program, *made.command[1:]], capture_output=True, text=True, timeout=SUBMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise SubmitError(f"{made.command[0]} has not answered for {SUBMIT_S:g} s") from error

    if done.returncode:
        raise SubmitError(
            f"`{' '.join(made.command)}` failed (exit code {done.returncode}): "
            f"{(done.stderr or done.stdout).strip()[-2000:]}"
        )

    return done.stdout.strip()


def _check_folder(folder: Path) -> None:
    check_new_folder(folder, "--out")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / NODES_FILE).is_file():
        raise ConfigError(
            f"{folder} holds something else than a launch: give another --out, nothing was written"
        )
