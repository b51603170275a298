"""One of two processes that train together, as torchrun starts them: each opens the trackers of the
run and reports its steps. python two_ranks.py FOLDER, with torchrun's variables."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch import distributed

from agentevo.config import build_config
from agentevo.observability.trackers import TrackedRow, TrackedRun, Tracker, TrackingBegun, trackers
from agentevo.runs.orchestration.tracking import track

STEPS = 3


@trackers.register("lines")
class ToLines(Tracker):
    """Adds what it is told to a file, with the rank that told it."""

    def begin(self, run: TrackedRun) -> TrackingBegun:
        self._path = run.folder / "lines.jsonl"
        self._add("begin")
        return TrackingBegun(run.id)

    def log(self, row: TrackedRow) -> None:
        self._add(row.step)

    def end(self, state: Any, summary: Any) -> None:
        self._add(state)

    def _add(self, what: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([what, int(os.environ["RANK"])]) + "\n")


def main(folder: Path) -> None:
    distributed.init_process_group("gloo")
    config = build_config(
        {
            "run": {"dir": str(folder)},
            "model": {"name": "tiny"},
            "environment": {"type": "coins"},
            "tracking": {"backends": ["lines"], "tensorboard": True},
        }
    )
    with track(config, "train", print) as tracking:
        for step in range(STEPS):
            distributed.barrier()
            tracking.put(TrackedRow(step=step, time=time.time(), metrics={"a": 1.0 * step}))

    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
