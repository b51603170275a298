"""Limits that hold however many ask at once, and confirmations that count one time."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import threading
from collections.abc import Iterator
from os import kill
from pathlib import Path
from typing import Any

import httpx
import pytest
from dashboard_control import CONTROL, ORIGIN, TOKEN, changing, form_token

from agentevo.errors import ConfigError
from agentevo.ui import live, starting
from agentevo.ui.access import Access
from agentevo.ui.app import make_app
from agentevo.ui.confirmations import MOST, Confirmations
from agentevo.ui.sources import Sources
from agentevo.ui.starting import Wanted, start, started, wanted_from

CONFIG = "run:\n  dir: {folder}/new\n  overwrite: false\n"


@pytest.fixture
def sleeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to start below; the command is a sleep in place of agentevo."""
    sleep = tmp_path / "python"
    sleep.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import time; time.sleep(60)' \"$@\"\n")
    sleep.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleep))
    shown = tmp_path / "shown"
    shown.mkdir()
    yield shown

    for one in started(shown):
        kill(one.process, signal.SIGKILL)

    for thread in threading.enumerate():
        if thread.name.startswith("started "):
            thread.join(300.0)


def test_starts_at_once_keep_the_limit(sleeping: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "MAX_RUNNING", 2)
    monkeypatch.setattr(starting, "BUSY_S", 60.0)
    barrier = threading.Barrier(8)
    said = list[str]()

    def begin(number: int) -> None:
        one = wanted_from([sleeping], "train", "coins", "", f"new-{number}")
        barrier.wait(300.0)
        try:
            said.append(start(sleeping, one, id=f"{number:032x}", who="me", address="here"))
        except ConfigError as error:
            said.append(str(error))

    threads = [threading.Thread(target=begin, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300.0)

    assert sum("wait for one" in one for one in said) == 6
    assert len(started(sleeping)) == 2

    # What was refused leaves nothing that would let its form pass for one that was sent twice.
    assert len(list((sleeping / starting.STARTED).iterdir())) == 2 + 1


def test_a_start_never_overwrites_whatever_its_files_say_by_then(tmp_path: Path) -> None:
    one = wanted_from([tmp_path], "train", "coins", "trainer.steps=2", "new")
    assert one.words()[-2:] == ["run.overwrite=false", f"run.dir={tmp_path}/new"]
    (tmp_path / "new").mkdir()
    with pytest.raises(ConfigError, match="there by now"):
        start(tmp_path, one, id="0" * 32, who="me", address="here")
    assert started(tmp_path) == []


@pytest.mark.parametrize("is_changed", [False, True])
def test_what_was_confirmed_is_checked_again_and_starts_once(
    is_changed: bool, sleeping: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of the command is given here: what it is made of has changed, or not."""
    said = [CONFIG.format(folder=sleeping)] * 10
    if is_changed:
        said[1:] = [said[0] + "trainer: {steps: 9}\n"] * 9

    asked: list[Wanted] = []

    def check(one: Wanted) -> str:
        asked.append(one)
        return said[len(asked) - 1]

    monkeypatch.setattr(starting, "check", check)

    async def pressed() -> list[httpx.Response]:
        async with changing(sleeping) as client:
            given = {"command": "train", "recipe": "coins", "name": "new", "config": "x"}
            given["form"] = await form_token(client)
            first = await client.post("/start", data=given, headers=ORIGIN)
            assert "<code>agentevo train coins run.overwrite=false" in first.text

            sure = dict(re.findall(r'name="(\w+)" value="([^"]*)">', first.text))
            assert sure["config"] == starting.digest(said[0])
            twice = [client.post("/start", data=sure, headers=ORIGIN) for _ in range(2)]
            return [*await asyncio.gather(*twice), await client.post("/start", data=sure)]

    *answers, from_elsewhere = asyncio.run(pressed())
    assert from_elsewhere.status_code == 403
    assert len(asked) == 2

    if is_changed:
        assert [one.status_code for one in answers] == [422, 422]
        assert "another one by now" in answers[0].text
    else:
        assert [one.status_code for one in answers] == [303, 303]

    assert len(started(sleeping)) == (0 if is_changed else 1)


def test_who_may_only_look_sees_nothing_of_what_was_started(sleeping: Path) -> None:
    one = wanted_from([sleeping], "train", "coins", "model.name=secret", "new")
    start(sleeping, one, id="0" * 32, who="me", address="here")

    async def looked(**token: str) -> str:
        async with changing(sleeping) as client:
            await client.get("/", params=token)
            answer = await client.get("/start")
            return str(answer.text) if answer.status_code == 200 else ""

    assert "secret" not in (page := asyncio.run(looked(token=TOKEN))) and page

    shown = asyncio.run(looked(control=CONTROL))
    assert "model.name=secret" in shown
    assert f">{sleeping}/new<" not in shown and ">new</a>" in shown


def test_streams_are_counted_as_they_are_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_STREAMS", 5)
    known = Access(token=TOKEN)

    async def statuses() -> list[int]:
        app, shared = make_app(Sources([str(tmp_path)]), known)
        found: list[int] = []
        over = asyncio.Event()

        async def ask() -> None:
            async def receive() -> dict[str, Any]:
                await over.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    found.append(message["status"])
                await asyncio.sleep(0.0)

            cookie = f"{known.cookie}={known._pass}".encode()
            headers = [(b"host", b"127.0.0.1:1"), (b"cookie", cookie)]
            scope = {"type": "http", "method": "GET", "path": "/live", "raw_path": b"/live"}
            more = {"query_string": b"", "headers": headers, "root_path": "", "scheme": "http"}
            await app({**scope, **more}, receive, send)

        async with asyncio.timeout(300.0):
            asking = [asyncio.ensure_future(ask()) for _ in range(40)]
            while len(found) < 40:
                await asyncio.sleep(0.01)
            over.set()
            await asyncio.gather(*asking)

        assert shared.watcher.num_streams == 0

        await shared.watcher.close()
        await shared.stores.close()
        return found

    assert sorted(asyncio.run(statuses())) == [200] * 5 + [503] * 35


def test_the_oldest_confirmations_are_forgotten_and_asked_again() -> None:
    async def used() -> tuple[list[str], Confirmations]:
        known = Confirmations()
        done = list[str]()

        async def work() -> str:
            done.append("x")
            await asyncio.sleep(0.0)
            return "/"

        known.remember_seal("first")
        first = asyncio.ensure_future(known.once("first", work))
        await asyncio.sleep(0.0)
        first.cancel()  # that visitor is gone; the work goes on
        assert await known.once("first", work) == "/"

        for number in range(MOST):
            known.remember_seal(str(number))

        return done, known

    done, known = asyncio.run(used())
    assert done == ["x"]
    assert not known.is_asked("first") and known.is_asked(str(MOST - 1))
