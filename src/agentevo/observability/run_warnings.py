"""The warnings of a run, as its folder has them: of a run that goes on or was interrupted in
warnings.json, of one that has ended in summary.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentevo.runtime.parsing import read_json_object

WARNINGS = "warnings.json"
"""A file of a run's folder with the list `warnings` of its committed steps, as in summary.json."""
STEP_METRIC = "timing_s/step"
"""A metric that every step has, and no evaluation."""
_AT_STEP = re.compile(r"step (\d{1,12}): (.*)", re.DOTALL)


def read_warnings(folder: Path) -> list[Any]:
    """The entries of warnings.json; none if there is no such file. Raises ConfigError for a damaged
    file."""
    path = folder / WARNINGS
    entries = read_json_object(path).get("warnings") if path.is_file() else None
    return entries if isinstance(entries, list) else []


def warnings_in_summary(summary: Mapping[str, Any]) -> tuple[tuple[int | None, str], ...]:
    """(step, observation and remedy) of the warnings of summary.json (or
    warnings.json), the newest first."""
    warnings: list[tuple[int | None, str]] = []
    entries = summary.get("warnings")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, Mapping):
            step = entry.get("step")
            step = step if isinstance(step, int) else None
            warnings.append((step, str(entry.get("message", ""))))
            continue
        match = _AT_STEP.match(str(entry))
        warnings.append((int(match[1]), match[2]) if match else (None, str(entry)))

    return tuple(reversed(warnings))
