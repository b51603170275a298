"""The page of a pipeline: found in the list, its stages with what they gained, and damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from agentevo.pipeline.state import PipelineState, StageState, write_state

Get = Callable[..., httpx.Response]
HOSTILE = "<script>alert(1)</script>\x1b[31m"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    numbers = {"success": 0.5, "success_low": 0.4, "success_high": 0.6}
    gained = numbers | {"gain": 0.25, "gain_low": 0.1, "gain_high": 0.4}
    stages = {
        "start@held_out": StageState(kind="evaluate", status="finished", numbers=numbers),
        "rl": StageState(kind="train", status="finished", wall_s=3.0),
        "rl@held_out": StageState(kind="evaluate", status="finished", numbers=gained),
        "last": StageState(kind="sft", status="failed", why=HOSTILE),
    }
    found = tmp_path / "all" / "r1"
    (found / "stages" / "rl").mkdir(parents=True)
    (found / "stages" / "rl" / "config.yaml").write_text("run: {name: rl}\n")
    write_state(found, PipelineState(name="r1", seed=7, status="failed", stages=stages))
    return found


def test_a_pipeline_is_listed_and_shows_its_stages_and_their_gains(folder: Path, get: Get):
    assert "/pipelines/r1" in get("/", folder.parent).text
    page = get("/pipelines/r1", folder.parent).text
    assert "+25 points [10, 40]" in page
    assert 'href="/runs/r1~stages~rl"' in page
    assert "alert(1)" in page
    assert "<script>alert" not in page
    (folder / "pipeline.json").write_text("{")
    assert get("/pipelines/r1", folder.parent).status_code == 503
    assert get("/pipelines/none", folder.parent).status_code == 404
