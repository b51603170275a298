"""The state of a run without a folder, from the committed steps in its store: their metrics, the
newest evaluations at each step, and the warnings. An error becomes `RunView.problem`, see
run_state.py.

The reader queries the store at most every QUERY_INTERVAL_S seconds, and pauses REST_FACTOR times as
long as a query took.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentevo.errors import AgentEvoError
from agentevo.observability.metrics_table import MetricsTable
from agentevo.observability.run_warnings import warnings_in_summary
from agentevo.runs.folder.run_state import PIECE_S, RunView, State
from agentevo.runs.folder.sources import RunSource
from agentevo.store import Store
from agentevo.store.records import StepRecord
from agentevo_ui.stores import Stores

QUERY_INTERVAL_S = 1.0
REST_FACTOR = 5.0
PAGE = 50
"""The number of records in a read. A record is large: it contains the plan of its step."""


class StoreReader:
    """Reads a store repeatedly. Only one caller at a time may call `read`. Any thread may read
    `view`."""

    def __init__(self, source: RunSource, stores: Stores) -> None:
        self.view = RunView(source)
        self._stores = stores
        self._forget()
        self._rest_until = float("-inf")

    def _forget(self) -> None:
        self._table = MetricsTable(Path("metrics.jsonl"))
        self._last: tuple[int, float] | None = None
        """The (step, time of its commit) of the newest known step."""
        self._warnings: list[str] = []
        self._evaluated: Mapping[str, Any] = {}

    async def read(self) -> None:
        """Reads the steps that were committed since the last call, for about PIECE_S seconds at
        most."""
        if time.monotonic() < self._rest_until:
            return

        started = time.monotonic()
        problem = ""
        state = self.view.state
        is_behind = False
        try:
            async with self._stores.reading(self.view.source) as store:
                is_behind = await self._read(store)
                state = await _state(store)
        except AgentEvoError as error:
            problem = str(error)

        duration_s = time.monotonic() - started
        self._rest_until = (
            started
            + duration_s
            + (0.0 if is_behind else max(QUERY_INTERVAL_S, REST_FACTOR * duration_s))
        )

        new_view = replace(
            self.view,
            state=state,
            problem=problem,
            step=self._table.last_step,
            table=self._table,
            num_rows=self._table.num_rows,
            warnings=warnings_in_summary({"warnings": self._warnings}),
            changed_at=self._last[1] if self._last else None,
            is_behind=is_behind,
        )
        if new_view != self.view or not self.view.version:
            self.view = replace(new_view, version=self.view.version + 1)

    async def _read(self, store: Store) -> bool:
        """Reads steps. Returns whether there are more."""
        newest = await store.last_step()
        if self._last is not None and (newest is None or newest.step < self._last[0]):
            self._forget()  # the run was rewound, or another run replaced it

        if self._last is not None and newest is not None and newest.step == self._last[0]:
            if newest.committed_at == self._last[1]:
                return False
            self._forget()

        deadline = time.monotonic() + PIECE_S
        while True:
            after = self._last[0] if self._last else None
            records = await store.steps(after=after, limit=PAGE)
            for record in records:
                self._add_record(record)

            if len(records) < PAGE:
                return False
            if time.monotonic() > deadline:
                return True

    def _add_record(self, record: StepRecord) -> None:
        progress = _mapping(record.record.get("progress"))
        if self._last is None:
            self._add_row(0, None, progress.get("before"))

        self._add_row(record.step, record.committed_at, record.record.get("metrics"))
        evaluated = _mapping(progress.get("after"))
        if evaluated != self._evaluated and evaluated != progress.get("before"):
            self._add_row(record.step, record.committed_at, evaluated)

        self._evaluated = evaluated
        warnings = progress.get("warnings")
        self._warnings += [str(text) for text in warnings] if isinstance(warnings, list) else []
        self._last = record.step, record.committed_at

    def _add_row(self, step: int, at: float | None, metrics: object) -> None:
        """Adds a row of metrics without the values that are not numbers: any program may have
        written the record."""
        numbers = {
            str(name): None if value is None else float(value)
            for name, value in _mapping(metrics).items()
            if value is None or isinstance(value, (int, float))
        }
        if numbers:
            self._table.add_row(step, at, numbers)


async def _state(store: Store) -> State:
    """The state of the run: running if a call is running, else unknown. A store does not record the
    end of its run."""
    async for _ in store.calls(state="running", limit=1):
        return "running"
    return "unknown"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
