"""Annotating in the dashboard: by forms as a browser sends them, beside a run whose attempts stay
what they were."""

from __future__ import annotations

import asyncio
import html
import re
import shutil
from pathlib import Path

import httpx
import pytest
from dashboard_control import ORIGIN, changing, form_token

from agentevo.runs.annotations import ANNOTATIONS, read_annotations
from agentevo.runs.folder import read_store

KEY = "lake"


@pytest.fixture(scope="module")
def shown(runs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run, to be changed."""
    folder = tmp_path_factory.mktemp("annotated")
    shutil.copytree(runs_folder / "lake", folder / KEY)
    return folder


def names_of(folder: Path) -> list[str]:
    summaries = read_store(folder / KEY, lambda store: store.summaries(split="train"))
    return [one.id for one in summaries]


@pytest.mark.slow
def test_a_verdict_a_note_and_an_edited_reply_are_kept_and_shown(shown: Path) -> None:
    name = names_of(shown)[0]
    before = (shown / KEY / "store.sqlite").read_bytes()

    async def said() -> list[httpx.Response]:
        async with changing(shown) as client:
            form = await form_token(client)
            page = await client.get(f"/runs/{KEY}/attempt", params={"id": name})
            box = re.search(r'<textarea id="reply"[^>]*>\n?(.*?)</textarea>', page.text, re.S)
            assert box

            original = html.unescape(box[1])
            sent = {"form": form, "attempt": name, "verdict": "right", "note": "<i>ä</i>"}
            url = f"/runs/{KEY}/annotate"

            # A browser sends newlines as \r\n: the same reply is no edit.
            same = sent | {"reply": original.replace("\n", "\r\n")}
            first = await client.post(url, data=same, headers=ORIGIN)
            assert read_annotations(shown / KEY).attempts[name].reply is None

            await client.post(url, data=sent | {"reply": "no"}, headers=ORIGIN)
            wrong = await client.post(url, data=sent | {"verdict": "maybe"}, headers=ORIGIN)
            gone = await client.post(url, data=sent | {"attempt": "x"}, headers=ORIGIN)
            long = await client.post(url, data=sent | {"note": "n" * 10_001}, headers=ORIGIN)

            # Six bytes each in a line of JSON: beyond what a record may have.
            bare = await client.post(url, data=sent | {"reply": "\x01" * 200_000}, headers=ORIGIN)
            refused = [one.status_code for one in (wrong, gone, long, bare)]
            assert refused == [422, 404, 422, 422]

            there = await client.get(first.headers["location"].partition("#")[0])
            listed = await client.get(f"/runs/{KEY}/annotations", params={"show": "edited"})
            none = await client.get(f"/runs/{KEY}/annotations", params={"q": "not there"})
            return [first, there, listed, none]

    first, there, listed, none = asyncio.run(said())
    assert first.status_code == 303

    one = read_annotations(shown / KEY).attempts[name]
    assert (one.verdict, one.note, one.reply) == ("right", "<i>ä</i>", "no")
    assert one.who.startswith("control token ")
    assert "changed 1 time<" in there.text
    assert "<i>ä" not in there.text
    assert html.escape(name) in listed.text
    assert html.escape(name) not in none.text
    assert (shown / KEY / "store.sqlite").read_bytes() == before


def test_of_two_attempts_one_is_better(shown: Path) -> None:
    left, right = names_of(shown)[:2]

    async def said() -> str:
        async with changing(shown) as client:
            sent = {"form": await form_token(client), "a": left, "b": right, "better": right}
            done = await client.post(f"/runs/{KEY}/prefer", data=sent, headers=ORIGIN)
            other = await client.post(
                f"/runs/{KEY}/prefer", data=sent | {"better": "x"}, headers=ORIGIN
            )
            assert (done.status_code, other.status_code) == (303, 422)
            return str((await client.get(done.headers["location"])).text)

    assert "the right one</b> better" in asyncio.run(said())

    (pair,) = read_annotations(shown / KEY).pairs.values()
    assert (pair.better, pair.worse) == (right, left)


def test_who_may_only_look_has_no_form_and_keeps_nothing(runs_folder: Path) -> None:
    name = names_of(runs_folder)[0]

    async def looked() -> list[httpx.Response]:
        async with changing(runs_folder, control=False) as client:
            await client.get("/", params={"token": "the-token-of-the-tests"})
            return [
                await client.get(f"/runs/{KEY}/attempt", params={"id": name}),
                await client.get(f"/runs/{KEY}/annotations"),
                await client.post(f"/runs/{KEY}/annotate", data={"attempt": name}, headers=ORIGIN),
            ]

    page, listed, refused = asyncio.run(looked())
    assert [page.status_code, listed.status_code, refused.status_code] == [200, 200, 405]
    assert "<textarea" not in page.text
    assert not (runs_folder / KEY / ANNOTATIONS).exists()
