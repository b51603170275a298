"""Whatever a model, a tool, a task, a metric or a folder is called and says: it is only text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import shown_attempts
import yaml
from dashboard_visitor import Visitor, dashboard
from shown_attempts import CLEAN, STEP
from slow import soak

from agentevo.observability.pages.navigation import TABS

Visit = Callable[..., Visitor]
pytestmark = pytest.mark.slow

FOLDER = "<img src=x onerror='window.executed=1'>\x1b[31m\u202e \"&"
LIMIT = 3_000_000
"""Bytes of a page, whatever it shows."""

SEEN = """document.title + document.body.innerText + [...document.querySelectorAll(
    "[title], [aria-label], [placeholder], input:not([type=hidden])")]
    .map((one) => [one.title, one.ariaLabel, one.placeholder, one.value].join(" ")).join(" ")"""
"""All that a person can see. What a form sends again unseen is as it came."""


def spoil(folder: Path) -> None:
    """Puts hostile texts into every file of a run that the dashboard reads."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    said = CLEAN.replace("\x00", "")  # which no configuration may hold
    config["run"]["name"] = said
    config["environment"]["type"] = config["model"]["name"] = said
    (folder / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True), "utf-8")

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {CLEAN: 1.0, f"rollout/failed/{CLEAN}": 2.0, f"rollout/dropped/{CLEAN}": 1.0}
        row |= {f"timing_s/{CLEAN}": 0.5, f"val-core/{CLEAN}/acc/mean@1": 0.5}

    lines = [json.dumps(row) for row in rows]
    lines.insert(1, '{"step": 1, "</script>": "\\ud800"')
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"name": CLEAN, "environment": CLEAN, "model": CLEAN}
    summary["warnings"] = [f"step 1: {CLEAN}", CLEAN]
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture(scope="module")
def hostile_url(runs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("hostile")
    shutil.copytree(runs_folder / "lake", folder / FOLDER)
    spoil(folder / FOLDER)
    shown_attempts.add_hostile(shown_attempts.store_of(folder / FOLDER))
    with dashboard(folder) as url:
        yield url


def look(visitor: Visitor, path: str) -> Any:
    """Opens a page, lets its scripts work, and checks that it is only text and not too large."""
    answer = visitor.page.goto(visitor.root + path)
    assert answer.status < 500, f"{path}: {visitor.page.inner_text('main')}"
    assert len(answer.body()) < LIMIT, path
    visitor.until("document.readyState === 'complete'")
    visitor.page.wait_for_timeout(150)
    harmless(visitor, path)
    return visitor.page


def harmless(visitor: Visitor, path: str) -> None:
    page = visitor.page
    assert page.evaluate("window.executed === undefined"), path
    assert page.evaluate("document.querySelectorAll('main img, main iframe').length") == 0, path

    scripts = "document.querySelectorAll('script:not([src]):not([type=\"application/json\"])')"
    assert page.evaluate(f"{scripts}.length") == 0, path

    handlers = "document.querySelectorAll('[onerror], [onload], [onclick]').length"
    assert page.evaluate(handlers) == 0, path

    text = page.evaluate(SEEN)
    assert not set(text) & set("\x00\x08\x1b\x7f\x9b\u202e\u2028\ufffe"), path


@pytest.mark.parametrize("which", ["pages", *soak("queries")])
def test_hostile_texts_are_only_text_on_every_page(
    which: str, hostile_url: str, visit: Visit
) -> None:
    visitor = visit(hostile_url)
    page = look(visitor, "/")
    run = page.get_attribute("[data-row] td.name a", "href")
    assert "<script>window.executed = true</script>" in page.inner_text("#runs")

    visitor.whole_index(f"{run}/attempts")
    said, long = (quote(one.id, safe="") for one in shown_attempts.hostile())
    pages = [
        *(f"{run}{tab.path}" for tab in TABS),
        f"{run}/steps/{STEP}",
        f"{run}/attempt?id={said}",
        f"{run}/attempt?id={said}&show=tokens",
        f"{run}/attempts/compare?a={said}&b={long}",
        f"/?{urlencode({'q': CLEAN, 'state': CLEAN, 'sort': CLEAN})}",
        f"/runs/{quote(CLEAN, safe='')}",
    ]
    queries = [
        f"{run}/metrics?{urlencode({'q': CLEAN})}",
        f"{run}/attempts?{urlencode({'q': CLEAN[:400]})}",
        f"{run}/attempts?{urlencode({'kind': CLEAN[:100]})}",
        f"{run}/attempts?{urlencode({'order': CLEAN[:100]})}",
        f"{run}/attempt?id={long}",
        f"/compare?run={quote(run.rpartition('/')[2], safe='~')}&{urlencode({'q': CLEAN})}",
    ]
    for path in pages if which == "pages" else queries:
        look(visitor, path)

    refused = [text for text in visitor.wrong if "404" in text]  # chromium tells of these
    visitor.wrong[:] = [text for text in visitor.wrong if text not in refused]
    assert len(refused) == 1, "a run that is none, or an order"


def test_a_message_of_five_megabytes_comes_a_part_at_a_time(hostile_url: str, visit: Visit) -> None:
    visitor = visit(hostile_url)
    run = visitor.go("/").get_attribute("[data-row] td.name a", "href")
    long = quote(shown_attempts.hostile()[1].id, safe="")
    page = look(visitor, f"{run}/attempt?id={long}")
    before = len(page.inner_text("#stream"))
    assert before < 20_000

    page.locator("button", has_text="Show more").click()
    visitor.until(f"document.getElementById('stream').innerText.length > {before} + 10000")
    harmless(visitor, "more of the message")
    assert page.locator("button", has_text="Show more").count() == 1


def test_tokens_and_keys_do_no_harm_beside_hostile_names(hostile_url: str, visit: Visit) -> None:
    visitor = visit(hostile_url)
    run = visitor.go("/").get_attribute("[data-row] td.name a", "href")
    said = quote(shown_attempts.hostile()[0].id, safe="")
    page = look(visitor, f"{run}/attempt?id={said}&show=tokens")
    page.wait_for_selector("[data-t]")
    page.focus("#stream")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("#token-history[open]")
    page.wait_for_selector("#token-history dl.history")
    harmless(visitor, "a token's history")
    page = look(visitor, f"{run}/metrics")
    page.wait_for_selector("#metrics canvas")
    page.locator("figure.chart .body").first.hover()
    harmless(visitor, "the reading of a chart")
