"""Fine-tuning keeps the weights from which reinforcement learning has most to gain: the rule, the
choice of the tasks, and runs that stop within a measurement and go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentevo.api.run import Run, sft
from agentevo.config import build_config, check_sft
from agentevo.data.question_overlap import question_key
from agentevo.errors import ConfigError
from agentevo.models import checkpoint_manifest as manifest
from agentevo.observability import read_metrics
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.folder.run_words import run_words
from agentevo.runs.orchestration.conversations import SFTData
from agentevo.runs.orchestration.gap import choose_tasks, is_larger, measure_attempts
from agentevo.runs.orchestration.run_record import RunProgress
from agentevo.types import Task
from agentevo_evolve.pipeline.kinds import Job
from agentevo_evolve.pipeline.stages import SFT

GAP = (
    "data.demonstrations=64",
    "data.eval_share=0",
    "sft.batch_conversations=8",
    "sft.learning_rate=1e-2",
    "sft.epochs=3",
    "cold_start.episodes=0",
    "evaluation.every=0",
    "evaluation.samples=0",
    "checkpoint.every=0",
    "checkpoint.keep_best=false",
    "sft.stop_at_gap.tasks=8",
    "sft.stop_at_gap.every=3",
)
NOWHERE = {
    "model": {"name": "tiny"},
    "agent": {"type": "tool_agent", "tools": ["calculator"]},
    "data": {"train": ["x.json"]},
}


def attempt(task: str, success: bool, status: str = "completed", *logprobs: float) -> Any:
    turns = [SimpleNamespace(logprobs=logprobs)]
    return SimpleNamespace(task_id=task, success=success, status=status, turns=turns)


def gaps(*values: float) -> dict[str, float]:
    return {f"task-{number}": value for number, value in enumerate(values)}


def rated(*measured: dict[str, float]) -> RunProgress:
    progress = RunProgress()
    for step, by_task in enumerate(measured):
        progress.step = step
        progress.rate_gap(by_task)
    return progress


def test_a_measurement_is_the_mean_over_tasks_without_a_failed_attempt():
    attempts = [
        *(attempt("some", won, "completed", -0.5, -1.5) for won in (True, False, False, False)),
        *(attempt("all", True) for _ in range(4)),
        *(attempt("none", False) for _ in range(4)),
        *(attempt("broken", True, status) for status in ("completed", "failed")),
    ]
    measured = measure_attempts(attempts)
    assert measured.by_task == {"some": 0.75, "all": 0.0, "none": 0.0}
    assert measured.pass_1 == pytest.approx(1.25 / 3) and measured.pass_k == pytest.approx(2 / 3)
    assert measured.gap == pytest.approx(0.25) and measured.error == pytest.approx(0.25)
    assert measured.entropy == 1.0
    assert measure_attempts([attempt("broken", True, "failed")]).by_task == {}


@pytest.mark.parametrize(
    ("best", "later", "larger"),
    [
        (gaps(0, 0, 0, 0), gaps(0.5, 0.5, 0.5, 0.5), True),
        (gaps(0.5, 0.5, 0.5, 0.5), gaps(0.5, 0.5, 0.5, 0.5), False),
        (gaps(0.5, 0.5, 0.5, 0.5), gaps(0.1, 0.1, 0.1, 0.1), False),
        (gaps(0, 0, 0, 0), gaps(0.875, 0, 0, 0), False),  # exactly one standard error
        (gaps(0, 0, 0, 0), gaps(0.875, 0.875, 0, 0), True),
        (gaps(0.5, 0, 0.5, 0), gaps(0, 0.75, 0, 0.75), False),  # larger, and within the noise
        (gaps(0.25), gaps(0.5), True),
        (gaps(0.25), {"another": 1.0}, False),
    ],
)
def test_a_later_gap_has_to_be_larger_by_more_than_a_standard_error(best, later, larger):
    assert is_larger(later, best) is larger


def test_measurements_without_a_larger_gap_end_a_run_after_the_first_gap():
    nothing = gaps(0, 0, 0)
    some = gaps(0.5, 0.5, 0.5)
    assert rated(nothing, nothing, nothing).early_stop(2) is None
    assert rated(nothing, nothing, nothing).best_rating is None

    progress = rated(nothing, some, gaps(0.7, 0.7, 0.7), some)
    assert progress.best_rating is not None and progress.best_rating.step == 2
    assert progress.newest_rating is None and progress.early_stop(2) is None

    progress = rated(some, some, nothing)
    assert progress.early_stop(2) == (
        "the last 2 measurements showed no larger gap than the 50.0 points before the first step"
    )
    assert progress.early_stop(0) is None
    assert "give" not in str(progress.nothing_left(9, "sft", 2))


def test_tasks_that_nothing_demonstrates_are_played_first_and_held_out_ones_never(small_config):
    config = build_config(
        NOWHERE,
        ["sft.stop_at_gap.tasks=5", "trainer.groups_per_step=2", "evaluation.tasks=3"],
        needs_environment=False,
    )
    source = TaskSource(config, [Task(id=f"t{n}", query=f"What is {n}?") for n in range(20)])
    held_out = {task.id for task in source.held_out()}
    shown = {question_key(f"What  is {n}?") for n in range(4)}
    data = SFTData(questions={key for key in shown if key}, task_ids={"t4", "t5"})

    chosen = choose_tasks(config, source, data.demonstrates, 2)
    assert len(chosen) == 5 and not any(map(data.demonstrates, chosen))
    assert not held_out & {task.id for task in chosen}
    assert chosen == choose_tasks(config, source, data.demonstrates, 2)

    data.task_ids |= {f"t{n}" for n in range(17)} - {"t9"}
    few = choose_tasks(config, source, data.demonstrates, 2)
    assert [task.id == "t9" for task in few] == [True, False, False, False, False]

    lake = small_config("run", "sft.stop_at_gap.tasks=3")
    shown_ids = {"train-0", "train-2"}
    tasks = choose_tasks(lake, TaskSource(lake, None), lambda task: task.id in shown_ids, 2)
    assert [task.id for task in tasks] == ["train-1", "train-3", "train-4"]


def test_a_recipe_without_tasks_is_refused():
    config = build_config(NOWHERE, ["sft.stop_at_gap.tasks=5"], needs_environment=False)
    with pytest.raises(ConfigError, match=r"sft\.stop_at_gap\.tasks: there are no training tasks"):
        check_sft(config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small_config, quiet_view) -> Run:
    """The run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return sft(small_config(folder, *GAP), view=quiet_view())


@pytest.mark.slow
def test_the_weights_of_the_largest_gap_are_the_result(whole):
    rows = [row for row in read_metrics(whole.dir / "metrics.jsonl") if "sft/tasks/gap" in row]
    measured = {row["step"]: row["sft/tasks/gap"] for row in rows}
    summary = whole.summary
    kept = summary["kept"]
    assert [*measured] == [*range(0, summary["steps"] + 1, 3)]
    assert all(
        row["sft/tasks/pass@8"] - row["sft/tasks/pass@1"] == pytest.approx(row["sft/tasks/gap"])
        and row["sft/tasks/n"] == 8
        for row in rows
    )
    assert rows[-1]["sft/tasks/entropy"] < rows[0]["sft/tasks/entropy"]

    assert 0 < kept["step"] < summary["steps"] < summary["planned_steps"] == 24
    assert kept["gap"] == measured[kept["step"]] > measured[summary["steps"]]
    assert summary["best"] == {"step": kept["step"], "value": kept["gap"]}
    assert "no larger gap than" in summary["stopped_early"]
    assert summary["eval"]["after"] is not None

    assert whole.checkpoint.name == f"step-{kept['step']:06d}"
    assert manifest.read(whole.checkpoint).value == kept["gap"]
    assert whole.checkpoint_path("last").name == f"step-{summary['steps']:06d}"
    passed_on = SFT.made(Job("show", whole.dir, None, take="last"))
    assert passed_on.outputs["checkpoint"] == whole.checkpoint
    assert passed_on.numbers["kept_step"] == kept["step"]
    assert f"kept step {kept['step']}, where pass@8 is" in run_words(whole.dir)
    assert whole.audit().violations == []


@pytest.mark.slow
def test_a_run_that_stops_within_a_measurement_goes_on_with_what_was_measured(
    whole, tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    config = small_config(tmp_path / "cut", *GAP)
    last = whole.summary["steps"]
    with pytest.raises(KeyboardInterrupt):
        sft(config, view=quiet_view(phase=("evaluating", f"training tasks, step {last}")))

    sft(config, resume=True, view=quiet_view())
    assert_same(outcome_of(whole.dir), outcome_of(tmp_path / "cut"))
