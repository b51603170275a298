"""Folders of evaluations and sweeps: found in the list, and the page of the former."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from dashboard_visitor import dashboard

from agentevo.observability.pages.intervals import points, share_interval
from agentevo.runs.evaluation.estimates import paired_difference
from agentevo.runs.evaluation.results import (
    RESULTS,
    SUMMARY,
    AttemptLine,
    ResultsFolder,
    task_digest,
)
from agentevo.runs.evaluation.summary import summarise
from agentevo.types import Task
from agentevo_ui.results_page import estimate

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202eevil & \"'>"
MODELS = ("before", f"after {HOSTILE}")
NUM_TASKS = 60
Get = Callable[..., httpx.Response]


def name(number: int) -> str:
    return HOSTILE if number == 0 else f"task-{number}"


def lines() -> list[AttemptLine]:
    """The second model solves three tasks more, and loses task 9."""
    return [
        AttemptLine(
            model=model,
            task=name(n),
            attempt=k,
            status="failed" if n == 59 else "completed",
            reward=None if n == 59 else 1.0,
            success=n != 59 and (n in range(7, 10) if model == MODELS[0] else n in range(4, 9)),
            answer=f"answer {HOSTILE}",
            error="OSError: gone" if n == 59 else None,
        )
        for model in MODELS
        for n in range(NUM_TASKS)
        for k in range(2)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As an evaluation leaves it."""
    tasks = [Task(id=name(n)) for n in range(NUM_TASKS)]
    settings = {
        "num_tasks": NUM_TASKS,
        "tasks_digest": task_digest(tasks),
        "played_models": dict.fromkeys(MODELS, "x"),
        "attempts": 2,
        "temperature": 1.0,
    }
    kept = ResultsFolder(tmp_path / "all" / "held")
    with kept.lock():
        kept.begin(settings, tasks)
        made = lines()
        for start in range(0, len(made), 2):
            kept.add(made[start : start + 2], [])
        by_model = {model: [one for one in made if one.model == model] for model in MODELS}
        kept.end(summarise(by_model, 2, settings) | {"players": {"random": 0.1, "optimal": 1.0}})

    return kept.path


def text_of(answer: httpx.Response) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", answer.text).replace("&#39;", "'").split())


@pytest.mark.slow
def test_models_stand_side_by_side_as_in_the_summary(folder: Path, get: Get) -> None:
    answer = get("/results/held", folder.parent)
    made = lines()
    summary = summarise({m: [one for one in made if one.model == m] for m in MODELS}, 2, {})
    for model in summary["models"]:
        for k in ("1", "2"):
            assert share_interval(estimate(model["pass_at"][k])) in text_of(answer)

    assert "2 of 120" in text_of(answer)
    assert "random player 10%" in text_of(answer)
    assert 'href="/results/held"' in get("/", folder.parent).text


@pytest.mark.slow
def test_solved_and_lost_tasks_and_their_attempts(folder: Path, get: Get) -> None:
    text = text_of(get("/results/held", folder.parent))
    first = [float(n in range(7, 10)) for n in range(NUM_TASKS - 1)]
    last = [float(n in range(4, 9)) for n in range(NUM_TASKS - 1)]
    assert points(paired_difference(first, last)) in text
    assert "Solved: 3 tasks task-4 0% → 100%" in text
    assert "Lost: 1 task task-9 100% → 0%" in text

    one = text_of(get("/results/held?task=task-59", folder.parent))
    assert "OSError: gone" in one

    same = get("/results/held?from=before&to=before", folder.parent)
    assert "Solved:" not in same.text

    page = get("/results/held?at=1", folder.parent).text
    assert page.split('id="tasks"')[1].count("<tr data-row>") == 10
    assert get("/results/held?at=many", folder.parent).status_code == 422


@pytest.mark.slow
def test_an_evaluation_under_way_shows_what_there_is(folder: Path, get: Get) -> None:
    (folder / SUMMARY).unlink()
    text = text_of(get("/results/held", folder.parent))
    assert "has not ended" in text
    assert "Solved: 3 tasks" in text
    (folder / RESULTS).unlink()
    assert "No attempt is there yet" in get("/results/held", folder.parent).text


@pytest.mark.parametrize("file", ["eval.json", "summary.json", "results.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\xff{]", b"[]\n", b'{"models": [3, {}]}', None])
def test_damage_is_a_page_that_says_so(
    file: str, content: bytes | None, folder: Path, get: Get
) -> None:
    (folder / file).unlink()
    if content is None:
        (folder / file).symlink_to("/etc/passwd")
    else:
        (folder / file).write_bytes(content)

    answer = get("/results/held", folder.parent)
    assert answer.status_code in (200, 404, 503)
    assert "root:" not in answer.text
    assert get("/", folder.parent).status_code == 200


@pytest.mark.slow
def test_words_of_a_folder_are_only_text(folder: Path, get: Get) -> None:
    for path in ("", f"?task={'%3Cscript%3E'}", "?task=task-4", "?q=%3Cscript%3E"):
        answer = get(f"/results/held{path}", folder.parent)
        assert answer.status_code == 200
        assert "<script>alert" not in answer.text
    assert get("/results/other", folder.parent).status_code == 404


def test_a_sweep_is_a_link_above_the_list(folder: Path, get: Get) -> None:
    sweep = folder.parent / "tuned"
    for run in ("a", "b"):
        (sweep / run).mkdir(parents=True)
        (sweep / run / "config.yaml").write_text("run: {name: x}\n")

    (sweep / "sweep.yaml").write_text("{}\n")
    listed = get("/", folder.parent).text
    assert 'href="/compare?sweep=tuned"' in listed
    assert "2 runs" in listed
    assert "Compare 2 runs" in text_of(get("/compare?sweep=tuned", folder.parent))

    shutil.rmtree(sweep)
    assert "/compare?sweep" not in get("/", folder.parent).text


# The last one here: until the browser is closed, `asyncio.run` fails in this thread.
@pytest.mark.soak
def test_an_evaluation_under_way_shows_newer_attempts_by_itself(
    folder: Path, visit: Callable[..., Any]
) -> None:
    whole = (folder / RESULTS).read_text()
    summary = (folder / SUMMARY).read_text()
    (folder / SUMMARY).unlink()
    (folder / RESULTS).write_text("".join(whole.splitlines(keepends=True)[:10]))

    with dashboard(folder.parent) as url:
        one = visit(url)
        page = one.go("/results/held?task=task-30")
        page.evaluate("window.isTheSamePage = true")
        found = 'document.querySelectorAll("#tasks [data-row]").length'
        assert page.evaluate(found) < 50

        page.locator("#tasks input[type=search]").fill("what I type")
        (folder / RESULTS).write_text(whole)
        one.until(f"{found} === 50")
        (folder / SUMMARY).write_text(summary)
        one.until('!document.querySelector("#results").hasAttribute("hx-get")')

        assert page.locator("#tasks input[type=search]").input_value() == "what I type"
        assert page.evaluate("window.isTheSamePage")

        page.close()  # before the dashboard ends
