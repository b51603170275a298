"""A run ends early where its held-out success stands still, and keeps its best checkpoint, also
when it is killed."""

from __future__ import annotations

import errno
import math
import os
from typing import Any

import pytest
from pydantic import ValidationError

from agentevo.api.run import train
from agentevo.config.sections import EvaluationSection
from agentevo.errors import CheckpointError
from agentevo.runs.folder.run_folder import finished_summary
from agentevo.runs.orchestration.evaluation import RunEvaluation
from agentevo.runs.orchestration.run_record import RunProgress
from agentevo.training import checkpoint
from agentevo.training.checkpoint import Checkpoints

VALUES = {0: 0.2, 1: 0.5, 2: 0.4, 3: 0.5, 4: 0.1, 5: 0.3}
"""Step -> its held-out success."""
QUICK = (
    "cold_start.episodes=0",
    "trainer.steps=5",
    "trainer.groups_per_step=1",
    "trainer.minibatches=1",
    "evaluation.tasks=1",
    "evaluation.every=1",
    "evaluation.samples=0",
    "checkpoint.every=1",
    "checkpoint.keep_last=1",
)


def rated(*values: float | None) -> RunProgress:
    progress = RunProgress()
    for step, value in enumerate(values):
        progress.step = step
        progress.rate(value)
    return progress


@pytest.mark.parametrize(
    ("values", "stop_after", "reason"),
    [
        ((0.2, 0.5, 0.4), 2, None),
        (
            (0.2, 0.5, 0.4, 0.5),
            2,
            "the last 2 evaluations were no better than the held-out success of 50.0% of step 1",
        ),
        ((0.2, 0.5, 0.4, 0.5), 0, None),
        ((0.2, 0.1, 0.2, 0.3), 2, None),
        ((0.2, 0.2), 1, "the last 1 evaluation were no better than the held-out success of 20.0% "),
        ((-1.5, -1.25, -1.5), 1, "no better than the held-out loss of 1.25 of step 1"),
        ((0.0, 0.0), 1, "held-out success of 0.0% before the first step"),
        ((-1.5, math.nan, math.nan), 2, "no better than the held-out loss of 1.5 before"),
        ((math.nan, math.nan), 2, "the last 2 evaluations gave no number"),
        ((None, None, None), 1, None),
    ],
)
def test_evaluations_that_are_no_better_end_a_run(values, stop_after, reason):
    found = rated(*values).early_stop(stop_after)
    assert found == reason or (reason is not None and reason in str(found))


def test_a_run_without_evaluations_can_t_stop_by_them():
    with pytest.raises(ValidationError, match=r"set evaluation\.every above 0"):
        EvaluationSection(stop_after=2, every=0)


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations that give VALUES."""
    monkeypatch.setattr(
        RunEvaluation, "value_of", lambda self, _: VALUES[self._record.progress.step]
    )


@pytest.mark.slow
def test_a_run_that_stops_early_is_finished_and_can_go_on(
    tmp_path, small_config, quiet_view, scripted
):
    config = small_config(tmp_path / "run", *QUICK, "evaluation.stop_after=2")
    run = train(config, view=quiet_view())
    assert run.summary["steps"] == 3 and run.summary["planned_steps"] == 5
    assert run.summary["stopped_early"].startswith("the last 2 evaluations were no better")
    assert finished_summary(run.dir) is not None
    assert [run.checkpoint_path(which).name for which in ("best", "last")] == [
        "step-000003",
        "step-000003",
    ]

    again = train(config, resume=True, view=quiet_view())
    assert again.summary["steps"] == 3 and again.summary["stopped_early"]

    longer = small_config(tmp_path / "run", *QUICK, "evaluation.stop_after=0")
    run = train(longer, resume=True, view=quiet_view())
    assert run.summary["steps"] == 5 and run.summary["stopped_early"] is None
    assert run.summary["best"] == {"step": 3, "value": 0.5}
    assert Checkpoints(run.dir / "checkpoints", 1).steps() == [3, 5]
    assert run.audit().violations == []


@pytest.mark.slow
@pytest.mark.parametrize("keep_best", [True, False])
def test_the_best_checkpoint_that_a_kill_has_lost_is_saved_again(
    tmp_path, small_config, quiet_view, scripted, monkeypatch, keep_best
):
    """Its step is committed while it is written in the background."""
    keys = (*QUICK, "checkpoint.every=9", f"checkpoint.keep_best={keep_best}", "trainer.steps=2")
    config = small_config(tmp_path / "run", *keys, "checkpoint.background=true")
    with monkeypatch.context() as full:
        full.setattr(checkpoint, "write_model", _no_room)
        with pytest.raises(CheckpointError, match="No space left on device"):
            train(config, view=quiet_view())

    checkpoints = Checkpoints(config.run_dir / "checkpoints", 1)
    assert checkpoints.steps() == []

    run = train(config, resume=True, view=quiet_view())
    assert checkpoints.steps() == ([1, 2] if keep_best else [2])
    assert run.checkpoint.name == ("step-000001" if keep_best else "step-000002")
    assert run.audit().violations == []

    again = train(
        small_config(tmp_path / "run", *keys, "trainer.steps=3"), resume=True, view=quiet_view()
    )
    assert again.summary["steps"] == 3 and again.audit().violations == []


def _no_room(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
