"""A run that the real code has made, once for all tests here, and the dashboard over it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import shown_attempts
from dashboard_visitor import Visitor, chromium, dashboard

from agentevo.runs.folder.sources import Sources
from agentevo.runtime.event_loop import in_thread
from agentevo_ui.access import Access
from agentevo_ui.app import make_app

TOKEN = "the-token-of-the-tests"


@pytest.fixture(scope="session")
def runs_folder(
    tmp_path_factory: pytest.TempPathFactory,
    small_config: Callable[..., Any],
    quiet_view: Callable[..., Any],
) -> Path:
    """`lake`, a finished run of two steps. Whoever changes something works on a copy."""
    from agentevo.runs.orchestration.run import train

    folder = tmp_path_factory.mktemp("shown")
    config = small_config(
        folder / "lake",
        "run.name=lake",
        "trainer.steps=2",
        "trainer.schedule=constant",
        "environment.size=4",
        "environment.max_actions=6",
        "agent.max_turns=6",
        "evaluation.tasks=3",
        "cold_start.episodes=8",
    )
    train(config, view=quiet_view())

    return folder


@pytest.fixture(autouse=True)
def index_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the dashboards of a test keep their indexes."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("AGENTEVO_CACHE", str(folder))
    return folder


@contextlib.asynccontextmanager
async def browsing(*words: str | Path, signed_in: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the dashboard over these folders and stores, without a socket."""
    app, shared = make_app(Sources([str(word) for word in words]), Access(token=TOKEN))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
        try:
            if signed_in:
                answer = await client.get("/", params={"token": TOKEN})
                assert answer.status_code == 303
            yield client
        finally:
            await shared.players.close()
            await shared.watcher.close()
            await shared.stores.close()
            await in_thread(shared.indexes.close)


@pytest.fixture(scope="session")
def browse() -> Callable[..., Any]:
    """`browsing`, for several requests."""
    return browsing


@pytest.fixture(scope="session")
def get() -> Callable[..., httpx.Response]:
    """`get(path, folder, ...)`: the answer to one request of somebody who has the cookie."""

    def ask(path: str, *words: str | Path, **settings: Any) -> httpx.Response:
        async def asked() -> httpx.Response:
            async with browsing(*words) as client:
                return await client.get(path, **settings)

        return asyncio.run(asked())

    return ask


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium, shared by the tests of a module; they are skipped where there is none.

    Not by more than a module: until Playwright is stopped its event loop counts as running in this
    thread, and whatever calls `asyncio.run` there fails."""
    with chromium() as one:
        yield one


@pytest.fixture(scope="session")
def shown_url(runs_folder: Path) -> Iterator[str]:
    """A dashboard over `runs_folder`, for tests that change nothing there."""
    with dashboard(runs_folder) as url:
        yield url


@pytest.fixture(scope="session")
def busy_folder(runs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`lake` once more, with a third step of 120 attempts that differ in all that can be filtered
    (`shown_attempts`)."""
    folder = tmp_path_factory.mktemp("busy")
    shutil.copytree(runs_folder / "lake", folder / "lake")
    shown_attempts.add_many(shown_attempts.store_of(folder / "lake"))
    return folder


@pytest.fixture(scope="session")
def busy_url(busy_folder: Path) -> Iterator[str]:
    """A dashboard over `busy_folder`, for tests that change nothing there."""
    with dashboard(busy_folder) as url:
        yield url


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visitor]]:
    """`visit(url, width=1280, color_scheme="light")`: a visitor of that dashboard."""
    visitors: list[Visitor] = []

    def make(
        url: str, *, width: int = 1280, color_scheme: str = "light", **settings: Any
    ) -> Visitor:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=color_scheme, **settings
        )
        visitors.append(Visitor(context.new_page(), url))
        return visitors[-1]

    yield make
    for one in visitors:
        one.page.context.close()

    assert [text for visitor in visitors for text in visitor.wrong] == []
