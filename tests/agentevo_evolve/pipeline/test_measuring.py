"""The stage that measures: when it has come to its end, and how it is tried again. What the table
says about a stage that could not teach anything."""

from __future__ import annotations

import json

import pytest

from agentevo.observability.finding_monitor import TITLES
from agentevo_evolve.pipeline.kinds import Job
from agentevo_evolve.pipeline.results import markdown, stage_rows
from agentevo_evolve.pipeline.stages import EVALUATE, SAMPLE, TRAIN, EvaluateOptions
from agentevo_evolve.pipeline.state import PipelineState, StageState


@pytest.mark.parametrize(
    ("failed", "again"), [(4, ["--resume", "--retry-failed"]), (3, ["--resume"])]
)
def test_an_evaluation_of_which_every_attempt_failed_is_played_again(tmp_path, failed, again):
    options = EvaluateOptions()
    job = Job(id="e", folder=tmp_path, recipe=tmp_path / "r.yaml", options=options, resume=True)
    assert not EVALUATE.is_finished(job) and EVALUATE.words(job)[-1:] == ["--resume"]

    (tmp_path / "summary.json").write_text(
        json.dumps({"models": [{"attempts": 4, "failed": failed}]})
    )
    assert EVALUATE.is_finished(job) is (failed < 4)
    assert [word for word in EVALUATE.words(job) if word.startswith("--re")] == again

    (tmp_path / "summary.json").write_text("[]")
    assert EVALUATE.is_finished(job), "what it came to is damaged, and `made` says so"


@pytest.mark.parametrize(
    ("trained", "metric", "remark"),
    [
        (0, {"agent/num_tool_calls": 0.0}, "trained on no token, no call was made"),
        (9, {"agent/num_tool_calls": 0.0, "agent/num_unknown_tools": 0.5}, ""),
        (9, {"agent/num_tool_calls": 0.0}, "no call was made"),
        (0, {}, "trained on no token"),
        (9, {}, ""),
    ],
)
def test_a_run_that_could_not_teach_anything_says_so(tmp_path, trained, metric, remark):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **metric}) + "\n")
    summary = {"tokens": {"trained": trained}}
    assert TRAIN._remark(tmp_path, summary) == remark
    assert "token" not in SAMPLE._remark(tmp_path, {"tokens": {"trained": 0}})

    spans = [
        {"code": "all_failed", "begin": 3, "end": 9},
        {"code": "learnt_by_heart", "begin": 13, "end": None},
    ]
    with_findings = TRAIN._remark(tmp_path, {**summary, "findings": spans})
    assert with_findings == ", ".join(filter(None, [remark, TITLES["learnt_by_heart"]]))


def test_the_table_says_that_a_stage_could_not_teach_anything():
    stage = StageState(kind="train", status="finished", why="trained on no token")
    rows = stage_rows([PipelineState(name="p", seed=0, stages={"rl": stage})])
    assert "| rl (trained on no token) | train |" in markdown(rows, [])
