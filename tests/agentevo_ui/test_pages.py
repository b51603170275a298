"""Every page of the dashboard answers, over runs as they are and as they should not be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

Get = Callable[..., httpx.Response]
pytestmark = pytest.mark.slow  # a whole run is made for them, once


def test_the_list_shows_the_run_and_what_it_reached(runs_folder: Path, get: Get) -> None:
    answer = get("/", runs_folder)
    assert answer.status_code == 200
    assert 'href="/runs/lake"' in answer.text
    assert "finished" in answer.text
    assert "frozen_lake" in answer.text


@pytest.mark.parametrize("page", ["", "/metrics", "/evaluation", "/data", "/processes", "/config"])
def test_every_page_of_a_run_answers(page: str, runs_folder: Path, get: Get) -> None:
    answer = get(f"/runs/lake{page}", runs_folder)
    assert answer.status_code == 200
    assert "<h1>lake</h1>" in answer.text


def test_a_run_that_is_not_there_is_a_page_that_says_so(runs_folder: Path, get: Get) -> None:
    answer = get("/runs/nowhere", runs_folder)
    assert answer.status_code == 404
    assert "No such run" in answer.text


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "now.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe{]\n" * 50, b"[1, 2]\n", None])
def test_a_damaged_run_is_a_row_and_never_an_error(
    name: str, content: bytes | None, runs_folder: Path, tmp_path: Path, get: Get
) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(runs_folder / "lake", folder / "lake")
    if content is None:
        (folder / "lake" / name).unlink()
        (folder / "lake" / name).symlink_to("/etc/hostname")
    else:
        (folder / "lake" / name).write_bytes(content)

    assert get("/", folder).status_code == 200
    assert get("/runs/lake", folder).status_code == 200
