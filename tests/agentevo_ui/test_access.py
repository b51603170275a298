"""Without the token nothing is served; with it everything, and the token is in no address."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from starlette.types import ASGIApp

from agentevo.observability.pages import assets
from agentevo.runs.folder.sources import Sources
from agentevo_ui.access import POLICY, Access, AccessGuard
from agentevo_ui.app import make_app

TOKEN = "the-token-of-the-tests"


def ask(folder: Path, method: str, path: str, **settings: object) -> httpx.Response:
    async def asked() -> httpx.Response:
        app: ASGIApp
        app, shared = make_app(Sources([str(folder)]), Access(token=TOKEN))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:1") as client:
            answer = await client.request(method, path, **settings)  # type: ignore[arg-type]
        await shared.watcher.close()
        return answer

    return asyncio.run(asked())


@pytest.mark.parametrize(
    "path", ["/", "/runs/x", "/live?run=x", assets.url("agentevo.css"), "/openapi.json", "/nothing"]
)
def test_nothing_is_served_without_the_token(path: str, tmp_path: Path) -> None:
    assert ask(tmp_path, "GET", path).status_code == 401
    wrong = "&" if "?" in path else "?"
    assert ask(tmp_path, "GET", f"{path}{wrong}token=wrong").status_code == 401


def test_the_token_becomes_a_cookie_and_leaves_the_address(tmp_path: Path) -> None:
    answer = ask(tmp_path, "GET", f"/runs/a%20b?q=x&token={TOKEN}")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/runs/a%20b?q=x"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie


def test_a_redirect_never_leads_to_another_host(tmp_path: Path) -> None:
    answer = ask(tmp_path, "GET", f"http://localhost:1//evil.example/?token={TOKEN}")
    assert answer.headers["location"] == "/evil.example/"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8", 401),
        ("127.0.0.1:8", 401),
        ("[::1]:8", 401),
        ("10.1.2.3", 401),
        ("evil.example", 421),
        ("localhost.evil.example:80", 421),
        ("", 421),
    ],
)
def test_a_name_of_somebody_elses_is_refused(host: str, status: int, tmp_path: Path) -> None:
    assert ask(tmp_path, "GET", "/", headers={"host": host}).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_but_get_is_answered(method: str, tmp_path: Path) -> None:
    assert ask(tmp_path, method, f"/?token={TOKEN}").status_code == 405


def test_every_answer_has_the_headers_that_protect_it(tmp_path: Path) -> None:
    for path in ("/", f"/?token={TOKEN}"):
        headers = ask(tmp_path, "GET", path).headers
        assert headers["content-security-policy"] == POLICY
        assert "unsafe" not in POLICY
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_a_failure_outside_of_the_pages_is_reported(tmp_path: Path, capsys) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("no such thing")

    asyncio.run(ask_guarded(broken))
    assert "ui: /runs/x: RuntimeError: no such thing" in capsys.readouterr().err


async def ask_guarded(app: ASGIApp) -> None:
    """Asks for a page of an application that never begins its answer."""
    transport = httpx.ASGITransport(app=AccessGuard(app, Access(token=TOKEN)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:1") as client:
        cookie = (await client.get(f"/?token={TOKEN}")).headers["set-cookie"]
        with pytest.raises(AssertionError):  # httpx's word for an answer that never began
            await client.get("/runs/x", headers={"cookie": cookie.partition(";")[0]})


def test_an_answer_that_takes_too_long_is_told_of(tmp_path: Path, capsys, monkeypatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr("agentevo_ui.access.ANSWER_TIMEOUT_S", 0.05)
    asyncio.run(ask_guarded(never))
    assert "ui: /runs/x: no complete answer within 0.05 s" in capsys.readouterr().err
