"""Tasks, what was set aside, and the ledger, as the page of a run's data says them."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import httpx
import numpy as np
import pytest

from agentevo.store import open_store
from agentevo.store.records import RetryPolicy
from agentevo.types import QUERY_MESSAGES, Task, Trajectory
from agentevo_ui import shared_answers
from agentevo_ui.task_tallies import ORDERS, tasks

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202eevil & \"'>"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Halve it."}]


def attempt(task: str, number: int, *, reward: float, failed: bool = False) -> Trajectory:
    return Trajectory(
        id=f"{task}/train@1#{number}",
        task_id=task,
        group_id=f"{task}/train@1",
        attempt=number,
        turns=[],
        reward=reward,
        success=reward >= 1 and not failed,
        status="failed" if failed else "completed",
        error="TimeoutError: late" if failed else None,
    )


async def fill(url: str) -> None:
    """`good` is always solved, `half` once, HOSTILE never, `broken` is never completed; 60 others;
    `poisoned` is poison and `lost` failed."""
    async with await open_store(url) as store:
        names = ["good", "half", HOSTILE, "broken", *(f"other-{n}" for n in range(60))]
        await store.add_tasks(
            [
                Task(
                    id=n,
                    environment="world",
                    query=f"Find {n}" if n != "half" else None,
                    answer=[n],
                    metadata={"level": 7} | ({QUERY_MESSAGES: CHAT} if n == "half" else {}),
                )
                for n in names
            ],
            queue=False,
        )

        made = [attempt("good", n, reward=1.0) for n in range(4)]
        made += [attempt("half", n, reward=float(n == 0)) for n in range(2)]
        made += [attempt(HOSTILE, n, reward=-0.5) for n in range(3)]
        made += [attempt("broken", n, reward=0.0, failed=True) for n in range(2)]
        made += [attempt(f"other-{n}", 0, reward=0.5) for n in range(60)]
        await store.write_trajectories(made, split="train", step=1)
        await store.drop([one.id for one in made if one.task_id == HOSTILE], f"no {HOSTILE}")
        await store.add_tasks([Task(id="poisoned"), Task(id="lost"), Task(id="waits")])
        for _ in range(10):
            leases = await store.lease_tasks("worker-1", lease_s=60, limit=2)
            for lease in leases:
                if lease.task.id == "lost":
                    await store.fail_task(lease, f"ValueError: {HOSTILE}")
                elif lease.task.id == "poisoned":
                    state = await store.retry_task(lease, "the engine burns")
                    if state == "poison":
                        return
                else:
                    await store.return_task(lease)

            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def pages(
    tmp_path_factory: pytest.TempPathFactory,
    browse: Callable[..., Any],
) -> dict[str, httpx.Response]:
    url = f"sqlite:///{tmp_path_factory.mktemp('data') / 'mine.sqlite'}"
    with mock.patch.object(RetryPolicy, "delay_s", return_value=0.0):
        asyncio.run(fill(url))

    paths = {
        "page": "data",
        "hardest": "data?order=hardest",
        "second": "data?order=hardest&page=1",
        "found": "data?q=HAL",
        "held out": "data?split=eval",
        "wrong": "data?order=nice",
        "beyond": "data?page=999999",
    }

    async def ask() -> dict[str, httpx.Response]:
        async with browse(url) as client:
            for _ in range(3000):
                page = await client.get("/runs/mine.sqlite/data")
                if {row[5] for row in rows_of(page)} == {"7"}:  # what the tasks are has been read
                    break
                await asyncio.sleep(0.1)

            found = {
                key: await client.get(f"/runs/mine.sqlite/{path}") for key, path in paths.items()
            }
            with mock.patch("agentevo_ui.data_page.MAX_SET_ASIDE", 1):
                await asyncio.sleep(2 * shared_answers.KEPT_S)  # no page from before is left
                found["aside"] = await client.get("/runs/mine.sqlite/data?q=HAL")
                link = link_of(found["aside"], "next")
                assert link is not None
                found["aside 2"] = await client.get(link)

            gone = "/runs/mine.sqlite/data?aside_state=poison&aside_after=gone"
            return found | {"gone": await client.get(gone)}

    return asyncio.run(ask())


def aside_of(answer: httpx.Response) -> str:
    """The part of the page about tasks that were set aside."""
    return answer.text.partition('aria-label="Tasks that were set aside"')[2].split("</section>")[0]


def link_of(answer: httpx.Response, rel: str) -> str | None:
    found = re.search(rf'rel="{rel}" href="([^"]+)"', aside_of(answer))
    return None if found is None else html.unescape(found[1])


def rows_of(answer: httpx.Response) -> list[list[str]]:
    """The cells of the list of tasks."""
    part = answer.text.partition('id="tasks"')[2]
    rows = re.findall(r"<tr data-row>(.*?)</tr>", part, re.DOTALL)
    return [
        [
            " ".join(re.sub(r"<[^>]+>", " ", cell).split())
            for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)
        ]
        for row in rows
    ]


@pytest.mark.slow
def test_tasks_are_counted_one_by_one(pages: dict[str, httpx.Response]) -> None:
    rows = {row[0].split()[0]: row[1:] for row in rows_of(pages["page"])}
    assert rows["good"] == ["100%", "1", "4", "0", "7", "1"]
    assert rows["half"] == ["50%", "0.500", "2", "0", "7", "1"]
    assert rows["broken"] == ["–", "–", "2", "2", "7", "1"]
    assert len(rows) == 50
    text = " ".join(re.sub(r"<[^>]+>", " ", pages["page"].text).split())
    assert "64 tasks 1 always solved, 1 never, 1 without a completed attempt" in text


@pytest.mark.slow
def test_orders_pages_and_searches(pages: dict[str, httpx.Response]) -> None:
    hardest = rows_of(pages["hardest"])
    assert "script" in hardest[0][0]

    second = rows_of(pages["second"])
    assert len(hardest + second) == 64
    assert {row[0] for row in hardest}.isdisjoint(row[0] for row in second)
    assert second[-2][0].startswith("good")
    assert second[-1][0].startswith("broken"), "nothing was completed"
    assert [row[0].split()[0] for row in rows_of(pages["found"])] == ["half"]
    assert rows_of(pages["held out"]) == rows_of(pages["beyond"]) == []
    assert pages["wrong"].status_code == 422


def test_what_was_set_aside_says_why_and_how_it_is_tried_again(
    pages: dict[str, httpx.Response],
) -> None:
    text = " ".join(re.sub(r"<[^>]+>", " ", pages["page"].text).split())
    assert "poisoned question poison the engine burns" in text
    assert "5 times" in text
    assert "lost question failed ValueError:" in text
    assert re.search(r"agentevo store sqlite:///\S+mine.sqlite retry<", pages["page"].text)


def test_what_was_set_aside_is_listed_page_by_page(pages: dict[str, httpx.Response]) -> None:
    first = aside_of(pages["aside"])
    second = aside_of(pages["aside 2"])
    assert "poisoned" in first and "lost" not in first
    assert "lost" in second and "poisoned" not in second
    assert link_of(pages["aside"], "start") is None
    assert link_of(pages["aside 2"], "next") is None
    assert (
        link_of(pages["aside 2"], "start")
        == "/runs/mine.sqlite/data?split=train&q=HAL&order=played"
    )
    assert link_of(pages["page"], "next") is None
    assert "no task" in aside_of(pages["gone"])


def test_drops_and_failures_lead_to_their_attempts(pages: dict[str, httpx.Response]) -> None:
    page = pages["page"].text
    assert "/attempts?reason=no+%3Cscript" in page
    assert "/attempts?error=TimeoutError" in page
    assert "/attempts?split=train&state=dropped" in page.replace("&amp;", "&")


def test_names_of_tasks_are_only_text(pages: dict[str, httpx.Response]) -> None:
    for answer in pages.values():
        assert "<script>alert" not in answer.text
        assert "\x1b" not in answer.text
        assert "\u202e" not in answer.text


class Columns:
    """An index of `num_attempts` at `num_tasks`, without its file."""

    def __init__(self, num_attempts: int, num_tasks: int) -> None:
        draw = np.random.default_rng(0)
        self.num_tasks = num_tasks
        self.columns = {
            "alive": np.ones(num_attempts, dtype=np.bool_),
            "task_id": draw.integers(0, num_tasks, num_attempts).astype(np.int32),
            "success": draw.random(num_attempts) < 0.5,
            "reward": draw.random(num_attempts),
            "step": np.arange(num_attempts, dtype=np.int32),
            "kind": np.zeros(num_attempts, dtype=np.int32),
            "difficulty": np.full(num_attempts, -1, dtype=np.int32),
        }

    def has_word(self, name: str, word: str) -> np.ndarray:
        return self.columns["alive"]

    def words(self, name: str) -> list[str]:
        return [f"{name}-{number}" for number in range(self.num_tasks)]


@pytest.mark.slow
def test_every_order_is_that_of_its_column_at_many_attempts() -> None:
    index: Any = Columns(200_000, 50_000)
    counts = np.bincount(index.columns["task_id"])
    wins = np.bincount(index.columns["task_id"], weights=index.columns["success"])
    share = wins / np.maximum(counts, 1)
    for order in ORDERS:
        begun = time.perf_counter()
        found = tasks(index, split="train", order=order, page=1)
        assert time.perf_counter() - begun < 20, "a quiet machine takes 0.05 s"
        assert found.total == np.count_nonzero(counts)

        played = [row.num_attempts for row in found.rows]
        if order == "played":
            assert played == np.sort(counts)[::-1][50:100].tolist()

        if order == "easiest":
            first = np.sort(share[counts > 0])[::-1][50:100]
            assert [row.success for row in found.rows] == pytest.approx(first.tolist())


def test_each_task_shows_its_query_and_the_expected_answer(pages):
    text = pages["page"].text
    assert "Find good" in text and "expects [&#34;good&#34;]" in text
    assert "system: Be brief. user: Halve it." in text
    assert "Find &lt;script&gt;" in text and "<script>alert" not in text
    assert "<dt>level</dt><dd>7</dd>" in text
