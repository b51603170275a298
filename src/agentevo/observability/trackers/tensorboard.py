"""TensorBoard: event files below the run's folder."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from agentevo.observability.trackers.tracker import (
    State,
    TrackedRow,
    TrackedRun,
    TrackedTable,
    Tracker,
    TrackerConfig,
    TrackingBegun,
)

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardConfig(TrackerConfig):
    """Event files for TensorBoard, in tensorboard/ of the run's folder."""


class TensorBoard(Tracker):
    """Event files in tensorboard/ of the run's folder: `tensorboard --logdir RUN_DIR`."""

    Config = TensorBoardConfig
    packages = (("tensorboard", "tensorboard"),)

    def begin(self, run: TrackedRun) -> TrackingBegun:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder / "tensorboard"
        _wait_for_a_later_name(folder)
        self._writer: EventFileWriter = EventFileWriter(str(folder))
        self._step = max(run.last_step, 0)

        if run.resumed:  # TensorBoard hides the values of older files from this step on
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=run.last_step + 1, session_log=start))
        else:
            text = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
            self._add([_text("config", f"```\n{text}\n```")], 0, None)

        return TrackingBegun(run.id)

    def log(self, row: TrackedRow) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()
        ]
        values += [_text(table.name, _markdown(table)) for table in row.tables]
        self._step = row.step
        self._add(values, row.step, row.time)

    def figure(self, name: str, path: Path) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        png = path.read_bytes()
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        self._add([Summary.Value(tag=name, image=image)], self._step, None)

    def end(self, state: State, summary: Mapping[str, Any]) -> None:
        self._writer.close()

    def _add(self, values: list[Summary.Value], step: int, time: float | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        event = Event(step=step, summary=Summary(value=values))
        if time is not None:
            event.wall_time = time

        self._writer.add_event(event)
        self._writer.flush()


def _wait_for_a_later_name(folder: Path) -> None:
    """TensorBoard reads event files in the order of their names, which begin with the second of
    their creation. So the file of a resumed run must come after the files that it continues."""
    now = time.time()
    if any(folder.glob(f"events.out.tfevents.{int(now):010d}.*")):
        time.sleep(math.ceil(now) - now)


def _text(name: str, text: str) -> Summary.Value:
    """A value of TensorBoard's tab Text."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(
        tag=name,
        metadata=SummaryMetadata(plugin_data=plugin),
        tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode("utf-8", "replace")]),
    )


def _markdown(table: TrackedTable) -> str:
    """A table in Markdown. Each cell is a single line."""

    def cell(value: object) -> str:
        return " ".join(str(value).split()).replace("|", "\\|")

    lines = [" | ".join(table.columns), " | ".join("---" for _ in table.columns)]
    return "\n".join([*lines, *(" | ".join(map(cell, row)) for row in table.rows)])
