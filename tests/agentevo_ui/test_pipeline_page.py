"""The page of a pipeline: found in the list, its stages with what they gained, and damage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from agentevo.errors import ConfigError
from agentevo_evolve.pipeline.state import PipelineState, StageState, read_state, write_state

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


@pytest.mark.slow
def test_a_pipeline_is_listed_and_shows_its_stages_and_their_gains(folder: Path, get: Get):
    assert "/pipelines/r1" in get("/", folder.parent).text

    page = get("/pipelines/r1", folder.parent).text
    assert "+25 points [10, 40]" in page
    assert 'href="/runs/r1~stages~rl"' in page
    assert "report.html" not in page

    (folder / "report.html").touch()
    assert str(folder / "report.html") in get("/pipelines/r1", folder.parent).text

    stage = get("/runs/r1~stages~rl", folder.parent).text
    assert 'href="/pipelines/r1"' in stage
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert get("/pipelines/none", folder.parent).status_code == 404


def many(number: int) -> str:
    stages = {f"s{n}": {"kind": "train"} for n in range(number)}
    return json.dumps({"name": "r1", "seed": 0, "stages": stages})


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"name": "r1", "seed": 0, "stages": ' + '{"a":' * 100_000,
        '{"name": "r1", "seed": 0, "stages": {"a": {"kind": "x", "tokens": 1' + "0" * 400 + "}}}",
        many(3_000),
    ],
    ids=["torn", "deep", "a number without end", "stages without end"],
)
def test_a_damaged_file_is_told_and_nothing_of_it_is_shown(folder: Path, get: Get, content: str):
    (folder / "pipeline.json").write_text(content)
    answer = get("/pipelines/r1", folder.parent)
    assert answer.status_code == 503 and "can&#39;t be read" in answer.text


def test_numbers_beyond_all_measure_are_shown_somehow(folder: Path, get: Get):
    text = (folder / "pipeline.json").read_text().replace('"gain": 0.25', '"gain": 1e308')
    (folder / "pipeline.json").write_text(text)
    assert "∞ points" in get("/pipelines/r1", folder.parent).text


def test_no_link_is_followed_and_no_pipe_is_waited_for(folder: Path, tmp_path: Path):
    """What took the file's place after the folder was found."""
    path = folder / "pipeline.json"
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")

    with pytest.raises(ConfigError, match="can't be read"):
        read_state(folder)

    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="it is not a regular file"):
        read_state(folder)


def test_two_pipelines_with_the_same_key_are_both_there(folder: Path, get: Get):
    for name, seed in (("a b", 11), ("a_b", 12)):
        (folder.parent / name).mkdir()
        write_state(folder.parent / name, PipelineState(name=name, seed=seed))
    pages = [get(f"/pipelines/{key}", folder.parent).text for key in ("a_b", "a_b-2")]
    assert ["11" in page for page in pages] == [True, False]
    assert ["12" in page for page in pages] == [False, True]
