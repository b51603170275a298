"""All trackers of a run, for the run's own thread. It puts rows in, receives the trackers'
problems, and ends the trackers together within one deadline."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentevo.observability.trackers.delivery import TrackerDelivery, TrackingRecord, with_identity
from agentevo.observability.trackers.secrets import clean_text, known_secrets
from agentevo.observability.trackers.tracker import (
    State,
    TrackedRow,
    TrackedRun,
    TrackedTable,
    Tracker,
    TrackerConfig,
)

RECORD = "tracking.json"


class Tracking:
    """The trackers of a run. Their threads start immediately. Not thread-safe: `note` and `warn`
    are called on the thread that calls the methods."""

    def __init__(
        self,
        makers: Sequence[tuple[TrackerConfig, Callable[[TrackerConfig], Tracker]]],
        run: TrackedRun,
        *,
        note: Callable[[str], None],
        warn: Callable[[str], None],
        flush_s: float,
        keep_record: bool = True,
    ) -> None:
        """`makers`: the options and the class of each tracker. `keep_record`: whether the run has a
        folder and may be resumed."""
        self._note = note
        self._warn = warn
        self._flush_s = flush_s
        self._messages: deque[tuple[str, bool]] = deque()
        record = TrackingRecord(run.folder / RECORD if keep_record else None)
        self._deliveries = [
            TrackerDelivery(
                config.name,
                lambda make=make, config=config: make(config),  # type: ignore[misc]
                with_identity(run, config.name, record, secrets.token_hex(8)),
                record,
                lambda text, is_warning: self._messages.append((text, is_warning)),
            )
            for config, make in makers
        ]

    def __bool__(self) -> bool:
        return bool(self._deliveries)

    def put(self, row: TrackedRow) -> None:
        """Delivers a committed step. Does not block."""
        for delivery in self._deliveries:
            delivery.put(row)
        self.pass_messages()

    def pass_messages(self) -> None:
        """Passes on the messages of the trackers since the last call."""
        for delivery in self._deliveries:
            delivery.check_for_hang()
        while self._messages:
            text, is_warning = self._messages.popleft()
            (self._warn if is_warning else self._note)(text)

    def close(
        self,
        state: State,
        summary: Mapping[str, Any],
        *,
        figures: Mapping[str, Path] | None = None,
        artifacts: Mapping[str, Path] | None = None,
    ) -> None:
        """Ends the trackers, and waits at most `flush_s` seconds until they have delivered the
        rest."""
        last = [
            *(
                lambda tracker, name=name, path=path: tracker.figure(name, path)
                for name, path in (figures or {}).items()
            ),
            *(
                lambda tracker, name=name, path=path: tracker.artifact(name, path)
                for name, path in (artifacts or {}).items()
            ),
            lambda tracker: tracker.end(state, summary),
        ]
        for delivery in self._deliveries:
            delivery.finish(list(last))

        until = time.monotonic() + self._flush_s
        for delivery in self._deliveries:
            delivery.wait(until)

        self.pass_messages()


def merge_rows(before: TrackedRow | None, row: TrackedRow) -> TrackedRow:
    """Two rows of the same step as one row. For a name in both, the later value counts."""
    if before is None:
        return row
    return TrackedRow(
        step=row.step,
        time=row.time,
        metrics={**before.metrics, **row.metrics},
        tables=(*before.tables, *row.tables),
    )


def clean_table(table: TrackedTable) -> TrackedTable:
    """The table without secrets in its texts."""
    secret_values = known_secrets()
    return TrackedTable(
        table.name,
        table.columns,
        tuple(
            tuple(
                clean_text(cell, secret_values) if isinstance(cell, str) else cell for cell in row
            )
            for row in table.rows
        ),
    )
