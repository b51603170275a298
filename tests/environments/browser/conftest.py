"""A site on this machine, and environments on its pages in one Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser_site import DEADLINE_S, Site, require_chromium, serving

from agentevo.environments.browser import BrowserConfig, BrowserEnvironment, close_browsers


@pytest.fixture(scope="module")
def chromium() -> Iterator[str]:
    """The program; skips without it. Its processes end with the module."""
    path = require_chromium()
    try:
        yield path
    finally:
        close_browsers()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving() as server:
        yield server


Open = Callable[..., BrowserEnvironment]


@pytest.fixture
def open_page(chromium: str, site: Site) -> Iterator[Open]:
    """`open_page(html, ...)`: an environment on this page, after its reset."""
    made: list[BrowserEnvironment] = []

    def open_one(html: str, *, seed: int = 1, reset: bool = True, **options: Any) -> Any:
        known = [path for path, page in site.pages.items() if page == html]
        path = known[0] if known else f"/page{len(site.pages)}"
        site.pages[path] = html
        options = {"viewport": (400, 300), "deadline_s": DEADLINE_S, **options}
        environment = BrowserEnvironment(BrowserConfig(url=site.url + path, **options))
        made.append(environment)
        if reset:
            environment.reset(seed=seed)
        return environment

    yield open_one
    for environment in made:
        environment.close()
