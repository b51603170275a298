"""Groups runs by setting, and reads the curves of runs, finished or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentevo.config import sources
from agentevo.errors import ConfigError
from agentevo.observability.metrics_table import MetricsTable
from agentevo.runs.folder.run_folder import check_run_folder, is_run_folder, is_sweep_folder

PLACE_KEYS = ("run.name", "run.dir", "run.overwrite", "run.threads", "run.seed", "store.url")
"""The keys in which runs of the same setting may differ."""


def setting_of(config: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """The keys and values of a run's configuration that define its setting."""
    return frozenset((key, repr(value)) for key, value in config.items() if key not in PLACE_KEYS)


@dataclass(frozen=True)
class MeasuredRun:
    """The numbers of a run."""

    folder: Path
    name: str
    setting: frozenset[tuple[str, str]]
    table: MetricsTable

    @property
    def num_rows(self) -> int:
        return self.table.num_rows


def measured_runs(folders: Sequence[Path]) -> list[MeasuredRun]:
    """The runs in these folders, and all runs of the folders that are sweeps, each once. Raises
    ConfigError for a folder that has neither, and for a run without numbers."""
    measured: dict[Path, MeasuredRun] = {}
    for folder in folders:
        inside = (
            [run_folder for run_folder in sorted(folder.iterdir()) if is_run_folder(run_folder)]
            if is_sweep_folder(folder)
            else [check_run_folder(folder)]
        )
        if not inside:
            raise ConfigError(f"{folder}: no run of this sweep has started yet")

        for run_folder in inside:
            measured.setdefault(run_folder.resolve(), _measure_run(run_folder))

    return list(measured.values())


def settings_of(
    runs: Sequence[MeasuredRun], *, each: bool = False
) -> list[tuple[str, list[MeasuredRun]]]:
    """The (name, runs) of every setting, in the order of its first run. With `each`, of every run.
    If several have the same name, their folders distinguish them."""
    groups: dict[object, list[MeasuredRun]] = {}
    for run in runs:
        groups.setdefault(run.folder if each else (run.name, run.setting), []).append(run)

    names = [group[0].name for group in groups.values()]
    return [
        (group[0].name if names.count(group[0].name) == 1 else str(group[0].folder), group)
        for group in groups.values()
    ]


def _measure_run(folder: Path) -> MeasuredRun:
    config = sources.leaves(sources.read_yaml(folder / "config.yaml"))
    path = folder / "metrics.jsonl"
    table = MetricsTable(path)
    try:
        while table.read_more():
            pass
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror or error}") from error

    if not table.num_rows:
        raise ConfigError(f"{folder}: the run has no numbers yet: leave it out, or wait")

    return MeasuredRun(
        folder, str(config.get("run.name") or folder.name), setting_of(config), table
    )
