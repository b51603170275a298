"""What a tracker does that fails, hangs, is slow or floods: it costs one warning, and no time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentevo.observability.trackers import (
    TrackedRow,
    TrackedRun,
    Tracker,
    TrackerConfig,
    Tracking,
    TrackingBegun,
)
from agentevo.observability.trackers import delivery as delivery_module

PATIENCE_S = 300.0


class Heard(Tracker):
    """Keeps what it is told."""

    def __init__(self, config: TrackerConfig) -> None:
        super().__init__(config)
        self.rows: list[TrackedRow] = []
        self.runs: list[TrackedRun] = []
        self.ends: list[str] = []
        self.hook: Callable[[TrackedRow], None] = lambda row: None

    def begin(self, run: TrackedRun) -> TrackingBegun:
        self.runs.append(run)
        return TrackingBegun(run.id)

    def log(self, row: TrackedRow) -> None:
        self.hook(row)
        self.rows.append(row)

    def end(self, state: str, summary: object) -> None:
        self.ends.append(state)


def row(step: int, **metrics: float) -> TrackedRow:
    return TrackedRow(step=step, time=float(step), metrics=metrics or {"x": float(step)})


def begun(
    folder: Path, tracker: Tracker, *, flush_s: float = PATIENCE_S, keep: bool = True
) -> tuple[Tracking, list[str], list[str]]:
    notes: list[str] = []
    warnings: list[str] = []
    tracking = Tracking(
        [(tracker.config, lambda config: tracker)],
        TrackedRun(folder=folder, project="p", name="n"),
        note=notes.append,
        warn=warnings.append,
        flush_s=flush_s,
        keep_record=keep,
    )
    return tracking, notes, warnings


def test_every_step_arrives_in_order_and_the_end_after_them(tmp_path: Path) -> None:
    tracker = Heard(TrackerConfig(name="heard"))
    tracking, notes, warnings = begun(tmp_path, tracker)
    for step in range(50):
        tracking.put(row(step))

    tracking.close("finished", {})
    assert [one.step for one in tracker.rows] == list(range(50))
    assert (tracker.ends, notes, warnings) == (["finished"], [], [])

    kept = json.loads((tmp_path / "tracking.json").read_text())
    assert kept["heard"]["step"] == 49


def test_a_resumed_run_goes_on_in_the_same_one_without_a_step_twice(tmp_path: Path) -> None:
    first = Heard(TrackerConfig(name="heard"))
    tracking, *_ = begun(tmp_path, first)
    for step in range(4):
        tracking.put(row(step))

    tracking.close("stopped", {})
    second = Heard(TrackerConfig(name="heard"))
    tracking, *_ = begun(tmp_path, second)
    for step in range(6):  # the log is offered whole
        tracking.put(row(step))

    tracking.close("finished", {})
    assert [one.step for one in second.rows] == [4, 5]
    assert second.runs[0].id == first.runs[0].id
    assert second.runs[0].resumed
    assert not first.runs[0].resumed


def test_a_tracker_that_raises_costs_one_warning(tmp_path: Path) -> None:
    tracker = Heard(TrackerConfig(name="broken"))

    def fail(row: TrackedRow) -> None:
        raise SystemExit(f"no server at http://me:hush@host/ for step {row.step}\nmore")

    tracker.hook = fail
    tracking, notes, warnings = begun(tmp_path, tracker)
    for delivery in tracking._deliveries:
        delivery._first_pause_s = 0.001
    for step in range(3):
        tracking.put(row(step))

    tracking.close("finished", {})
    assert len(warnings) == 1
    assert "step 0 failed" in warnings[0]
    assert "hush" not in warnings[0]
    assert notes == ["broken: 3 steps are not in it; metrics.jsonl has them"]
    assert tracker.ends == ["finished"]


def test_a_tracker_that_is_back_has_every_step(tmp_path: Path) -> None:
    tracker = Heard(TrackerConfig(name="away"))
    away = [3]

    def fail_three_times(row: TrackedRow) -> None:
        if away[0]:
            away[0] -= 1
            raise ConnectionError("refused")

    tracker.hook = fail_three_times
    tracking, _, warnings = begun(tmp_path, tracker)
    for delivery in tracking._deliveries:
        delivery._first_pause_s = 0.001
    for step in range(5):
        tracking.put(row(step))

    tracking.close("finished", {})
    assert [one.step for one in tracker.rows] == list(range(5))
    assert len(warnings) == 1


@pytest.mark.slow
def test_one_that_cannot_begin_is_given_up(tmp_path: Path) -> None:
    class Closed(Heard):
        def begin(self, run: TrackedRun) -> TrackingBegun:
            raise PermissionError("key refused")

    tracking, _, warnings = begun(tmp_path, Closed(TrackerConfig(name="closed")))
    for delivery in tracking._deliveries:
        delivery._first_pause_s = 0.001

    tracking.put(row(1))
    tracking.close("finished", {})
    assert len(warnings) == 1
    assert "its beginning failed: PermissionError: key refused" in warnings[0]
    assert not (tmp_path / "tracking.json").exists()


def test_one_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    tracker = Heard(TrackerConfig(name="hangs"))
    free = threading.Event()
    tracker.hook = lambda row: free.wait(PATIENCE_S) and None
    tracking, _, warnings = begun(tmp_path, tracker, flush_s=0.2)
    began = time.monotonic()

    for step in range(3 * delivery_module.MAX_WAITING):
        tracking.put(row(step))

    waiting = len(tracking._deliveries[0]._rows)
    tracking.close("finished", {})
    assert time.monotonic() - began < PATIENCE_S / 2
    assert waiting <= delivery_module.MAX_WAITING
    assert len(warnings) == 1
    assert "steps behind" in warnings[0]

    free.set()


def test_a_call_that_does_not_come_back_is_said(tmp_path: Path, monkeypatch) -> None:
    tracker = Heard(TrackerConfig(name="hangs"))
    entered = threading.Event()
    free = threading.Event()

    def wait(row: TrackedRow) -> None:
        entered.set()
        free.wait(PATIENCE_S)

    tracker.hook = wait
    tracking, _, warnings = begun(tmp_path, tracker, flush_s=0.0)
    tracking.put(row(1))
    assert entered.wait(PATIENCE_S)

    monkeypatch.setattr(delivery_module, "HANG_TIMEOUT_S", 0.0)
    tracking.pass_messages()
    assert "step 1 has not returned" in warnings[0]

    tracking.close("finished", {})
    assert len(warnings) == 1

    free.set()


def test_a_damaged_record_begins_anew(tmp_path: Path) -> None:
    for damaged in (
        b"\xff{",
        b"[1]",
        b'{"heard": 3}',
        b'{"heard": {"id": 3, "step": "x"}}',
        b"[" * 100_000,
    ):
        (tmp_path / "tracking.json").write_bytes(damaged)
        tracker = Heard(TrackerConfig(name="heard"))
        tracking, *_ = begun(tmp_path, tracker)
        tracking.put(row(0))
        tracking.close("finished", {})
        assert not tracker.runs[0].resumed
        assert len(tracker.rows) == 1
