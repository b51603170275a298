"""Every address that the application's own OpenAPI page has, with anything in its parameters: a
page or a sentence, never an error of ours, never a file from elsewhere, never long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shown_attempts import HOSTILE, attempt_name

from examples import examples

pytestmark = pytest.mark.slow

SLOWEST_S = 60.0
"""The deadline of any answer (`access.LONGEST_S`)."""
ENDLESS = ("/live",)
HARD = [
    "",
    "0",
    "-1",
    "1",
    "3",
    "9" * 30,
    "1e308",
    "nan",
    "inf",
    "-inf",
    "0x10",
    "\u0661",
    "1_0",
    "lake",
    "~",
    "..",
    "../..",
    "../../etc/passwd",
    "/etc/passwd",
    "%2e%2e%2f",
    "lake~..",
    "*",
    "true",
    "null",
    "[]",
    "{}",
    "' OR 1=1 --",
    '"',
    "a" * 5000,
    "\x00",
    "\ud800",
    "\u202e",
    '"open',
    "a* -b",
    "NEAR(a b)",
    "-",
    "* *",
    "worst",
    "best",
    "committed",
    "tokens",
    "time",
    HOSTILE,
    attempt_name(0),
    attempt_name(7),
]
WORDS = st.one_of(st.sampled_from(HARD), st.text(max_size=60), st.integers().map(str))


class Asking:
    """A client of the application on an event loop of its own: `get` blocks."""

    def __init__(self, browse: Callable[..., Any], folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._stack = AsyncExitStack()
        self.client: httpx.AsyncClient = self._do(self._stack.enter_async_context(browse(folder)))

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=2 * SLOWEST_S)

    def get(self, path: str) -> httpx.Response:
        answer: httpx.Response = self._do(self.client.get(path))
        return answer

    def close(self) -> None:
        self._do(self._stack.aclose())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def asking(
    busy_folder: Path, browse: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Asking]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTEVO_CACHE", str(tmp_path_factory.mktemp("cache")))
        one = Asking(browse, busy_folder)
        try:
            yield one
        finally:
            one.close()


def encoded(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="")


@settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_any_parameters_get_a_page_or_a_sentence(asking: Asking, data: st.DataObject) -> None:
    pages = asking.get("/openapi.json").json()["paths"]
    assert len(pages) > 10
    for path, methods in pages.items():
        if "get" not in methods or path in ENDLESS:
            continue

        query = []
        for parameter in methods["get"].get("parameters", []):
            name = parameter["name"]
            if parameter["in"] == "path":
                word = data.draw(st.just("lake") | WORDS if name == "run" else WORDS)
                path = path.replace(f"{{{name}}}", encoded(word) or "x")
            elif data.draw(st.booleans()) or parameter.get("required"):
                query.append(f"{encoded(name)}={encoded(data.draw(WORDS))}")

        for name in data.draw(st.lists(st.sampled_from(EXTRA), max_size=2)):
            query.append(f"{name}={encoded(data.draw(WORDS))}")

        address = path + ("?" + "&".join(query) if query else "")
        began = time.monotonic()
        answer = asking.get(address)

        assert time.monotonic() - began < SLOWEST_S, address
        # 503: a page that says in a sentence what can't be read; anything else is our fault
        assert answer.status_code < 500 or "can't be shown" in answer.text, address
        assert "root:x:0" not in answer.text, address
        assert "Traceback" not in answer.text, address


EXTRA = ["q", "order", "after", "kind", "reward_from", "tokens_to", "step", "token", "run", "leaf"]
"""Parameters that handlers read beside those of the page."""
