"""Making a run's folder, or replacing it, without mixing two runs."""

from __future__ import annotations

import shutil
from contextlib import nullcontext

from agentevo.config import RunConfig, to_yaml
from agentevo.errors import ConfigError
from agentevo.files import write_atomic
from agentevo.runs.lock import only_trainer
from agentevo.runs.shared_store import prepare_store


def prepare_folder(config: RunConfig) -> None:
    """Leaves no folder, or an empty one, and an empty store. Refuses to mix two runs, or to delete
    one that is being trained."""
    check_folder(config)
    exists = (config.run_dir / "config.yaml").is_file()
    with only_trainer(config.run_dir) if exists else nullcontext():
        prepare_store(config)
        if exists:
            shutil.rmtree(config.run_dir)


def check_folder(config: RunConfig) -> None:
    """Raises ConfigError for a folder where no new run may begin."""
    folder = config.run_dir
    exists = (folder / "config.yaml").is_file()
    if exists and not config.run.overwrite:
        raise ConfigError(
            f"{folder} holds a run already: resume it with --resume, give another run.dir, or "
            "delete it with run.overwrite=true"
        )
    if not exists and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and not a run: give another run.dir")


def write_config(config: RunConfig) -> None:
    """config.yaml, atomically, in the run's folder, which is made."""
    folder = config.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.yaml", to_yaml(config))
