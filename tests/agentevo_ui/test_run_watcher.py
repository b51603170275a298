"""The list of runs, and its changes: sources.py and run_watcher.py without a server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentevo.errors import ConfigError
from agentevo.runs.folder import sources
from agentevo.runs.folder.run_state import RunView
from agentevo.runs.folder.sources import Sources
from agentevo_ui import run_watcher
from agentevo_ui.run_watcher import LIST, UnknownRunError, Watcher
from agentevo_ui.stores import Stores


def make_run(folder: Path, step: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("trainer: {steps: 9}\n")
    add_step(folder, step)
    return folder


def add_step(folder: Path, step: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": 1.0 * step}) + "\n")


def watcher_of(folder: Path) -> Watcher:
    shown = Sources([str(folder)])
    return Watcher(shown, Stores(shown))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at disks as often as it is asked to."""
    monkeypatch.setattr(sources, "SCAN_S", 0.0)
    monkeypatch.setattr(run_watcher, "POLL_S", 0.02)
    monkeypatch.setattr(run_watcher, "FRESH_S", 0.0)


def test_runs_are_found_below_and_links_are_not_followed(tmp_path: Path) -> None:
    inside = tmp_path / "runs"
    outside = tmp_path / "elsewhere"
    make_run(inside / "a" / "b")
    make_run(outside / "secret")
    (inside / "link").symlink_to(outside)
    (inside / "a" / "b" / "summary.json").symlink_to(outside / "secret" / "config.yaml")
    found = Sources([str(inside)]).runs()
    assert list(found) == ["a~b"]
    assert found["a~b"].file("config.yaml") == inside / "a" / "b" / "config.yaml"
    assert found["a~b"].file("summary.json") is None
    assert found["a~b"].file("../../../elsewhere/secret/config.yaml") is None


def test_two_folders_of_one_name_have_keys_of_their_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_run(tmp_path / name / "runs" / "lake")
    found = Sources([str(tmp_path / name / "runs") for name in ("one", "two")]).runs()
    assert list(found) == ["runs~lake", "runs~lake-2"]
    assert len({source.folder for source in found.values()}) == 2


def test_a_store_outside_of_what_is_shown_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "a")
    url = f"sqlite:///{tmp_path / 'other.sqlite'}"
    (folder / "config.yaml").write_text(f"store: {{url: '{url}'}}\n")

    shown = Sources([str(tmp_path / "runs")])
    with pytest.raises(ConfigError, match="outside of the folders"):
        shown.store_url(shown.runs()["a"])

    both = Sources([str(tmp_path / "runs"), url])
    source = next(run for run in both.runs().values() if run.folder)
    assert both.store_url(source) == url


def test_news_tell_of_steps_and_of_runs_that_begin_later(tmp_path: Path, quick: None) -> None:
    first = make_run(tmp_path / "first")

    async def work() -> None:
        watcher = watcher_of(tmp_path)
        await watcher.views()
        seen: list[RunView | int] = []

        async def listen() -> None:
            async for new in watcher.news([LIST, "first"]):
                if new is not None:
                    seen.append(new)

        async def until(what: Any) -> None:
            async with asyncio.timeout(300):
                while not any(what(one) for one in seen):
                    await asyncio.sleep(0.01)

        def at(key: str, step: int) -> Any:
            return lambda one: isinstance(one, RunView) and (one.key, one.step) == (key, step)

        task = asyncio.ensure_future(listen())
        await until(at("first", 1))

        known = watcher.version(LIST)
        make_run(tmp_path / "later", 4)
        await until(lambda one: isinstance(one, int) and one > known)
        await until(at("later", 4))
        add_step(tmp_path / "later", 5)
        add_step(first, 2)
        await until(at("later", 5))
        await until(at("first", 2))
        assert watcher._viewers["first"] == 1

        await watcher.close()
        async with asyncio.timeout(300):
            await task

        assert watcher._viewers == {}

    asyncio.run(work())


def test_without_viewers_nothing_is_read(tmp_path: Path, quick: None) -> None:
    make_run(tmp_path / "a")

    async def work() -> None:
        watcher = watcher_of(tmp_path)
        await watcher.view("a")
        stream = watcher.news(["a"])
        assert await anext(stream) is not None

        await stream.aclose()  # type: ignore[attr-defined]
        version = watcher.version("a")
        add_step(tmp_path / "a", 2)
        await asyncio.sleep(0.2)

        assert watcher.version("a") == version
        assert (await watcher.view("a")).step == 2
        with pytest.raises(UnknownRunError):
            await watcher.view("gone")

        await watcher.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:${env:SOME_SECRET}@db.example.org/x",
        "postgresql://db.example.org/x",
        "${env:SOME_URL}",
        "sqlite:///${env:SOME_FOLDER}/x.sqlite",
    ],
)
def test_a_runs_file_does_not_choose_which_server_is_asked(url: str, tmp_path: Path) -> None:
    """It would get any environment variable of ours as the password."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text(json.dumps({"store": {"url": url}}))

    shown = Sources([str(tmp_path)])
    with pytest.raises(ConfigError, match="a database elsewhere"):
        shown.store_url(shown.runs()["a"])

    if "://" in url:
        both = Sources([str(tmp_path), url])
        source = next(run for run in both.runs().values() if run.folder)
        assert both.store_url(source) == url
