"""The buttons of a run's page: what they ask reaches the trainer once, after it was confirmed."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from dashboard_control import CONTROL, ORIGIN, changing, form_token

from agentevo.runs.folder.control import RunControl, read_session
from agentevo.runs.folder.lock import only_trainer
from agentevo.runs.folder.records import CHANGES, read_records

URL = "/runs/lake/control"


def form_of(text: str) -> dict[str, str]:
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', text))


@pytest.fixture
def trained(runs_folder: Path, tmp_path: Path) -> Iterator[tuple[Path, RunControl, list[str]]]:
    """A folder with a run that this process trains, as far as anybody can see."""
    folder = tmp_path / "lake"
    shutil.copytree(runs_folder / "lake", folder)
    (folder / "control.json").unlink(missing_ok=True)
    (folder / "changes.jsonl").unlink(missing_ok=True)

    stops: list[str] = []
    control = RunControl(folder, lambda: stops.append("stop"), look_s=0.01)
    with only_trainer(folder), control:
        while read_session(folder) is None:
            pass
        yield tmp_path, control, stops


def test_a_button_asks_twice_and_reaches_the_trainer_once(
    trained: tuple[Path, RunControl, list[str]],
) -> None:
    folder, _, stops = trained

    async def pressed() -> list[httpx.Response]:
        async with changing(folder) as client:
            form = await form_token(client)
            page = await client.get(URL)
            session = form_of(page.text)["session"]
            sent = {"form": form, "do": "stop", "session": session}
            first = await client.post(URL, data=sent, headers=ORIGIN)
            assert stops == []

            sure = form_of(first.text)
            other = await client.post(URL, data=sure | {"do": "pause"}, headers=ORIGIN)
            assert "Pause, really" in other.text  # not what was shown: asked again
            assert "stop" not in form_of(other.text).values()

            twice = [client.post(URL, data=sure, headers=ORIGIN) for _ in range(2)]
            done, double = await asyncio.gather(*twice)  # a double click
            assert double.headers["location"] == done.headers["location"] == URL
            again = await client.post(URL, data=sure, headers=ORIGIN)

            async with asyncio.timeout(300.0):
                while "it stops after this step" not in (await client.get(URL)).text:
                    await asyncio.sleep(0.05)

            other = await client.post(URL, data=sent | {"session": "x"}, headers=ORIGIN)
            wrong = await client.post(URL, data=sent | {"do": "format"}, headers=ORIGIN)
            return [page, done, again, other, wrong]

    page, *answers = asyncio.run(pressed())
    assert [answer.status_code for answer in answers] == [303, 303, 404, 404]
    assert stops == ["stop"]
    assert "Save now" in page.text
    assert "Resume" not in page.text

    records = read_records(folder / "lake" / CHANGES)
    names = [record["what"] for record in records]
    assert names[0] == "stop: asked"
    assert names.count("stop: asked") == 1
    assert re.fullmatch("control token [0-9a-f]{8}", records[0]["who"])
    assert records[0]["address"] == "127.0.0.1"
    assert CONTROL not in json.dumps(records)
    assert "stop: it stops after this step, or within this evaluation" in names


def test_a_request_that_could_not_be_written_is_asked_about_again(
    trained: tuple[Path, RunControl, list[str]],
) -> None:
    folder, _, stops = trained
    records = folder / "lake" / CHANGES
    records.mkdir()  # so that nothing can be added

    async def pressed() -> list[httpx.Response]:
        async with changing(folder) as client:
            form = await form_token(client)
            first = await client.post(URL, data={"form": form, "do": "stop"}, headers=ORIGIN)
            sure = form_of(first.text)
            failed = await client.post(URL, data=sure, headers=ORIGIN)
            records.rmdir()
            return [failed, await client.post(URL, data=sure, headers=ORIGIN)]

    failed, again = asyncio.run(pressed())
    assert failed.status_code == 503 and "the change was not made" in failed.text
    assert again.status_code == 200 and "Stop, really" in again.text
    assert stops == []


def test_a_paused_run_says_so_and_offers_to_resume(
    trained: tuple[Path, RunControl, list[str]],
) -> None:
    folder, control, _ = trained
    control.note_pause(3)

    async def looked() -> httpx.Response:
        async with changing(folder) as client:
            await form_token(client)
            return await client.get(URL)

    text = asyncio.run(looked()).text
    assert ">Paused</b>" in text
    assert ">Resume</button>" in text
    assert ">Pause</button>" not in text


def test_a_run_that_nobody_trains_has_no_buttons_and_takes_no_requests(runs_folder: Path) -> None:
    async def pressed() -> list[httpx.Response]:
        async with changing(runs_folder) as client:
            sent = {"form": await form_token(client), "do": "stop"}
            return [await client.get(URL), await client.post(URL, data=sent, headers=ORIGIN)]

    page, refused = asyncio.run(pressed())
    assert "The run is not training (it is finished)" in page.text
    assert '<button class="button "' not in page.text
    assert refused.status_code == 404
    assert not (runs_folder / "lake" / "control").exists()
