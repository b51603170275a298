"""One page for all who look: made once, never of another's role, and as new as what is known."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from dashboard_control import CONTROL, TOKEN

from agentevo.runs.folder.sources import Sources
from agentevo.runtime.event_loop import in_thread
from agentevo_ui import server, shared_answers
from agentevo_ui.access import Access
from agentevo_ui.app import make_app

PART = {"hx-request": "true"}


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    folder = tmp_path / "lake"
    folder.mkdir()
    (folder / "config.yaml").write_text("# agentevo train\nrun: {name: lake}\n")
    add_step(folder, 1)
    return tmp_path


def add_step(folder: Path, step: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": 1.0 * step, "actor/entropy": 1.0}) + "\n")


@asynccontextmanager
async def visitors(folder: Path, number: int) -> AsyncIterator[tuple[Any, list[Any], Any]]:
    """The memory, that many clients who may look, and one who may change something."""
    guard, shared = make_app(Sources([str(folder)]), Access(token=TOKEN, control=CONTROL))
    made = [
        httpx.AsyncClient(transport=httpx.ASGITransport(app=guard), base_url="http://127.0.0.1:1")
        for _ in range(number + 1)
    ]
    try:
        for client in made[:-1]:
            await client.get("/", params={"token": TOKEN})
        await made[-1].get("/", params={"control": CONTROL})
        yield guard._app, made[:-1], made[-1]
    finally:
        for client in made:
            await client.aclose()
        await shared.watcher.close()
        await shared.stores.close()
        await in_thread(shared.indexes.close)


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is kept on a slow machine, too."""
    monkeypatch.setattr(shared_answers, "KEPT_S", 60.0)


def test_a_page_is_made_once_for_all_who_look(lake: Path, long: None) -> None:
    async def scenario() -> None:
        async with visitors(lake, 30) as (memory, viewers, _):
            await viewers[0].get("/runs/lake")  # now the run is read
            first = await viewers[0].get("/runs/lake", headers=PART)
            made = memory.num_made
            answers = await asyncio.gather(
                *(viewer.get("/runs/lake", headers=PART) for viewer in viewers)
            )
            assert {answer.content for answer in answers} == {first.content}
            assert memory.num_made == made
            assert answers[0].headers["content-encoding"] == "gzip"

            plain = await viewers[0].get(
                "/runs/lake", headers=PART | {"accept-encoding": "identity"}
            )
            assert "content-encoding" not in plain.headers
            assert plain.content == first.content
            assert "Accept-Encoding" in plain.headers["vary"]

    asyncio.run(scenario())


def test_a_large_page_is_not_kept(lake: Path, long: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_answers, "MAX_BYTES", 100)

    async def scenario() -> None:
        async with visitors(lake, 1) as (memory, (viewer,), _):
            first = await viewer.get("/runs/lake")
            made = memory.num_made
            again = await viewer.get("/runs/lake")
            assert (first.status_code, again.status_code) == (200, 200)
            assert memory.num_made == made + 1

    asyncio.run(scenario())


def test_a_committed_step_is_in_the_next_answer_after_its_news(lake: Path, long: None) -> None:
    async def scenario() -> None:
        async with visitors(lake, 1) as (memory, (viewer,), _):
            for path in ("/runs/lake", "/runs/lake", "/", "/"):
                await viewer.get(path)
            assert "step <b>1</b>" in (await viewer.get("/runs/lake")).text

            listed = (await viewer.get("/")).text
            add_step(lake / "lake", 2)
            async with asyncio.timeout(300):  # as the stream of any viewer reads it
                while (await memory._watcher.view("lake")).step < 2:
                    await asyncio.sleep(0.05)

            assert "step <b>2</b>" in (await viewer.get("/runs/lake")).text
            assert (await viewer.get("/")).text != listed

    asyncio.run(scenario())


@pytest.mark.slow
def test_no_role_gets_the_page_of_another_in_any_order(
    lake: Path, long: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if pages with forms were shared: that of *Try it* has one, as there is a checkpoint."""
    (lake / "lake" / "checkpoints" / "step-000001").mkdir(parents=True)
    (lake / "lake" / "checkpoints" / "step-000001" / "checkpoint.json").write_text("{}")
    monkeypatch.setattr(shared_answers, "PATHS", re.compile(r"(?!/live)/.*?(?P<run>lake)?.*"))
    token = Access(token=TOKEN, control=CONTROL)._form_token
    paths = ("/", "/runs/lake", "/runs/lake/metrics", "/runs/lake/try", "/runs/lake/control")

    async def scenario() -> None:
        async with visitors(lake, 4) as (memory, viewers, controller):
            for path in paths * 2:
                everyone = [viewers[0], controller, *viewers[1:], controller]
                made = memory.num_made
                answers = await asyncio.gather(*(one.get(path) for one in everyone))
                shown = [answer.text for answer in answers]
                assert memory.num_made - made <= 2
                assert shown[1] == shown[-1]
                assert not any(token in shown[place] for place in (0, 2, 3, 4))
                assert (token in shown[1]) == (path == "/runs/lake/try")

            transport = httpx.ASGITransport(app=viewers[0]._transport.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1:1"
            ) as nobody:
                for path in paths:
                    assert (await nobody.get(path)).status_code == 401

    asyncio.run(scenario())


def test_what_a_viewer_sends_is_in_no_page_of_others(lake: Path, long: None) -> None:
    """Headers and cookies of one who asks first can't poison what the others get."""
    evil = {
        "cookie": "agentevo-theme=dark; evil=<evil>",
        "x-forwarded-host": "evil.example",
        "x-forwarded-prefix": "/evil",
        "referer": "http://evil.example/",
        "accept-language": "evil",
        "user-agent": "evil",
        "hx-request": "evil",
        "hx-target": "evil",
    }

    async def scenario() -> None:
        async with visitors(lake, 2) as (memory, (first, second), _):
            cookies = "; ".join(f"{one.name}={one.value}" for one in first.cookies.jar)
            poisoned = await first.get(
                "/runs/lake", headers=evil | {"cookie": f"{cookies}; {evil['cookie']}"}
            )
            fine = await second.get("/runs/lake")
            assert "evil" not in poisoned.text + fine.text
            assert 'data-theme="dark"' in poisoned.text
            assert 'data-theme="dark"' not in fine.text

            part = await second.get("/runs/lake/work", headers=PART)
            assert part.status_code == 200
            assert (await first.get("/runs/lake/work")).status_code == 404

            made = memory.num_made
            assert (await first.get("/runs/none")).status_code == 404
            assert (await second.get("/runs/none")).status_code == 404
            assert memory.num_made == made + 2  # what failed is not kept

    asyncio.run(scenario())


def test_who_leaves_takes_nothing_from_those_who_wait(
    lake: Path, long: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with visitors(lake, 2) as (memory, (first, second), _):
            app = memory.app
            go = asyncio.Event()

            async def slow(scope: Any, receive: Any, send: Any) -> None:
                await go.wait()
                await app(scope, receive, send)

            memory.app = slow
            leaving = asyncio.ensure_future(first.get("/runs/lake"))
            staying = asyncio.ensure_future(second.get("/runs/lake"))

            while not memory.num_made:
                await asyncio.sleep(0)

            await asyncio.sleep(0.01)
            leaving.cancel()
            go.set()

            assert (await staying).status_code == 200
            assert memory.num_made == 1

    asyncio.run(scenario())


@pytest.mark.slow
def test_what_is_kept_is_bounded(lake: Path, long: None) -> None:
    async def scenario() -> None:
        async with visitors(lake, 1) as (memory, (viewer,), _):
            for number in range(shared_answers.MAX_ANSWERS + 10):
                await viewer.get("/runs/lake", params={"a": number})
            assert len(memory._answers) <= shared_answers.MAX_ANSWERS
            await viewer.get("/runs/lake", params={"a": "x" * (shared_answers.MAX_QUERY_BYTES + 1)})
            assert all(len(key.query) <= shared_answers.MAX_QUERY_BYTES for key in memory._answers)

    asyncio.run(scenario())


def test_the_dashboard_lowers_its_own_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = list[int]()
    monkeypatch.setattr(os, "nice", lowered.append)
    monkeypatch.setattr(server, "run_coroutine", lambda serving: serving.close())
    for nice in (7, 0):
        server.serve_dashboard([str(tmp_path)], nice=nice)

    assert lowered == [7]


@pytest.mark.slow
def test_the_priority_falls_once_the_first_pages_have_nothing_to_load(tmp_path: Path) -> None:
    """At a load of 9 the first page of an attempt took longer than its 20 s."""
    program = """
import os, sys
import jinja2
from agentevo.observability.pages.rendering import environment
from agentevo_ui import server

def lower(steps):
    print("agentevo.store.sqlite" in sys.modules)
    jinja2.Environment.compile = None
    for name in environment().list_templates(extensions=["html"]):
        environment().get_template(name)
    print("compiled")

os.nice = lower
server.run_coroutine = lambda serving: serving.close()
server.serve_dashboard([sys.argv[1]])
"""
    said = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert said.stdout.split() == ["True", "compiled"]


@pytest.mark.slow
def test_the_dashboards_modules_import_no_torch() -> None:
    program = (
        "import sys, agentevo_ui.server\n"
        "print([one for one in ('torch', 'transformers') if one in sys.modules])"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300
    )
    assert said.stdout.strip() == "[]"
