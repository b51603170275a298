"""Delivers rows to a tracker in a separate thread, so that the tracker's work costs the run
nothing.

    put ─► bounded queue ─► thread: begin, log, ..., end ─► record of what was delivered

Invariants: `put` returns at once. At most MAX_WAITING rows wait, and above that the oldest is
dropped. A row is tried ATTEMPTS times and then left out. Each problem is reported once. `close`
waits until a given deadline and leaves the thread behind, which is a daemon. A row that is
delivered just before the process is killed may be lost.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from agentevo.errors import describe_error
from agentevo.observability.trackers.tracker import TrackedRow, TrackedRun, Tracker
from agentevo.runtime.credentials import without_passwords
from agentevo.runtime.files import write_atomic
from agentevo.runtime.parsing import parse_json

MAX_WAITING = 1000
"""The maximum number of rows that wait for a slow tracker."""
ATTEMPTS = 6
FIRST_PAUSE_S = 1.0
"""The wait in seconds between the first two attempts at a call. It doubles each time."""
HANG_TIMEOUT_S = 60.0
"""A tracker is reported as hanging after this many seconds in a call."""
MAX_ERROR_CHARS = 300
"""The maximum number of characters of an error in a warning."""


class TrackingRecord:
    """tracking.json in the run's folder: each tracker's id of the run, and its last step. Threads
    of all trackers write it."""

    def __init__(self, path: Path | None) -> None:
        """None: nothing is written, for a run that is never resumed."""
        self._path = path
        self._lock = threading.Lock()

        self._entries: dict[str, dict[str, Any]] = {}
        if path is not None and path.is_file():
            try:
                read = parse_json(path.read_bytes())
                self._entries = {name: dict(entry) for name, entry in read.items()}
            except (OSError, ValueError, AttributeError, TypeError):
                self._entries = {}  # without the record, a resumed run is a new run in the tracker

    def of(self, name: str) -> tuple[str, int]:
        """The (id, last step) of a tracker. ("", -1) if it has never begun."""
        entry = self._entries.get(name, {})
        tracker_id = entry.get("id")
        step = entry.get("step")
        is_known = isinstance(tracker_id, str) and type(step) is int
        return (str(tracker_id), int(step)) if is_known and step is not None else ("", -1)

    def keep(self, name: str, tracker_id: str, step: int) -> None:
        """Records the id and last step of a tracker. Raises OSError."""
        with self._lock:
            self._entries[name] = {"id": tracker_id, "step": step}
            if self._path is not None:
                write_atomic(self._path, json.dumps(self._entries, indent=1))


class TrackerDelivery:
    """Delivers rows to a tracker. The thread calls `say(text, is_warning)`, which must be quick."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        run: TrackedRun,
        record: TrackingRecord,
        say: Callable[[str, bool], None],
        *,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """Starts the thread."""
        self.name = name
        self._make = make
        self._run = run
        self._record = record
        self._say = say
        self._first_pause_s = first_pause_s
        self._rows: deque[TrackedRow] = deque()
        self._last: list[Callable[[Tracker], None]] | None = None
        self._wake = threading.Condition()
        self._id = run.id
        self._step = run.last_step
        self._warned = self._given_up = False
        self._left_out = 0
        self._busy: tuple[float, str] | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, row: TrackedRow) -> None:
        """Rows must come in rising order of steps. Rows that the tracker already has are
        skipped."""
        with self._wake:
            if self._given_up or self._last is not None or row.step <= self._run.last_step:
                return
            if len(self._rows) >= MAX_WAITING:
                self._rows.popleft()
                self._left_out += 1
            self._rows.append(row)
            self._wake.notify()

        if self._left_out:
            self._warn(f"it is {MAX_WAITING} steps behind, and the oldest of these are left out")

        self.check_for_hang()

    def check_for_hang(self) -> None:
        """Warns of a call that does not return. The run's thread calls this."""
        busy = self._busy
        if busy is not None and time.monotonic() - busy[0] > HANG_TIMEOUT_S:
            self._warn(f"{busy[1]} has not returned for {HANG_TIMEOUT_S:g} s")

    def finish(self, last: list[Callable[[Tracker], None]]) -> None:
        """Ends the delivery: `last` runs after the waiting rows, and then the thread ends."""
        with self._wake:
            self._last = last
            self._wake.notify()

    def wait(self, until: float) -> None:
        """Waits for the end, until that time of the monotonic clock. Reports rows that were not
        delivered."""
        self._thread.join(max(until - time.monotonic(), 0.0))
        missing = self._left_out + len(self._rows)
        if self._thread.is_alive():
            with self._wake:
                self._given_up = True
                self._wake.notify()
            self._warn(
                f"it did not receive everything before the deadline (tracking.flush_s); "
                f"{missing} steps are missing"
            )
        elif missing:
            self._say(f"{self.name}: {missing} steps are not in it; metrics.jsonl has them", False)

    def _warn(self, what: str) -> None:
        """Warns once per run; later warnings are not shown."""
        if self._warned:
            return

        self._warned = True
        self._say(
            f"tracker {self.name}: {what}. Training continues; metrics.jsonl in the run's "
            "folder has "
            "every number, and a resumed run continues with this tracker",
            True,
        )

    def _work(self) -> None:
        tracker = self._begin_tracker()
        if tracker is None:
            with self._wake:
                self._given_up = True
            return

        while (row := self._next()) is not None:
            if self._try_call(f"step {row.step}", lambda row=row: tracker.log(row)):  # type: ignore[misc]
                self._step = row.step
                self._keep()
            else:
                self._left_out += 1

        for act in self._last or ():
            self._try_call("the end", lambda act=act: act(tracker), attempts=1)  # type: ignore[misc]

    def _begin_tracker(self) -> Tracker | None:
        trackers: list[Tracker] = []

        def begin() -> None:
            tracker = self._make()
            started = tracker.begin(self._run)
            self._id = started.id
            if started.where:
                self._say(f"{self.name}: {without_passwords(started.where)}", False)
            trackers.append(tracker)

        if not self._try_call("its beginning", begin):
            return None

        self._keep()
        return trackers[0]

    def _keep(self) -> None:
        self._try_call("tracking.json", self._write_record, attempts=1)

    def _write_record(self) -> None:
        self._record.keep(self.name, self._id, self._step)

    def _next(self) -> TrackedRow | None:
        """The next row. None at the end."""
        with self._wake:
            while not self._rows and self._last is None and not self._given_up:
                self._wake.wait()
            return self._rows.popleft() if self._rows and not self._given_up else None

    def _try_call(self, what: str, call: Callable[[], None], attempts: int = ATTEMPTS) -> bool:
        """Whether one of the tries succeeded."""
        for number in range(attempts):
            if number:
                with self._wake:
                    self._wake.wait_for(
                        lambda: self._given_up, self._first_pause_s * 2 ** (number - 1)
                    )

            if self._given_up:
                return False

            self._busy = (time.monotonic(), what)
            try:
                call()
            except BaseException as error:  # noqa: BLE001 (a tracker can raise anything)
                words = without_passwords(describe_error(error)).split("\n")[0]
                if len(words) > MAX_ERROR_CHARS:
                    words = f"{words[:MAX_ERROR_CHARS]}..."
                self._warn(f"{what} failed: {words}")
            else:
                return True
            finally:
                self._busy = None

        return False


def with_identity(run: TrackedRun, name: str, record: TrackingRecord, new_id: str) -> TrackedRun:
    """The facts of the run for the tracker with that name."""
    tracker_id, step = record.of(name)
    return msgspec.structs.replace(
        run, id=tracker_id or new_id, resumed=bool(tracker_id), last_step=step if tracker_id else -1
    )
