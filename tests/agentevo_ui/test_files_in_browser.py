"""Pages that are files, in a real browser: nothing is asked for, nothing is out of place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from agentevo.cli.main import main
from agentevo.observability import report_from_run
from agentevo.runs.folder.run_folder import token_texts


@pytest.fixture(scope="module")
def report(runs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run of two steps."""
    folder = tmp_path_factory.mktemp("reported") / "lake"
    shutil.copytree(runs_folder / "lake", folder)
    return report_from_run(folder, token_texts(folder))


def opened(browser: Any, path: Path, **settings: Any) -> tuple[Any, list[str]]:
    """The page of a file, and what it asked for or complained about beyond itself."""
    page = browser.new_context(**settings).new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: wrong.append(asked.url))
    page.goto(path.as_uri())
    wrong.remove(path.as_uri())
    return page, wrong


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_a_report_opens_from_a_file_and_asks_for_nothing(
    browser: Any, report: Path, width: int, scheme: str
) -> None:
    page, wrong = opened(
        browser, report, viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    page.wait_for_selector("figure.chart .uplot")
    assert page.evaluate("document.documentElement.scrollWidth") <= width

    page.locator(".its-tokens > summary").first.click()
    token = page.locator("[data-t]:visible").first
    token.hover()
    assert "id" in page.locator("#token-box").inner_text()

    page.locator("[data-shade=ver]").click()
    assert (token.get_attribute("class") or "").startswith("v")

    before = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    page.locator("[data-do=theme]").click()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != before

    page.context.close()
    assert wrong == []


@pytest.mark.slow
def test_a_report_reads_well_without_scripts(browser: Any, report: Path) -> None:
    page, wrong = opened(browser, report, java_script_enabled=False)
    words = page.locator("figure.chart noscript p").all_inner_texts()
    assert len(words) == page.locator("figure.chart").count() > 3
    assert all(" at step " in text for text in words)
    assert page.locator("[data-do=theme]").is_hidden()
    page.locator(".its-tokens > summary").first.click()
    assert "weights" in (page.locator("[data-t]").first.get_attribute("title") or "")
    page.context.close()
    assert wrong == []


@pytest.mark.slow
def test_pages_of_attempts_lead_to_each_other(browser: Any, report: Path, tmp_path: Path) -> None:
    assert (
        main(["trajectories", "show", str(report.parent), "--html", "--out", str(tmp_path / "out")])
        == 0
    )

    page, wrong = opened(
        browser, tmp_path / "out" / "index.html", viewport={"width": 360, "height": 800}
    )
    page.locator("td.name a").first.click()
    page.wait_for_selector(".attempt .message")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360

    first = page.url
    page.locator("[rel=next]").click()
    page.wait_for_url(lambda url: url != first)
    page.locator("[data-t]:visible").first.hover()
    told = page.locator("#token-box").inner_text()
    assert "weights" in told and "trained" not in told

    page.context.close()
    assert [url for url in wrong if not url.startswith("file:")] == []
