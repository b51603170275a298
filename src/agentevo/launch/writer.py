"""How a launch's folder is made and submitted: the launch's own files, and the template of its kind
of cluster, filled."""

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
from agentevo.files import must_write, write_atomic
from agentevo.launch.node import GRACE_S, STOPPED
from agentevo.launch.plan import NODES_FILE, PlannedLaunch
from agentevo.launch.targets import Cluster
from agentevo.paths import check_new_folder

SUBMIT_S = 600.0
NOTICE_S = int(GRACE_S) + 60
"""Time from the signal to end until a cluster kills what is left."""


class WrittenLaunch(NamedTuple):
    """A launch's folder, and what submits it."""

    folder: Path
    command: list[str]
    notes: list[str]
    """Lines for the user who launches."""


class SubmitError(AgentEvoError):
    """The cluster's tool refused."""


def write_launch(
    recipe: str, overrides: list[str], cluster: Cluster, folder: Path
) -> WrittenLaunch:
    """Writes the folder; files of an earlier launch are replaced, others (logs) stay.

    Raises ConfigError for a recipe that can't run there, and a folder that holds something else.
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
            "the recipe names no engine.type, so the nodes sample with torch, which is slow on a "
            "GPU: set engine.type=vllm where they have vLLM"
        )
    return WrittenLaunch(folder, cluster.submit_command(launch, str(folder)), notes)


def submit(written: WrittenLaunch) -> str:
    """What the cluster's tool says. Raises SubmitError if it refuses or is not there."""
    command = " ".join(written.command)
    tool = written.command[0]
    program = shutil.which(tool)
    if program is None:
        raise SubmitError(
            f"{tool} is not installed here: copy {written.folder} to where it is, and run "
            f"`{command}` there"
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
            f"{folder} holds something else than a launch: give another --out, nothing was written"
        )


def _fill_template(launch: PlannedLaunch, cluster: Cluster, folder: str) -> str:
    """The text of what the cluster's tool reads. JSON is YAML: values that people give are written
    as JSON."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("agentevo.launch"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["json"] = partial(json.dumps, ensure_ascii=False)
    environment.filters["yaml"] = _to_block_yaml
    environment.filters["shell"] = shlex.quote
    return environment.get_template(cluster.file).render(
        launch=launch, cluster=cluster, folder=folder, notice_s=NOTICE_S, stopped=STOPPED
    )


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines as they read."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _BlockDumper.represent_str)


def _to_block_yaml(value: Any) -> str:
    """Without the last line's end."""
    return yaml.dump(value, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True)[:-1]
