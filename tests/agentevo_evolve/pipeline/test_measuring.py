"""The stage that measures: when it has come to its end, and how it is tried again."""

from __future__ import annotations

import json

import pytest

from agentevo_evolve.pipeline.kinds import Job
from agentevo_evolve.pipeline.stages import EVALUATE, EvaluateOptions


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
