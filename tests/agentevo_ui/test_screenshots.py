"""The pictures of docs/, taken by the tests that look at the pages:

    pytest tests/agentevo_ui/test_screenshots.py --write-screenshots

Without the option the same pictures are taken of the small run of the tests, and thrown away."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_visitor import Visitor, dashboard

Visit = Callable[..., Visitor]
pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
MOST_BYTES = 150_000
RUN = (
    "run.name=frozen_lake",
    "trainer.steps=30",
    "trainer.groups_per_step=12",
    "trainer.group_size=8",
    "cold_start.episodes=150",
    "evaluation.tasks=48",
    "evaluation.every=5",
    "checkpoint.every=10",
    "tracking.report=false",
    "run.threads=1",
)
"""Of the recipe `frozen_lake`, for pictures with something on them: about a minute."""


@pytest.fixture(scope="module")
def pictured(
    request: pytest.FixtureRequest, runs_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """The URL of a dashboard and the name of a run there."""
    if not request.config.getoption("--write-screenshots"):
        with dashboard(runs_folder) as url:
            yield url, "lake"
        return

    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("pictured") / "runs"
    command = [sys.executable, "-m", "agentevo", "train", "frozen_lake", *RUN]
    where = f"run.dir={folder / 'frozen_lake'}"
    subprocess.run([*command, where], check=True, timeout=900, capture_output=True)

    with dashboard(folder) as url:
        yield url, "frozen_lake"


def take(page: Any, name: str, write: bool, place: Path, *, height: int = 860) -> None:
    """A picture of what stands at the top of the page: no pointer, no cursor, nothing that moves,
    no path of this machine."""
    page.set_viewport_size({"width": 1280, "height": height})
    page.mouse.move(0, 0)
    page.wait_for_timeout(400)
    text = page.inner_text("body")
    assert not re.search(r"(^|\s)/(tmp|home|root|work|Users)/", text), text

    folder = DOCS / "images" if write else place
    path = folder / f"dashboard-{name}.png"
    page.screenshot(path=path, animations="disabled", caret="hide")

    assert path.stat().st_size < MOST_BYTES
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_pictures_of_the_docs(
    request: pytest.FixtureRequest, pictured: tuple[str, str], visit: Visit, tmp_path: Path
) -> None:
    url, run = pictured
    write = bool(request.config.getoption("--write-screenshots"))
    visitor = visit(url)
    page = visitor.whole_index(f"/runs/{run}/attempts")
    visitor.go(f"/runs/{run}")
    page.wait_for_selector("figure.chart canvas")
    take(page, "run", write, tmp_path)
    page.get_by_role("link", name="its groups").click()
    page.get_by_role("link", name="lowest mean first").click()
    page.wait_for_url("**order=worst**")
    take(page, "step", write, tmp_path)
    page.locator(".cell").first.click()
    page.wait_for_url("**/attempt?id=**")
    take(page, "attempt", write, tmp_path)
    page.keyboard.press("o")
    page.wait_for_selector("[data-t]")
    page.focus("#stream")
    page.keyboard.press("ArrowRight")
    take(page, "tokens", write, tmp_path, height=700)


def test_every_picture_that_the_docs_show_is_one_of_these() -> None:
    readme, shown = (
        set(re.findall(r"images/(dashboard-\w+)\.png", path.read_text("utf-8")))
        for path in (DOCS.parent / "README.md", DOCS / "dashboard.md")
    )
    assert readme == {"dashboard-step"}
    assert shown == {f"dashboard-{name}" for name in ("run", "step", "attempt", "tokens")}

    for name in (*shown, "drawn-steps"):
        assert (DOCS / "images" / f"{name}.png").stat().st_size < MOST_BYTES
    assert "images/drawn-steps.png" in (DOCS / "environments.md").read_text("utf-8")
