"""Writes and submits a launch's folder: the launch's own files, and the filled template of its kind
of cluster."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import yaml

from agentevo.errors import AgentEvoError, ConfigError
from agentevo.runs.launch.node import GRACE_S, STOPPED
from agentevo.runs.launch.plan import NODES_FILE, PlannedLaunch
from agentevo.runs.launch.targets import Cluster
from agentevo.runtime.files import must_write, write_atomic
from agentevo.runtime.paths import check_new_folder

SUBMIT_S = 600.0
STOP_NOTICE_S = int(GRACE_S) + 60
"""The time from the stop signal until a cluster kills the remaining processes, in seconds."""


class WrittenLaunch(NamedTuple):
    """A launch's folder, and the command that submits it."""

    folder: Path
    command: list[str]
    notes: list[str]
    """Messages for the user who launches."""


class SubmitError(AgentEvoError):
    """The cluster's tool refused the launch."""


def write_launch(
    recipe: str, overrides: list[str], cluster: Cluster, folder: Path
) -> WrittenLaunch:
    """Writes the folder. Files of an earlier launch are replaced, and others (logs) stay.

    Raises ConfigError for a recipe that can't run on the cluster, and for a folder with other
    contents.
    """
    _check_folder(folder)
    launch = PlannedLaunch(recipe, overrides, cluster, cluster.runs_mount)
    cluster.check(launch, str(folder))
    files = {**launch.files, cluster.file: _fill_template(launch, cluster, str(folder))}
    with must_write(folder, "give another --out"):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            write_atomic(folder / file, text)

    notes = [f"every node reads {key} under {path}" for key, path in launch.shared_paths.items()]
    notes += [f"warning: {line}" for line in launch.warnings]
    if cluster.gpus and "type" not in launch.config.engine.model_fields_set:
        notes.append(
            "the recipe sets no engine.type, so the nodes sample with torch, which is slow on a "
            "GPU: set engine.type=vllm if they have vLLM"
        )
    return WrittenLaunch(folder, cluster.submit_command(launch, str(folder)), notes)


def submit(written: WrittenLaunch) -> str:
    """Submits the launch, and returns the output of the cluster's tool. Raises SubmitError if the
    tool refuses or is not installed."""
    command = " ".join(written.command)
    tool = written.command[0]
    program = shutil.which(tool)
    if program is None:
        raise SubmitError(
            f"{tool} is not installed here: copy {written.folder} to a machine that has it, and "
            f"run `{command}` there"
        )

    try:
        done = subprocess.run(
            [program, *written.command[1:]], capture_output=True, text=True, timeout=SUBMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise SubmitError(f"{tool} has not answered for {SUBMIT_S:g} s") from error

    if done.returncode:
        raise SubmitError(
            f"`{command}` failed (exit code {done.returncode}): "
            f"{(done.stderr or done.stdout).strip()[-2000:]}"
        )

    return done.stdout.strip()


def _check_folder(folder: Path) -> None:
    check_new_folder(folder, "--out")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / NODES_FILE).is_file():
        raise ConfigError(
            f"{folder} has other contents than a launch: give another --out; nothing was written"
        )


def _fill_template(launch: PlannedLaunch, cluster: Cluster, folder: str) -> str:
    """The filled template for the cluster's tool. The user's values are written as JSON, which is
    valid YAML."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("agentevo.runs.launch"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["json"] = partial(json.dumps, ensure_ascii=False)
    environment.filters["yaml"] = _to_block_yaml
    environment.filters["shell"] = shlex.quote
    return environment.get_template(cluster.file).render(
        launch=launch, cluster=cluster, folder=folder, notice_s=STOP_NOTICE_S, stopped=STOPPED
    )


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines as block scalars."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _BlockDumper.represent_str)


def _to_block_yaml(value: Any) -> str:
    """Block YAML without the final line break."""
    return yaml.dump(value, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True)[:-1]
