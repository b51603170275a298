"""Step, groups, attempts, one attempt: what the pages of a store and of a run say."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from agentevo.data.images import read_image
from agentevo.runs.folder.annotations import Annotation, Preference, annotate
from agentevo.runs.folder.run_folder import read_store
from agentevo.store import open_store
from agentevo.types import Call, Message, Task, TextPart, ToolCall, Trajectory, Turn
from agentevo.types.images import image_file

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202eevil\x00 & \"'>\ufffe"
WORLD = "Play.\n######\n#_P__#\n#_X_O#\n######\nMove!"


def turn(index: int, parent: int | None, messages: list[Message], **changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "prompt_ids": [1, 2, 3],
        "completion_ids": [7, 8, 9],
        "logprobs": [-0.01, -1.0, -6.0],
        "versions": [0, 0, 1],
        "finish_reason": "stop",
    }
    return Turn(index=index, parent=parent, messages=messages, **(fields | changes))


SCREEN = read_image(np.zeros((4, 6, 3), np.uint8), "the screen")
PAGE = image_file(b"<script>alert(1)</script>", "text/html")
"""What another program may have written in place of an image."""


def attempts() -> list[Trajectory]:
    """What arrives at its worst."""
    said = [Message("user", WORLD), Message("assistant", HOSTILE)]
    asks = Message(
        "assistant",
        "I look",
        tool_calls=(ToolCall("search", '{"q": "unicorn"}', "c1"),),
        reasoning="a secret thought",
    )
    image = Message("user", (TextPart("see"), SCREEN.part))
    long = Message("user", "word " * 1_000_000)
    many = [turn(i, i - 1 if i else None, [Message("assistant", f"turn {i}!")]) for i in range(500)]
    wide = turn(
        0,
        None,
        [Message("assistant", "wide")],
        completion_ids=[5] * 100_000,
        logprobs=[-0.5] * 100_000,
        versions=[0] * 100_000,
    )

    branches = [
        turn(0, None, [Message("user", "root"), Message("assistant", "a")]),
        turn(1, 0, [Message("assistant", "left")]),
        turn(2, 0, [Message("assistant", "right")]),
        turn(3, None, [Message("assistant", "anew")]),
    ]
    made = {
        "hostile": [turn(0, None, said)],
        "tools": [
            turn(0, None, [Message("user", "find"), asks]),
            turn(1, 0, [Message("tool", "found it", tool_call_id="c1", name="search"), image]),
            turn(2, 1, [image, Message("assistant", "<answer>click 250 750</answer>")]),
        ],
        "long": [turn(0, None, [long, Message("assistant", "yes")])],
        "many": many,
        "wide": [wide],
        "branches": branches,
        "silent": [turn(0, None, [])],
        "empty": [],
    }

    return [
        Trajectory(
            id=f"train-1/{name}@1#{number}",
            task_id="t",
            group_id="g@1",
            attempt=number,
            turns=turns,
            reward=number / 10,
            reward_parts={"rule": number / 10},
            success=number % 2 == 0,
            status="failed" if name == "empty" else "completed",
            error=f"ValueError: {HOSTILE}" if name == "empty" else None,
        )
        for number, (name, turns) in enumerate(made.items())
    ]


@pytest.fixture(scope="module")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('hostile') / 'store.sqlite'}"

    async def work() -> None:
        async with await open_store(url) as store:
            made = attempts()
            asked = Task(
                id="t",
                environment="world",
                seed=7,
                query=f"Where is the treasure? {HOSTILE}" + "x" * 50_000,
                answer={"place": f"left of {HOSTILE}"},
                scorer="exact_match",
                metadata={f"key {n}": [HOSTILE, "y" * 5_000] for n in range(60)},
            )
            await store.put_images([SCREEN, PAGE])
            await store.add_tasks([asked], queue=False)
            await store.write_trajectories(made, split="train", step=1)
            names = [one.id for one in made]
            call = {"trajectory_id": names[1], "started_at": 10.0, "ended_at": 12.5}
            await store.write_calls(
                [
                    Call(
                        id="ab-1",
                        kind="attempt",
                        name="A",
                        status="completed",
                        attributes={"ending": f"You fell. {HOSTILE}\n####\n#P_#\n####"},
                        **call,
                    ),
                    Call(
                        id="ab-2",
                        kind="tool",
                        name="search",
                        status="failed",
                        error=f"no net {HOSTILE}",
                        parent="ab-1",
                        **call,
                    ),
                    Call(
                        id="ab-3",
                        kind="scorer",
                        name="judge",
                        status="completed",
                        attributes={"score": 0.5, "reason": "half of it is right"},
                        **call,
                    ),
                ]
            )
            await store.reserve(names[:3], 1)
            await store.commit_step(1, {"chain": "x"}, dropped={"no-spread": [names[3]]})

    asyncio.run(work())
    return url


@pytest.fixture(scope="module")
def pages(
    store_url: str, tmp_path_factory: pytest.TempPathFactory, browse: Callable[..., Any]
) -> dict[str, httpx.Response]:
    """Every page once, when all that was said is read: by name."""
    paths = {
        "list": "attempts",
        "of task": "attempts?task=t",
        "found": "attempts?q=unicorn",
        "none": "attempts?q=centaur",
        "committed": "attempts?state=committed&order=best",
        "range": "attempts?reward_from=0.1&reward_to=0.35",
        "wrong": "attempts?state=loose",
        "wrong order": "attempts?order=nice",
        "no number": "attempts?reward_from=much",
        "step": "steps/1",
        "nowhere": "steps/77",
        "turns": f"attempt/turns?id={name('many', 3)}&start=12",
        "text": f"attempt/text?id={name('long', 2)}&turn=0&message=0&start=4999000",
        "no text": f"attempt/text?id={name('long', 2)}&turn=0&message=9",
        "minus": f"attempt/text?id={name('long', 2)}&turn=-1&message=0",
        "tokens": f"attempt/tokens?id={name('wide', 4)}&turn=0&at=99000",
        "branch": f"attempt?id={name('branches', 5)}&leaf=2",
        "branch tokens": f"attempt?id={name('branches', 5)}&leaf=2&show=tokens",
        "diff": f"attempts/compare?a={name('hostile', 0)}&b={name('tools', 1)}",
        "token": f"attempt/token?id={name('hostile', 0)}&turn=0&position=2",
        "no token": f"attempt/token?id={name('hostile', 0)}&turn=0&position=3",
        "gone": "attempt?id=nobody",
        "far": f"attempt/tokens?id={name('hostile', 0)}&turn={10**20}&at={10**20}",
        "far in": f"attempt/tokens?id={name('hostile', 0)}&turn=0&at={10**20}",
        "far turns": f"attempt/turns?id={name('many', 3)}&start={10**20}",
        "no leaf": f"attempt?id={name('branches', 5)}&leaf=-7&show=tokens",
        "huge step": f"steps/{10**20}",
        "late": f"attempts?after={2**52}.5~{2**52}&order=worst",
        "no cursor": "attempts?after=nan~x",
        "image": f"image/{SCREEN.part.sha256}",
        "no image": f"image/{PAGE.part.sha256}",
        "far image": f"image/{'0' * 64}",
        "no range": "attempts?reward_from=1&reward_to=0",
    }
    for number, attempt in enumerate(attempts()):
        kind = attempt.id.partition("/")[2].partition("@")[0]
        paths[kind] = f"attempt?id={name(kind, number)}"
        paths[f"{kind} tokens"] = f"attempt?id={name(kind, number)}&show=tokens"

    found: dict[str, httpx.Response] = {}

    async def work() -> None:
        async with asyncio.timeout(300), browse(store_url) as client:
            key = (await client.get("/")).text.split('href="/runs/')[1].split('"')[0]
            while "<h2>1 attempt" not in (await client.get(f"/runs/{key}/attempts?q=unicorn")).text:
                await asyncio.sleep(0.05)
            for title, path in paths.items():
                found[title] = await client.get(f"/runs/{key}/{path}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTEVO_CACHE", str(tmp_path_factory.mktemp("cache")))
        asyncio.run(work())

    return found


def name(kind: str, number: int) -> str:
    return quote(f"train-1/{kind}@1#{number}", safe="")


@pytest.mark.slow
def test_every_page_answers_and_what_was_said_is_only_text(
    pages: dict[str, httpx.Response],
) -> None:
    wrong = {"wrong", "wrong order", "no number", "no text", "minus", "no token", "gone"}
    wrong |= {"huge step", "no cursor", "no image", "far image"}
    for title, answer in pages.items():
        assert (answer.status_code == 200) == (title not in wrong), (title, answer.text[-800:])
        assert answer.status_code < 500, title
        assert "<script>alert" not in answer.text
        if title != "image":
            assert not re.search("[\x00\x1b\u202e]", answer.text), title

    assert "&lt;script&gt;alert" in pages["hostile"].text


def test_lists_filter_search_and_sort(pages: dict[str, httpx.Response]) -> None:
    def ids(title: str) -> list[str]:
        return re.findall(r'data-row>\s*<td class="name"><a [^>]*>([^<]*)<', pages[title].text)

    assert len(ids("list")) == 8
    assert ids("found") == ["train-1/tools@1#1"]
    assert "<mark>unicorn</mark>" in pages["found"].text
    assert ids("none") == []
    assert ids("committed") == ["train-1/long@1#2", "train-1/tools@1#1", "train-1/hostile@1#0"]
    assert set(ids("range")) == {f"train-1/{n}" for n in ("tools@1#1", "long@1#2", "many@1#3")}
    assert "use one of ready" in pages["wrong"].text
    assert "largest log-prob change" in pages["list"].text  # greyed, with the reason
    assert "its run stored none" in pages["list"].text


def test_a_step_shows_its_groups_beside_each_other(pages: dict[str, httpx.Response]) -> None:
    text = pages["step"].text
    assert len(re.findall('class="cell ', text)) == 8
    assert "dropped: no-spread" in text
    assert text.count('class="card group"') == 1
    assert "No attempt of this step" in pages["nowhere"].text


def test_an_attempt_as_messages(pages: dict[str, httpx.Response]) -> None:
    world = pages["hostile"].text
    assert world.count('<i class="wall">') == 16
    assert '<i class="player">P</i>' in world

    tools = pages["tools"].text
    assert "a secret thought" in tools
    assert "At the end" in tools and "You fell." in tools and "fell." not in pages["many"].text
    assert tools.count('<i class="wall">') == 10

    diff = pages["diff"].text
    assert "You fell." in diff and diff.count('class="turn-head"') == 4  # three turns, and the end
    assert "&#34;q&#34;: &#34;unicorn&#34;" in tools
    assert "no net" in tools
    assert "2.5 s" in tools
    assert "half of it is right" in tools
    assert f"/image/{SCREEN.part.sha256}" in tools
    assert tools.count("<circle ") == 1 and '<circle cx="250.0" cy="750.0"' in tools
    picture = pages["image"]
    assert picture.content == SCREEN.data
    assert picture.headers["content-type"] == "image/png"
    assert picture.headers["x-content-type-options"] == "nosniff"
    assert len(pages["long"].content) < 100_000
    assert "further characters" in pages["long"].text
    assert "word" in pages["text"].text
    assert pages["many"].text.count('class="turn') == 12
    assert "turn 12!" in pages["turns"].text
    assert "turn 24!" not in pages["turns"].text
    assert "continues turn 0" in pages["branches"].text

    branch = pages["branch"].text
    assert "right" in branch
    assert ">left<" not in branch
    assert 'class="turn muted"' in branch  # the root belongs to the branch before, too


def test_an_attempt_as_tokens(pages: dict[str, httpx.Response]) -> None:
    text = pages["hostile tokens"].text
    numbers = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', text)[-1])
    assert numbers["id"] == [7, 8, 9]
    assert numbers["lp"] == [-0.01, -1.0, -6.0]
    assert numbers["on"] == [1, 1, 1]

    levels = re.findall(r'<i class="(s?\d?)" data-t>', text)
    assert levels == ["", "s2", "s5"]
    assert "its folder is not here" in text  # the store alone has neither entropies nor ratios
    assert len(pages["wide tokens"].text.split("data-t>")) - 1 == 1_500
    assert '"at":99000' in pages["tokens"].text
    assert "More tokens" not in pages["tokens"].text
    assert "committed to step 1" in pages["token"].text or "trained on" in pages["token"].text


@pytest.mark.slow
def test_advantages_are_those_that_the_trainer_had(
    tmp_path: Path,
    small_config: Callable[..., Any],
    quiet_view: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    index_cache: Path,
) -> None:
    from agentevo.runs.orchestration.run import train
    from agentevo.training import preparation
    from agentevo_ui.index.advantages import largest
    from agentevo_ui.index.indexer import Indexer
    from agentevo_ui.index.reader import IndexReader, IndexUnavailableError
    from agentevo_ui.index.selection import Selection

    trained: dict[str, float] = {}
    real = preparation.advantages_of

    def kept(*arguments: Any, **more: Any) -> Any:
        samples = real(*arguments, **more)
        trained.update(largest(samples))
        return samples

    monkeypatch.setattr(preparation, "advantages_of", kept)
    config = small_config(
        tmp_path / "run",
        "trainer.steps=2",
        "cold_start.episodes=8",
        "algorithm.name=grpo",
        "algorithm.drop_zero_variance=false",
    )
    train(config, view=quiet_view())
    indexer = Indexer(f"sqlite:///{tmp_path / 'run' / 'store.sqlite'}", tmp_path / "run")
    indexer.start()
    reader = IndexReader(indexer.path)

    async def wait() -> dict[str, float]:
        async with asyncio.timeout(300):
            while True:
                try:
                    with reader.open() as index:
                        committed = Selection(choices={"state": "committed"})
                        rows = index.listing(committed, size=999).rows
                    found = {row.id: row.advantage for row in rows if row.advantage is not None}
                    if rows and len(found) == len(rows):
                        return found
                except IndexUnavailableError:
                    pass

                await asyncio.sleep(0.05)

    try:
        found = asyncio.run(wait())
    finally:
        indexer.stop()

    assert found.keys() <= trained.keys()
    assert found == pytest.approx({key: trained[key] for key in found}, rel=1e-5)


@pytest.mark.parametrize("title", ["hostile", "hostile tokens", "silent", "of task"])
def test_a_page_says_what_the_task_was(pages, title):
    """Query, expected answer, who judges and the metadata, each of a bounded length."""
    text = pages[title].text
    card = text.partition('class="card task-facts"')[2].partition("</section>")[0]
    assert "environment world, seed 7; judged by exact_match" in card
    assert "Where is the treasure? &lt;script&gt;" in card
    assert "left of &lt;script&gt;" in card and "<script" not in card
    assert "(50,0" in card and "and 20 more" in card and card.count("<dt>") == 40
    assert len(card) < 60_000


def test_a_list_of_all_tasks_shows_no_task(pages):
    assert "task-facts" not in pages["list"].text


@pytest.mark.slow
def test_what_people_have_said_is_shown_and_nothing_asks_for_more(
    runs_folder: Path, get: Callable[..., httpx.Response], tmp_path: Path
) -> None:
    folder = tmp_path / "lake"
    shutil.copytree(runs_folder / "lake", folder)
    summaries = read_store(folder, lambda store: store.summaries(split="train"))
    left, right = (summary.id for summary in summaries[:2])
    annotate(
        folder,
        Annotation(attempt=left, verdict="wrong", note=HOSTILE, reply="Go left.", who="Ada"),
    )
    annotate(folder, Preference(better=right, worse=left, who="Ada"))

    said = get("/runs/lake/attempt", tmp_path, params={"id": left}).text
    assert ">wrong</b>" in said and "Ada" in said and "Go left." in said
    assert "&lt;script&gt;alert" in said and "<script>alert" not in said
    assert "<form" not in said

    nobody = get("/runs/lake/attempt", tmp_path, params={"id": right}).text
    assert 'id="annotation"' not in nobody

    both = get("/runs/lake/attempts/compare", tmp_path, params={"a": left, "b": right}).text
    assert "the right one</b> better" in both and "<form" not in both
