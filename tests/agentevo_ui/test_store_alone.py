"""A store without the folder of its run."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentevo.runs.folder.run_state import RunReader, RunView
from agentevo.runs.folder.sources import RunSource, Sources
from agentevo.store import open_store
from agentevo_ui.store_reader import StoreReader
from agentevo_ui.stores import Stores

pytestmark = pytest.mark.slow  # a whole run is made for them, once


async def read(url: str, reader: StoreReader | None = None) -> RunView:
    stores = Stores(Sources([url]))
    reader = reader or StoreReader(RunSource("s", "s", None, url), stores)
    try:
        await reader.read()
        return reader.view
    finally:
        await stores.close()


def test_its_numbers_are_those_of_the_log(runs_folder: Path) -> None:
    url = f"sqlite:///{runs_folder / 'lake' / 'store.sqlite'}"
    found = asyncio.run(read(url))
    reader = RunReader(RunSource("lake", "lake", runs_folder / "lake"))
    reader.read()
    log = reader.view.table
    assert (found.step, found.state, found.problem) == (2, "unknown", "")

    for name in ("critic/score/mean", "timing_s/step", "rollout/in"):
        assert list(found.table.series(name)[1]) == list(log.series(name)[1]) != []

    held_out = "val-core/frozen_lake/success/greedy"
    before, *_, after = log.series(held_out)[1]
    assert list(found.table.series(held_out)[1]) == [before, after]


def test_every_page_answers_and_the_file_stays(
    runs_folder: Path, tmp_path: Path, get: Callable[..., httpx.Response]
) -> None:
    shutil.copy(runs_folder / "lake" / "store.sqlite", tmp_path / "alone.sqlite")
    url = f"sqlite:///{tmp_path / 'alone.sqlite'}"
    headers = {"hx-request": "true"}
    before = hashlib.sha256((tmp_path / "alone.sqlite").read_bytes()).digest()
    assert "alone.sqlite" in get("/", url).text

    page = get("/runs/alone.sqlite", url).text
    assert "step <b>2</b>" in page and "Reward" in page
    assert "critic/score/mean" in get("/runs/alone.sqlite/metrics", url).text
    assert get("/runs/alone.sqlite/attempts", url).status_code == 200
    assert "Dropped" in get("/runs/alone.sqlite/work", url, headers=headers).text
    assert get("/runs/alone.sqlite/config", url).status_code == 404
    assert hashlib.sha256((tmp_path / "alone.sqlite").read_bytes()).digest() == before


def test_new_steps_and_a_run_that_went_back_are_seen(any_store: str) -> None:
    async def work() -> None:
        async def commit(step: int, score: Any) -> None:
            metrics = {"critic/score/mean": score, "words": "no number", "none": None}
            progress = {"warnings": [f"step {step}: look"], "after": "not a mapping"}
            await writer.reserve([], step)
            await writer.commit_step(step, {"metrics": metrics, "progress": progress})

        stores = Stores(Sources([any_store]))
        reader = StoreReader(RunSource("s", "s", None, any_store), stores)

        async def seen() -> tuple[int, list[float], int]:
            reader._rest_until = 0.0
            await reader.read()
            assert reader.view.problem == ""
            values = list(reader.view.table.series("critic/score/mean")[1])
            return reader.view.step, values, len(reader.view.warnings)

        async with await open_store(any_store) as writer:
            assert await seen() == (0, [], 0)

            await commit(1, 0.25)
            await commit(2, 0.5)
            assert await seen() == (2, [0.25, 0.5], 2)

            version = reader.view.version
            assert await seen() == (2, [0.25, 0.5], 2) and reader.view.version == version

            await writer.rewind(1)
            await commit(2, 0.75)
            assert await seen() == (2, [0.25, 0.75], 2) and reader.view.version > version

            await writer.rewind(0)
            assert await seen() == (0, [], 0)

        await stores.close()

    asyncio.run(work())


def test_a_store_that_is_away_is_a_sentence(tmp_path: Path) -> None:
    view = asyncio.run(read(f"sqlite:///{tmp_path / 'none.sqlite'}"))
    assert "no store at" in view.problem and view.version == 1
