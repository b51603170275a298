"""TensorBoard for real: what was logged is read back by its own reader."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from write_a_run import main as write_a_run

from agentevo.observability import MetricsLog
from agentevo.observability.trackers import TrackedRun, TrackerConfig, Tracking, trackers


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_steps_texts_and_pictures_come_back(tmp_path: Path) -> None:
    write_a_run("tensorboard", "{}", tmp_path, 0, 2)
    write_a_run("tensorboard", "{}", tmp_path, 3, 4)
    events = read(tmp_path)
    scores = [(Scalar.step, Scalar.value) for Scalar in events.Scalars("critic/score/mean")]
    assert scores == [(step, step / 2) for step in range(5)]
    assert math.isnan(events.Scalars("actor/grad_norm")[1].value)
    assert events.Images("plots/curve")[-1].width == 1

    texts = {
        tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
    }
    assert "a \\| b" in texts["attempts"]
    assert "learning_rate: 0.0001" in texts["config"]
    assert "hush" not in texts["config"]


def test_a_log_hands_over_what_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the second file's name, of the same second, would come first: 10 before 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))

    def begun() -> Tracking:
        return Tracking(
            [(TrackerConfig(name="tensorboard"), trackers.get("tensorboard"))],
            TrackedRun(folder=tmp_path, project="p", name="n"),
            note=print,
            warn=print,
            flush_s=60,
        )

    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.tracking = begun()
        for step in (0, 1, 2, 3):
            log.log(step, {"x": step * 1.0})
            log.log(step, {"y": step * 2.0})
            log.deliver_to_trackers(step - 1)  # step 3 is never committed
        log.tracking.close("failed", {})

    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.tracking = begun()
        log.resume(2)
        log.log(3, {"x": 30.0})
        log.deliver_to_trackers(3)
        log.tracking.close("finished", {})

    events = read(tmp_path)
    assert [(Scalar.step, Scalar.value) for Scalar in events.Scalars("x")] == [
        *((step, step * 1.0) for step in range(3)),
        (3, 30.0),
    ]
    assert [Scalar.step for Scalar in events.Scalars("y")] == [0, 1, 2]


@pytest.mark.slow
def test_the_room_loads_no_tracker_and_no_torch() -> None:
    heavy = ("torch", "tensorboard", "wandb", "mlflow", "transformers")
    loaded = f"[name for name in {heavy!r} if name in sys.modules]"
    code = f"import sys, agentevo.observability.trackers; print({loaded})"
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300
    )
    assert found.stdout.strip() == "[]"
