"""The warnings of a run: from its summary, or computed from its numbers."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from agentevo.observability.collapse import LOSS, SMOOTHED, CollapseMonitor
from agentevo.observability.metrics_table import MetricsTable
from agentevo.observability.remedies import remedies_of

STEP_METRIC = "timing_s/step"
"""A metric that every step has, and no evaluation."""
WATCHED = {*SMOOTHED, LOSS, "rollout/in"}
COUNTED = ("rollout/dropped/", "rollout/failed/")
_AT_STEP = re.compile(r"step (\d{1,12}): (.*)", re.DOTALL)


def warnings_in_summary(summary: Mapping[str, Any]) -> tuple[tuple[int | None, str], ...]:
    """(step, observation and remedy) of the warnings of summary.json, the newest first."""
    warnings: list[tuple[int | None, str]] = []
    for entry in summary.get("warnings") or []:
        if isinstance(entry, Mapping):
            step = entry.get("step")
            step = step if isinstance(step, int) else None
            warnings.append((step, str(entry.get("message", ""))))
            continue
        match = _AT_STEP.match(str(entry))
        warnings.append((int(match[1]), match[2]) if match else (None, str(entry)))

    return tuple(reversed(warnings))


class Signs:
    """The warnings that the monitor (collapse.py) gives for a run's numbers, as they grow."""

    def __init__(self) -> None:
        self._monitor = CollapseMonitor()
        self._next_row = 0
        self.found: list[tuple[int | None, str]] = []

    def observe(self, table: MetricsTable, config: Mapping[str, Any]) -> None:
        """Checks the rows since the last call. `config`: the known part of the run's
        config.yaml."""
        self._monitor.remedies = remedies_of(config)
        steps = table.columns.get(STEP_METRIC)
        rows = list(steps.rows[bisect_left(steps.rows, self._next_row) :]) if steps else []
        names = [name for name in table.columns if name in WATCHED or name.startswith(COUNTED)]
        for row in rows:
            values = {name: table.value_at(name, row) for name in names if table.has(name, row)}
            warnings = self._monitor.observe(table.steps[row], values)
            self.found += [(warning.step, warning.message) for warning in warnings]

        self._next_row = table.num_rows
