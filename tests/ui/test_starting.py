"""Starting a run from the dashboard: only what the command would take, only below a shown folder,
once, and in a process that outlives the dashboard."""

from __future__ import annotations

import asyncio
import html
import os
import re
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml
from dashboard_control import ORIGIN, changing, form_token
from run_fixtures import SMALL

from agentevo.errors import ConfigError
from agentevo.ui import starting
from agentevo.ui.starting import Wanted, read_start, start, started, wanted_from

WHO = {"who": "me", "address": "here"}


def wanted(folder: Path, recipe: str = "coins", overrides: str = "", name: str = "new") -> Wanted:
    return wanted_from([folder], "train", recipe, overrides, name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../out",
        "a/../../out",
        "/tmp/x",
        "-x",
        "a b",
        ".hidden",
        "a\n",
        "there",
        "out/x",
    ],
)
def test_a_run_begins_in_a_new_folder_below_a_shown_one(name: str, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    (shown / "there").mkdir(parents=True)
    (shown / "out").symlink_to(tmp_path)
    with pytest.raises(ConfigError):
        wanted(shown, name=name)
    assert wanted(shown, name="a/b-1.x").run_dir == str(shown / "a" / "b-1.x")


@pytest.mark.parametrize(
    "recipe", ["", "no_such", "../secret.yaml", "link.yaml", "/etc/passwd", "x\0.yaml", "--help"]
)
def test_a_recipe_ships_or_lies_below_a_shown_folder(recipe: str, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    (tmp_path / "secret.yaml").write_text("a: 1")
    (shown / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    (shown / "mine.yaml").write_text("a: 1")

    with pytest.raises(ConfigError):
        wanted(shown, recipe=recipe)

    assert wanted(shown, recipe="mine.yaml").recipe == str(shown / "mine.yaml")


@pytest.mark.parametrize(
    "overrides", ["--resume", "run.dir=/tmp/x", "run.overwrite=true", "x", "; rm", "a=1\n--help"]
)
def test_an_override_is_no_option_and_chooses_no_folder(overrides: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        wanted(tmp_path, overrides=overrides)
    assert wanted(tmp_path, overrides=" a.b=1 \n\n c=2").overrides == ["a.b=1", "c=2"]


def test_no_run_begins_within_a_run_or_where_no_folder_is_shown(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {}")
    for folders in ([], [tmp_path]):
        with pytest.raises(ConfigError, match="below a folder"):
            wanted_from(folders, "train", "coins", "", "new")

    (tmp_path / "shown" / "run").mkdir(parents=True)
    (tmp_path / "config.yaml").rename(tmp_path / "shown" / "run" / "config.yaml")
    for name in ("run/new", "run/checkpoints/new"):
        with pytest.raises(ConfigError, match="holds no other"):
            wanted(tmp_path / "shown", name=name)


def test_what_is_shown_of_a_start_is_no_link_and_no_pipe(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    id = "0" * 32
    outside.mkdir()
    (outside / "log.txt").write_text("secret")
    (outside / "start.json").write_text("{}")

    root = tmp_path / "shown"
    place = root / starting.STARTED / id
    place.mkdir(parents=True)
    (place / "log.txt").symlink_to(outside / "log.txt")
    os.mkfifo(place / "start.json")
    assert starting.log_of(root, id) == "" and read_start(root, id) is None

    (root / starting.STARTED / ("1" * 32)).symlink_to(outside)
    assert starting.log_of(root, "1" * 32) == ""

    (place / "log.txt").unlink()
    (place / "log.txt").write_text("its own")
    assert starting.log_of(root, id) == "its own"


def test_what_goes_on_counts_and_an_id_starts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is a sleep in place of agentevo."""
    monkeypatch.setattr(Wanted, "words", lambda self: ["-", self.run_dir], raising=True)
    sleep = tmp_path / "python"
    sleep.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import time; time.sleep(60)' \"$@\"\n")
    sleep.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleep))
    monkeypatch.setattr(starting, "MAX_RUNNING", 2)
    ids = [f"{number:032x}" for number in range(3)]
    try:
        for number, id in enumerate(ids[:2]):
            one = wanted(tmp_path, name=f"new-{number}")
            assert start(tmp_path, one, id=id, **WHO) == id

        ends = time.monotonic() + 300.0
        while not all(starting.is_alive(one) for one in started(tmp_path)):
            assert time.monotonic() < ends
            time.sleep(0.02)
        # Neither Ctrl-C in the dashboard's terminal nor the end of that terminal reaches them.
        assert all(os.getsid(one.process) == one.process for one in started(tmp_path))

        with pytest.raises(ConfigError, match="wait for one"):
            start(tmp_path, wanted(tmp_path, name="new-2"), id=ids[2], **WHO)

        monkeypatch.setattr(starting, "MAX_RUNNING", 3)
        first = read_start(tmp_path, ids[0])
        start(tmp_path, wanted(tmp_path, name="new-0"), id=ids[0], **WHO)
        assert read_start(tmp_path, ids[0]) == first
    finally:
        for one in started(tmp_path):
            os.kill(one.process, signal.SIGKILL)

    while any(one.code is None for one in started(tmp_path)):
        time.sleep(0.02)

    assert [one.code for one in started(tmp_path)] == [-9, -9]
    assert read_start(tmp_path, "../../etc") is None


@pytest.mark.slow
def test_a_recipe_is_checked_started_and_shown(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    sent = {"command": "train", "recipe": "coins", "file": "small.yaml", "name": "new"}
    few = "trainer.steps=1\ncold_start.episodes=8\nevaluation.every=0\ncheckpoint.every=0"

    async def pressed() -> tuple[httpx.Response, str, str]:
        async with changing(tmp_path) as client:
            given = sent | {"form": await form_token(client)}
            wrong = await client.post(
                "/start", data=given | {"overrides": "trainer.stepz=1"}, headers=ORIGIN
            )
            first = await client.post("/start", data=given | {"overrides": few}, headers=ORIGIN)
            assert first.status_code == 200, first.text
            assert not (tmp_path / starting.STARTED).exists()

            fields = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', first.text)
            sure = {name: html.unescape(text) for name, text in fields}
            done = await client.post("/start", data=sure, headers=ORIGIN)
            again = await client.post("/start", data=sure, headers=ORIGIN)
            assert (done.status_code, again.status_code) == (303, 303)

            place = done.headers["location"]
            assert again.headers["location"] == place
            async with asyncio.timeout(300.0):
                while "exit code" not in (page := (await client.get(place)).text):
                    await asyncio.sleep(0.2)

            return wrong, page, place

    wrong, page, place = asyncio.run(pressed())
    assert wrong.status_code == 422
    assert "stepz" in wrong.text
    assert "did you mean" in wrong.text or "no such" in wrong.text or "unknown" in wrong.text
    assert "exit code 0" in page, page
    assert "held-out evaluation" in page
    assert (tmp_path / "new" / "summary.json").is_file()

    one = read_start(tmp_path, place.rpartition("/")[2])
    assert one is not None
    assert one.who.startswith("control token ")
    assert (one.code, len(started(tmp_path))) == (0, 1)


def test_who_may_only_look_starts_nothing_and_reads_no_log(runs_folder: Path) -> None:
    async def asked() -> list[int]:
        async with changing(runs_folder, control=False) as client:
            await client.get("/", params={"token": "the-token-of-the-tests"})
            return [
                (await client.post("/start", data={"name": "x"}, headers=ORIGIN)).status_code,
                (await client.get("/start")).status_code,
                (await client.get(f"/start/{'0' * 32}")).status_code,
            ]

    assert asyncio.run(asked()) == [405, 200, 404]
