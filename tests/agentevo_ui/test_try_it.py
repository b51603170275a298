"""Chatting with checkpoints from the dashboard: by real processes that load a
real run's weights, and by all that may go wrong with them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from dashboard_visitor import dashboard

from agentevo.errors import ConfigError
from agentevo.runs.evaluation import player_words as words
from agentevo.runs.evaluation.player import find_player
from agentevo.runs.folder.checkpoint_list import kept_checkpoints
from agentevo.runs.folder.sources import Sources
from agentevo.runtime.event_loop import in_thread
from agentevo.types import Message
from agentevo_ui import players as players_module
from agentevo_ui.access import Access
from agentevo_ui.app import make_app
from agentevo_ui.players import PlayerError, PlayerKey, PlayerProcess, Players

TOKEN = "the-token-of-the-tests"
CONTROL = "the-control-token-of-the-tests"
ORIGIN = {"origin": "http://127.0.0.1:1", "sec-fetch-site": "same-origin"}
WITHIN_S = 300.0


@asynccontextmanager
async def visiting(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, str], Any]]:
    """A client with both cookies, the fields that a form of its pages has, and what they share."""
    app, shared = make_app(Sources([str(folder)]), Access(token=TOKEN, control=CONTROL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
        try:
            await client.get("/", params={"control": CONTROL})
            page = (await client.get("/runs/lake/try")).text
            yield (
                client,
                dict(re.findall(r'type="hidden" name="(form)" value="(\w+)"', page)),
                shared,
            )
        finally:
            await shared.players.close()
            await shared.watcher.close()
            await shared.stores.close()
            await in_thread(shared.indexes.close)


@pytest.fixture
def empty_run(tmp_path: Path) -> Path:
    """A run that has saved nothing, and whose model is nowhere."""
    (tmp_path / "lake").mkdir()
    config = "# agentevo train\nrun: {name: lake}\nmodel: {name: nobody/has-this}\n"
    (tmp_path / "lake" / "config.yaml").write_text(config)
    return tmp_path


@pytest.fixture(scope="module")
def control_url(runs_folder: Path) -> Iterator[str]:
    """A dashboard whose visitors may ask for something."""
    with dashboard(runs_folder, control=True) as url:
        yield url


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = re.findall(r"^event: (\w+)\ndata: (.*)$", text, re.MULTILINE)
    return [(name, json.loads(data)) for name, data in found]


def digests(folder: Path) -> dict[str, str]:
    """Of all files but those of SQLite's own, which a reader makes and deletes."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.endswith(("-wal", "-shm"))
    }


def chat(name: str, **more: Any) -> words.Chat:
    given = {"messages": [Message("user", "Where?")], "conversation": "c", "max_new_tokens": 8}
    return words.Chat(id=name, **given | more)


async def heard(held: Players, key: PlayerKey, request: Any) -> list[Any]:
    async with asyncio.timeout(WITHIN_S), aclosing(held.ask(key, "lake", request)) as events:
        return [event async for event in events if not isinstance(event, PlayerProcess)]


async def until(is_true: Callable[[], Any]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not is_true():
            await asyncio.sleep(0.05)


def test_without_control_the_page_says_how_to_get_it(get, runs_folder):
    answer = get("/runs/lake/try", runs_folder)
    assert answer.status_code == 200
    assert "agentevo ui --control" in answer.text
    assert "<textarea" not in answer.text


def test_what_can_not_be_loaded_is_told_with_what_to_do(empty_run):
    async def visit() -> None:
        async with visiting(empty_run) as (client, _, shared):
            page = (await client.get("/runs/lake/try")).text
            assert "agentevo models nobody/has-this" in page
            assert "no checkpoint" in page
            assert "There is nothing to load." in page
            assert "<textarea" not in page
            assert not shared.players.of("lake")

    asyncio.run(visit())
    for odd in ("a--b/c..d", "x" * 5000, "\x00", "~nobody/x/y", "hf://", "../..", ""):
        assert kept_checkpoints(empty_run / "lake", {"model": {"name": odd}}).missing

    with pytest.raises(ConfigError, match="agentevo models nobody/has-this"):
        find_player(empty_run / "lake", words.START, [])


def test_checkpoints_are_those_of_the_folder_and_of_no_link_out_of_it(runs_folder, tmp_path):
    folder = tmp_path / "lake"
    shutil.copytree(runs_folder / "lake", folder)
    found = kept_checkpoints(folder, {"model": {"name": "tiny"}})
    assert found.steps
    assert found.names == [*map(str, found.steps), "start"]

    outside = folder / "checkpoints" / "step-000077"
    outside.symlink_to(runs_folder / "lake" / "checkpoints" / f"step-{found.steps[0]:06d}")
    (folder / "checkpoints" / "step-000078").mkdir()  # not whole
    assert kept_checkpoints(folder, {"model": {"name": "tiny"}}).steps == found.steps


MESSAGE = json.dumps([{"role": "user", "content": "hello"}])
WRONG: tuple[tuple[str, dict[str, str], str], ...] = (
    ("chat", {"messages": "["}, "not messages"),
    ("chat", {"messages": "[" * 100_000}, "not messages"),
    ("chat", {"messages": '[{"role": "user", "content": 3}]'}, "nothing to answer"),
    ("chat", {"messages": '[{"role": "tool", "content": "x"}]'}, "nothing to answer"),
    ("chat", {"messages": '[{"role": "user", "content": " "}]'}, "nothing to answer"),
    ("chat", {"messages": r'[{"role": "user", "content": "\ud83d"}]'}, "not messages"),
    ("chat", {"messages": json.dumps([{"role": "user", "content": "x" * 100_001}])}, "100,001"),
    ("chat", {"messages": json.dumps(65 * json.loads(MESSAGE))}, "this request is not valid"),
    ("chat", {"which": "99"}, "no checkpoint"),
    ("chat", {"which": "../../lake"}, "no checkpoint"),
    ("chat", {"device": "cuda:7"}, "no checkpoint"),
    ("chat", {"temperature": "nan"}, "this request is not valid"),
    ("chat", {"temperature": "-1"}, "this request is not valid"),
    ("chat", {"max_new_tokens": "1000000"}, "this request is not valid"),
    ("chat", {"conversation": "<script>"}, "this request is not valid"),
)


@pytest.mark.slow
def test_what_can_not_be_asked_starts_nothing(runs_folder):
    async def visit() -> None:
        async with visiting(runs_folder) as (client, form, shared):
            right = {"which": "start", "conversation": "c", "messages": MESSAGE, **form}
            for path, fields, reason in WRONG:
                answer = await client.post(
                    f"/runs/lake/try/{path}", data=right | fields, headers=ORIGIN
                )
                assert answer.status_code == 422, fields
                assert reason in answer.json()["text"]

            late = await client.post("/runs/lake/try/chat", data=right)
            assert late.status_code == 403  # sent by no page

            shared.players.streams = 8
            many = await client.post("/runs/lake/try/chat", data=right, headers=ORIGIN)
            assert many.status_code == 429

            shared.players.streams = 0
            assert not shared.players.of("lake")

    asyncio.run(visit())


@pytest.mark.slow
def test_chat_with_two_checkpoints_leaves_the_run_as_it_was(runs_folder):
    before = digests(runs_folder)

    async def visit() -> None:
        async with visiting(runs_folder) as (client, form, _):

            async def ask(path: str, which: str, **fields: Any) -> list[tuple[str, Any]]:
                answer = await client.post(
                    f"/runs/lake/try/{path}",
                    data={"which": which, **form, **fields},
                    headers=ORIGIN,
                    timeout=WITHIN_S,
                )
                assert answer.headers["content-type"].startswith("text/event-stream")

                told = events_of(answer.text)
                assert told[-1] == ("done", {}), told
                assert not [data for name, data in told if name == "failed"], told
                return told

            step = re.search(r'<option value="(\d+)"', (await client.get("/runs/lake/try")).text)
            assert step

            hello = json.dumps([{"role": "user", "content": "<b>Hello</b>"}])
            talk = {"messages": hello, "conversation": "c", "max_new_tokens": "12"}
            both = await asyncio.gather(
                *(ask("chat", which, **talk) for which in (step[1], "start"))
            )
            for told in both:
                (reply,) = [data for name, data in told if name == "reply"]
                drawn = "".join(data["text"] for name, data in told if name == "text")
                assert reply["text"].startswith(drawn)
                assert "data-t" in reply["html"]
                assert "&lt;b&gt;Hello" in reply["html"]
                assert "<b>Hello" not in reply["html"]

            page = (await client.get("/runs/lake/try")).text
            assert page.count(" MB</td>") == 2

    asyncio.run(visit())
    assert digests(runs_folder) == before


@pytest.mark.slow
def test_players_end_crash_and_are_stopped_as_they_should(runs_folder, monkeypatch):
    """One run of the real processes through all that ends them."""
    key = PlayerKey(runs_folder / "lake", "start", "cpu")

    async def visit() -> None:
        held = Players()
        told: list[Any] = []
        hear = held._handle_event
        monkeypatch.setattr(
            held, "_handle_event", lambda one, event: (told.append(event), hear(one, event))
        )
        try:
            events = await heard(held, key, chat("a"))
            assert isinstance(events[-1], words.Replied)

            (player,) = held.of("lake")
            assert player.memory_bytes > 10**8

            # Nobody listens any more: what is drawn is broken off. It is at work for sure while it
            # stands still.
            os.kill(player.process.pid, signal.SIGSTOP)
            async with asyncio.timeout(WITHIN_S), aclosing(held.ask(key, "lake", chat("b"))) as on:
                ticks = 0
                async for event in on:
                    assert isinstance(event, PlayerProcess)
                    ticks += 1
                    if ticks == 2:  # a tick after the request was written
                        break

            assert not player.is_busy

            os.kill(player.process.pid, signal.SIGCONT)
            await until(lambda: words.Done("b") in told)
            assert words.FailedChat("b", "stopped") in told
            assert not [one for one in told if isinstance(one, words.Replied) and one.id == "b"]

            # It is killed while somebody waits.
            os.kill(player.process.pid, signal.SIGSTOP)
            waiting = asyncio.ensure_future(heard(held, key, chat("e")))
            await until(lambda: "e" in player.listeners)
            os.kill(player.process.pid, signal.SIGKILL)

            with pytest.raises(PlayerError, match="signal 9: it may have needed more memory"):
                await waiting
            assert "signal 9" in player.problem

            # The next request begins another one, which ends when nobody asks.
            monkeypatch.setattr(players_module, "IDLE_S", 0.4)
            monkeypatch.setattr(players_module, "POLL_INTERVAL_S", 0.1)
            held._looking.cancel()
            assert isinstance((await heard(held, key, chat("f")))[-1], words.Replied)

            await until(lambda: not held.of("lake"))
        finally:
            await held.close()

        with pytest.raises(PlayerError, match="dashboard ends"):
            await heard(held, key, chat("g"))

    asyncio.run(visit())


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A process in the player's place that is ready at once."""
    script = tmp_path / "player.sh"
    ready = '{"type":"ready","seconds":0.1,"parameters":1,"device":"cpu"}'
    script.write_text(f"#!/bin/sh\necho '{ready}'\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(players_module.sys, "executable", str(script))


def test_no_more_than_two_are_held_and_a_third_takes_an_idle_ones_place(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "cat > /dev/null")

    async def visit() -> None:
        held = Players()
        keys = [PlayerKey(tmp_path, str(number), "") for number in range(3)]
        try:
            waiting = []
            for number, key in enumerate(keys[:2]):
                task = asyncio.ensure_future(heard(held, key, chat(f"a{number}")))
                waiting.append(task)
                await until(lambda key=key: key in held._players and held._players[key].is_busy)

            with pytest.raises(PlayerError, match="2 checkpoints are busy"):
                await heard(held, keys[2], chat("b"))

            # Of one, too, only so many requests; a thousand more cost nothing.
            for number in range(3):
                waiting.append(asyncio.ensure_future(heard(held, keys[0], chat(f"c{number}"))))

            await until(lambda: len(held._players[keys[0]].listeners) == 4)
            for number in range(1000):
                with pytest.raises(PlayerError, match="busy"):
                    await heard(held, keys[0], chat(f"d{number}"))
            assert len(held.of("")) == 2

            waiting[1].cancel()
            await until(lambda: not held._players[keys[1]].is_busy)
            third = asyncio.ensure_future(heard(held, keys[2], chat("e")))
            await until(lambda: keys[2] in held._players)
            assert set(held._players) == {keys[0], keys[2]}

            for task in (third, *waiting):
                task.cancel()

            await asyncio.gather(third, *waiting, return_exceptions=True)
            pids = [one.process.pid for one in held.of("")]
        finally:
            await held.close()

        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(visit())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("read x; echo 'Bang: no such file' >&2; exit 3", "exit code 3.*Bang: no such file"),
        ('read x; echo \'{"type":"nonsense"}\'; cat > /dev/null', "can't be read"),
        ("read x; head -c 9000000 /dev/zero; cat > /dev/null", "can't be read"),
        ('read x; echo \'{"type":"broken","error":"no room <b>"}\'; exit 1', "no room <b>"),
        ("read x; exec sleep 60", "took too long|more than"),
    ],
)
def test_a_player_that_misbehaves_is_told_with_its_reason(tmp_path, monkeypatch, body, reason):
    stand_in(tmp_path, monkeypatch, body)
    monkeypatch.setattr(players_module, "CHAT_S", 2.0)
    monkeypatch.setattr(players_module, "GRACE_S", 1.0)

    async def visit() -> None:
        held = Players()
        try:
            with pytest.raises(PlayerError, match=reason):
                await heard(held, PlayerKey(tmp_path, "1", ""), chat("a"))
        finally:
            await held.close()

    asyncio.run(visit())


def test_what_a_player_has_begun_ends_with_it(tmp_path, monkeypatch):
    """However it ends: a crash runs none of its own clean-up."""
    child = tmp_path / "child"
    body = f"sleep 300 > /dev/null 2>&1 & echo $! > {child}.new && mv {child}.new {child}; read x"
    stand_in(tmp_path, monkeypatch, f"{body}; kill -9 $$")

    async def visit() -> None:
        held = Players()
        try:
            with pytest.raises(PlayerError, match="signal 9"):
                await heard(held, PlayerKey(tmp_path, "1", ""), chat("a"))
            stat = ["ps", "-o", "stat=", "-p", child.read_text().strip()]
            # Who adopts it reaps it some time later.
            await until(lambda: subprocess.run(stat, capture_output=True).stdout[:1] in (b"", b"Z"))
        finally:
            await held.close()

    monkeypatch.setattr(sys.modules[__name__], "WITHIN_S", 20.0)
    asyncio.run(visit())


@pytest.mark.slow
def test_a_player_ends_with_whoever_has_begun_it(runs_folder):
    command = [
        sys.executable,
        "-m",
        "agentevo.runs.evaluation.player",
        str(runs_folder / "lake"),
        "last",
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None

    process.stdin.close()  # as a dashboard that was killed leaves it, in the middle of loading
    process.stdout.read()
    assert process.wait(WITHIN_S) == 0


@pytest.mark.soak
def test_in_a_browser_two_checkpoints_answer(control_url, visit):
    visitor = visit(control_url)
    page = visitor.go("/runs/lake/try")
    page.set_default_timeout(1000 * WITHIN_S)
    page.select_option("#right", "start")
    page.fill("textarea[name=message]", "Where is the <b>goal</b>?")
    page.press("textarea[name=message]", "Enter")
    for side in ("left", "right"):
        page.wait_for_selector(f"[data-side={side}] details[data-tokens]")
        assert page.locator(f"[data-side={side}] .message.user b").count() == 0
        assert "ready" in page.inner_text(f"[data-side={side}] [data-state]")

    page.click("[data-side=left] details[data-tokens] summary")
    page.hover("[data-side=left] [data-t]")
    assert "log-prob" in page.inner_text("#token-box")

    visitor.check_accessible()
    page.fill("textarea[name=message]", "And then?")
    page.click("button[type=submit]")
    visitor.until("document.querySelectorAll('[data-side=left] details[data-tokens]').length === 2")

    page.wait_for_selector("#players table")
    narrow = visit(control_url, width=360, color_scheme="dark")
    page = narrow.go("/runs/lake/try")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    narrow.check_accessible()


@pytest.mark.slow
def test_closing_the_browser_in_the_middle_makes_room(control_url):
    """Over real connections: more requests than are taken at once are begun and left one after the
    other, while the player stands still."""
    with httpx.Client(timeout=WITHIN_S) as client:
        url = control_url
        root = url.partition("/?")[0]
        headers = {"origin": root, "sec-fetch-site": "same-origin"}
        client.get(url, follow_redirects=True)
        page = client.get(f"{root}/runs/lake/try").text
        found = re.search(r'name="form" value="(\w+)"', page)
        assert found

        data = {"form": found[1], "which": "start", "messages": MESSAGE, "conversation": "c"}
        where = f"{root}/runs/lake/try/chat"
        assert "event: reply" in client.post(where, data=data, headers=headers).text

        part = client.get(f"{root}/runs/lake/try/players").text
        pid = int(re.search(r'name="pid" value="(\d+)"', part)[1])
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(10):
                ends = time.monotonic() + 300
                while True:
                    with client.stream("POST", where, data=data, headers=headers) as answer:
                        first = next(answer.iter_text())
                    if "event: state" in first or time.monotonic() > ends:
                        break
                    time.sleep(0.05)  # the server has not heard yet that the last one is gone

                assert "event: state" in first
        finally:
            os.kill(pid, signal.SIGCONT)

        assert "event: reply" in client.post(where, data=data, headers=headers).text

        ended = client.post(
            f"{root}/runs/lake/try/end", data={"form": found[1], "pid": pid}, headers=headers
        )
        assert ended.status_code == 303
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
