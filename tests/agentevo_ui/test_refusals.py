"""Every address of the dashboard by everybody who may not: nothing is told and nothing changes. And
every form with nonsense in it by somebody who may: a sentence, never an error of ours. The longer
form of this is test_schemathesis.py."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from dashboard_control import CONTROL, ORIGIN, TOKEN, changing, form_token
from dashboard_forms import FIELDS, WORDS
from folder_bytes import contents

from agentevo.runs.folder.sources import Sources
from agentevo_ui.access import Access
from agentevo_ui.app import make_app

SECRET = "the-secret-of-the-tests"
OTHER = ("HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
HARD = [
    "",
    "0",
    "-1",
    "9" * 30,
    "nan",
    "1e999",
    "lake",
    "..",
    "../secret.yaml",
    "/etc/passwd",
    "../../secret.yaml",
    "secret.yaml\x00",
    "step_1/../../..",
    "[]",
    "{}",
    "null",
    "\x00",
    "' OR 1=1 --",
    '"',
    "\u202e",
    "\ud800",
    "a" * 3000,
    "%2e%2e%2f",
    "--help",
    "run.dir=/",
]


@pytest.fixture
def shown(runs_folder: Path, tmp_path: Path) -> Path:
    """A copy of the run that nobody trains, beside a file that no address may lead to."""
    (tmp_path / "secret.yaml").write_text(f"a: {SECRET}\n")
    shutil.copytree(runs_folder / "lake", tmp_path / "shown" / "lake")
    return tmp_path / "shown"


async def addresses(client: httpx.AsyncClient) -> dict[str, set[str]]:
    """Path, of the run that is there -> its methods, for somebody who may look."""
    page = (await client.get("/openapi.json")).json()["paths"]
    assert set(FIELDS) == {path for path, methods in page.items() if "post" in methods}
    found = {path.replace("{run}", "lake"): set(methods) for path, methods in page.items()}
    return found | {"/live": {"get"}, "/openapi.json": {"get"}, "/nothing/here": {"get"}}


@pytest.mark.slow
def test_nothing_is_told_to_who_has_no_token_or_a_wrong_one(shown: Path) -> None:
    before = contents(shown)
    old = Access(token="old", control="old")
    ours = Access(token=TOKEN, control=CONTROL)
    cookies = [
        "",
        f"{ours.cookie}=; {ours.control_cookie}=",
        f"{ours.cookie}={TOKEN}",
        f"{old.cookie}={old._pass}",
        f"{ours.cookie}={old._pass}; {ours.control_cookie}={old._control_pass}",
        f"{ours.control_cookie}={ours._control_pass}",
    ]

    async def tried() -> None:
        async with changing(shown) as client:
            form = await form_token(client)
            paths = await addresses(client)
            client.cookies.clear()

            for path, cookie in itertools.product(paths, cookies):
                for query in ("", "?token=x", f"?control={TOKEN}"):
                    answer = await client.get(path + query, headers={"cookie": cookie})
                    assert answer.status_code == 401, (path, cookie)
                    assert "lake" not in answer.text and "set-cookie" not in answer.headers
                sent = {"data": {"form": form}, "headers": ORIGIN | {"cookie": cookie}}
                answer = await client.post(path, **sent)
                assert answer.status_code == 401 and "lake" not in answer.text, (path, cookie)

            right = {"cookie": f"{ours.cookie}={ours._pass}"}
            for path, method in itertools.product(paths, OTHER[2:]):
                answer = await client.request(method, path, headers=right)
                assert answer.status_code == 405, (path, method)

            for path in paths:
                answer = await client.get(path, headers=right | {"host": "evil.example"})
                assert answer.status_code == 421

    asyncio.run(tried())
    assert contents(shown) == before


@pytest.mark.slow
def test_looking_and_refused_forms_change_nothing(shown: Path) -> None:
    before = contents(shown)

    async def tried() -> None:
        async with changing(shown) as client:
            form = await form_token(client)
            paths = await addresses(client)
            for path, methods in paths.items():
                if "get" in methods and path != "/live":
                    fields = dict.fromkeys(("id", "a", "b", "do", "session", "which"), "lake")
                    answer = await client.get(path, params=fields | {"form": form})
                    assert answer.status_code < 500, path
                for data, headers in (({}, ORIGIN), ({"form": "x"}, ORIGIN), ({"form": form}, {})):
                    answer = await client.post(path, data=data, headers=headers)
                    assert answer.status_code == (403 if data else 415), path

            client.cookies.clear()
            await client.get("/", params={"token": TOKEN})
            for path in paths:
                answer = await client.post(path, data={"form": form}, headers=ORIGIN)
                assert answer.status_code == 403, path

    asyncio.run(tried())
    assert contents(shown) == before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_nonsense_in_forms_and_addresses_is_a_sentence(seed: int, shown: Path) -> None:
    before = contents(shown)
    draw = random.Random(seed)

    def word(name: str) -> bytes:
        return str(draw.choice(HARD + WORDS.get(name, []))).encode("utf-8", "surrogatepass")

    async def tried() -> None:
        async with changing(shown) as client:
            form = await form_token(client)
            page = (await client.get("/openapi.json")).json()["paths"]
            for path, methods in page.items():
                run = draw.choice(["lake", "lake", "nobody", "..%2f..", "%00"])
                place = path.replace("{run}", run).replace("{", "").replace("}", "")
                names = [one["name"] for one in methods.get("get", {}).get("parameters", [])]
                query: Any = {name: word(name) for name in names}
                if "get" in methods:
                    answer = await client.get(place, params=query)
                    assert answer.status_code < 500, (place, query, answer.text[-600:])
                    assert SECRET not in answer.text and "root:x:0" not in answer.text

                if "post" in methods:
                    data: Any = {name: word(name) for name in FIELDS[path]}
                    data |= {"form": form}
                    answer = await client.post(place, data=data, headers=ORIGIN)
                    assert answer.status_code < 500, (place, data, answer.text[-600:])
                    assert SECRET not in answer.text

    asyncio.run(tried())
    assert contents(shown) == before


@pytest.mark.parametrize(
    "query", ["run=lake", "run=*", "run=..", "run=%00&x=1", "run=" + "a" * 900]
)
def test_the_stream_of_news_tells_only_who_may_look(query: str, shown: Path) -> None:
    """So many bytes of it are read, then its visitor is gone."""
    known = Access(token=TOKEN)

    async def read(cookie: str) -> tuple[int, bytes]:
        app, shared = make_app(Sources([str(shown)]), known)
        status = [0]
        body = bytearray()
        over = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            status[0] = message.get("status", status[0])
            body.extend(message.get("body", b""))
            over.set()

        headers = [(b"host", b"127.0.0.1:1"), (b"cookie", cookie.encode())]
        scope = {"type": "http", "method": "GET", "path": "/live", "raw_path": b"/live"}
        more = {"query_string": query.encode(), "headers": headers, "root_path": ""}
        async with asyncio.timeout(300.0):
            await app({**scope, **more, "scheme": "http"}, receive, send)
        assert shared.watcher.num_streams == 0

        await shared.watcher.close()
        await shared.stores.close()
        return status[0], bytes(body)

    status, body = asyncio.run(read(f"{known.cookie}={known._pass}"))
    assert status == 200 and body.startswith(b"retry:")

    status, body = asyncio.run(read(f"{known.cookie}=x"))
    assert status == 401 and b"lake" not in body
