"""Held-out results as the page says them, over stores that the real code has written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentevo.observability.pages.intervals import points, share_interval
from agentevo.runs.evaluation.estimates import mean_of, paired_difference
from agentevo.store import open_store
from agentevo.types import Task, Trajectory

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202eevil & \"'>"
NUM_TASKS = 20


def made(number: int, step: int, *, success: bool, failed: bool = False) -> Trajectory:
    task = name(number)
    return Trajectory(
        id=f"{task}/greedy@{step}#0",
        task_id=task,
        group_id=f"{task}/greedy@{step}",
        attempt=0,
        turns=[],
        reward=float(success),
        success=success,
        status="failed" if failed else "completed",
        error="OSError: gone" if failed else None,
    )


def name(number: int) -> str:
    return f"{HOSTILE}-{number}" if number == 3 else f"held-{number}"


def before(number: int) -> bool:
    return number < 5


def after(number: int) -> bool:
    """Task 0 is lost, 5 to 11 are solved."""
    return 1 <= number < 12


def write(url: str, steps: dict[int, Callable[[int], bool]], failed: tuple[int, ...] = ()) -> None:
    async def work() -> None:
        async with await open_store(url) as store:
            tasks = [
                Task(id=name(n), environment="world", metadata={"difficulty": n % 2 + 1})
                for n in range(NUM_TASKS)
            ]
            await store.add_tasks(tasks, queue=False)
            for step, succeeds in steps.items():
                attempts = [
                    made(n, step, success=succeeds(n), failed=step > 0 and n in failed)
                    for n in range(NUM_TASKS)
                ]
                await store.write_trajectories(attempts, split="eval", step=step)

    asyncio.run(work())


@pytest.fixture(scope="module")
def pages(
    tmp_path_factory: pytest.TempPathFactory, browse: Callable[..., Any]
) -> dict[str, httpx.Response]:
    """Every page once, when all is in the index."""
    folder = tmp_path_factory.mktemp("held")
    urls = [f"sqlite:///{folder / one}.sqlite" for one in ("mine", "other", "empty")]
    write(urls[0], {0: before, 4: after, 8: after}, failed=(19,))
    write(urls[1], {0: after})
    write(urls[2], {})
    paths = {
        "page": "mine.sqlite/evaluation",
        "first two": "mine.sqlite/evaluation?from=0&to=4",
        "no step": "mine.sqlite/evaluation?from=3&to=99",
        "one step": "mine.sqlite/evaluation?from=4&to=4",
        "wrong": "mine.sqlite/evaluation?from=much",
        "series": "mine.sqlite/evaluation/series",
        "one": "other.sqlite/evaluation",
        "nothing": "empty.sqlite/evaluation",
        "nothing drawn": "empty.sqlite/evaluation/series",
        "of a task": "mine.sqlite/attempts?split=eval&task=held-0",
        "of no task": "mine.sqlite/attempts?task=nobody",
    }

    async def ask() -> dict[str, httpx.Response]:
        async with browse(*urls) as client:
            for _ in range(3000):
                page = await client.get("/runs/mine.sqlite/evaluation")
                if "Difficulty" in page.text and "are not read yet" not in page.text:
                    break
                await asyncio.sleep(0.1)
            return {key: await client.get(f"/runs/{path}") for key, path in paths.items()}

    return asyncio.run(ask())


def text_of(answer: httpx.Response) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", answer.text).replace("&#39;", "'").split())


@pytest.mark.slow
def test_the_numbers_are_those_of_the_estimates(pages: dict[str, httpx.Response]) -> None:
    text = text_of(pages["page"])
    first = [float(before(n)) for n in range(NUM_TASKS)]
    last = [float(after(n)) for n in range(NUM_TASKS)]
    assert share_interval(mean_of(sorted(first))) in text
    assert share_interval(mean_of(sorted(last[:-1]))) in text  # one has failed
    assert points(paired_difference(first[:-1], last[:-1])) in text
    assert "1 of 20" in text


@pytest.mark.slow
def test_solved_and_lost_tasks_lead_to_their_attempts(pages: dict[str, httpx.Response]) -> None:
    page = pages["page"].text
    solved, lost = page.split("Lost:")
    assert "Solved: 7 tasks" in solved
    assert lost.startswith(" 1 task<")
    assert "task=held-5&amp;split=eval" in solved.replace("&split", "&amp;split")
    assert "id=held-0%2Fgreedy%400%230" in lost
    assert "id=held-0%2Fgreedy%408%230" in lost
    assert "task=held-1&" not in page, "it was solved at both steps"
    assert "id=held-0%2Fgreedy%404%230" in pages["first two"].text
    assert len(re.findall("<tr data-row>", pages["of a task"].text)) == 3
    assert "No attempt matches" in pages["of no task"].text


def test_steps_that_were_not_evaluated_are_the_first_and_last(
    pages: dict[str, httpx.Response],
) -> None:
    assert "From step 0 to step 8" in pages["no step"].text
    assert "From step" not in pages["one step"].text
    assert pages["wrong"].status_code == 422


def test_difficulties_are_counted_apart(pages: dict[str, httpx.Response]) -> None:
    table = text_of(pages["page"]).split("By kind and difficulty")[1]
    for difficulty in (1, 2):
        own = [float(after(n)) for n in range(NUM_TASKS - 1) if n % 2 + 1 == difficulty]
        assert f"world {difficulty}" in table
        assert share_interval(mean_of(sorted(own))) in table


def test_the_curve_has_a_band(pages: dict[str, httpx.Response]) -> None:
    told = pages["series"].json()
    (line,) = told["lines"]
    assert (line["name"], told["x"]) == ("mine.sqlite", [0, 4, 8])
    assert line["values"] == [5 / 20, 11 / 19, 11 / 19]
    assert line["low"][0] < 5 / 20 < line["high"][0]


def test_what_was_not_evaluated_says_so(pages: dict[str, httpx.Response]) -> None:
    assert "No held-out attempt" in pages["nothing"].text
    assert pages["nothing drawn"].status_code == 404
    assert "figure" not in pages["one"].text, "one step makes no curve"


def test_names_of_tasks_are_only_text(pages: dict[str, httpx.Response]) -> None:
    for answer in pages.values():
        assert "<script>alert" not in answer.text
        assert "\x1b" not in answer.text
        assert "\u202e" not in answer.text
