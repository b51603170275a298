"""A whole run with trackers of another package: one that keeps, one that raises, one that hangs."""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_fixtures import InterruptingView

from agentevo.api.run import train
from agentevo.observability import LiveView, read_metrics

MODULE = '''
import json
import threading
from collections.abc import Iterator
from pathlib import Path

from agentevo.observability.trackers import TrackingBegun, Tracker

never = threading.Event()


class Kept(Tracker):
    """Writes what it is told below the run's folder."""

    def begin(self, run):
        self.path = Path(run.folder) / "kept.jsonl"
        self.say(begin=run.id, resumed=run.resumed, kind=run.kind, config=run.config)
        return TrackingBegun(run.id)

    def say(self, **told):
        with self.path.open("a") as file:
            file.write(json.dumps(told) + chr(10))

    def log(self, row):
        tables = [table.rows for table in row.tables]
        self.say(step=row.step, metrics=dict(row.metrics), tables=tables)

    def figure(self, name, path):
        self.say(figure=name)

    def end(self, state, summary):
        self.say(end=state)


class Raises(Kept):
    def log(self, row):
        raise KeyboardInterrupt("not the run's own")


class Hangs(Kept):
    def begin(self, run):
        never.wait(600)
'''


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that is installed, as Python sees it."""
    folder = tmp_path / "site"
    information = folder / "their_trackers-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / "their_trackers.py").write_text(MODULE)
    (information / "METADATA").write_text("Name: their-trackers\nVersion: 1.0\n")

    points = [f"{name} = their_trackers:{name.title()}" for name in ("kept", "raises", "hangs")]
    (information / "entry_points.txt").write_text("\n".join(["[agentevo.trackers]", *points, ""]))
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("their_trackers", None)


@pytest.mark.slow
@pytest.mark.usefixtures("other_package")
def test_a_run_and_its_resumed_run(tmp_path: Path, small_config) -> None:
    folder = tmp_path / "run"
    options = (
        "tracking.backends=[kept, raises, hangs]",
        "tracking.flush_s=1",
        "tracking.attempts=2",
        "cold_start.episodes=0",
        "trainer.steps=3",
    )
    with pytest.raises(KeyboardInterrupt):
        train(small_config(folder, *options), view=InterruptingView(step=2))

    stream = io.StringIO()
    view = LiveView("test", stream=stream, plain=True)
    train(small_config(folder, *options), view=view, resume=True)
    told = [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]
    mine = [one for one in told if "step" in one]
    assert [one["step"] for one in mine] == [0, 1, 2, 3], "each committed step, once"

    for row in mine:
        logged: dict[str, float | None] = {}
        for one in read_metrics(folder / "metrics.jsonl"):
            logged |= one if one["step"] == row["step"] else {}
        assert row["metrics"] == {
            key: value for key, value in logged.items() if key not in ("step", "time")
        }

    assert len(mine[1]["tables"][0]) == 2

    begins = [one for one in told if "begin" in one and one["begin"] == told[0]["begin"]]
    assert [begin["resumed"] for begin in begins] == [False, True]
    assert begins[0]["config"]["trainer"]["steps"] == 3

    ends = [one["end"] for one in told if "end" in one]
    assert set(ends) == {"stopped", "finished"}

    warnings = [line for line in stream.getvalue().splitlines() if "WARNING tracker" in line]
    assert len(warnings) == 2, "one for each that is broken"
    assert sorted(line.split()[2] for line in warnings) == ["hangs:", "raises:"]
