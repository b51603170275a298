"""One run, several processes: whichever starts first makes the run's folder, and the others must mean the same run."""

from __future__ import annotations

import os
import uuid

from agentevo.config import RunConfig, to_yaml
from agentevo.errors import ConfigError
from agentevo.orchestration.run import changes

SHOWN_KEYS = 5
STAGING = ".config.yaml."


def ensure_run_folder(config: RunConfig) -> None:
    """Makes the run's folder with its config.yaml, unless another process has; any number may call this at once.

    Raises ConfigError if the folder holds the run of another configuration (its place and name may differ), or something else.
    """
    folder = config.run_dir
    target = folder / "config.yaml"
    if not target.is_file():
        _create(config)
    found = changes(config)
    if found:
        shown = [f"{key}={was!r} and not {now!r}" for key, (was, now) in list(found.items())[:SHOWN_KEYS]]
        more = f", and {len(found) - SHOWN_KEYS} more" if len(found) > SHOWN_KEYS else ""
        raise ConfigError(
            f"{folder} is a run with {', '.join(shown)}{more}: all processes of a run need the same recipe and overrides "
            f"(give {target} as the recipe), or give another run.dir"
        )


def _create(config: RunConfig) -> None:
    """config.yaml appears whole, and only if nobody else has made it meanwhile."""
    folder = config.run_dir
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give another run.dir")
    folder.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in folder.iterdir()}
    if "config.yaml" not in names and any(not name.startswith(STAGING) for name in names):
        raise ConfigError(f"{folder} is not empty and not a run: give another run.dir")
    staging = folder / f"{STAGING}{uuid.uuid4().hex[:8]}"
    try:
        staging.write_text(to_yaml(config), encoding="utf-8")
        os.link(staging, folder / "config.yaml")
    except FileExistsError:
        return  # another process was first: `ensure_run_folder` compares
    finally:
        staging.unlink(missing_ok=True)
