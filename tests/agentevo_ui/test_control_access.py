"""Who may change something through the dashboard: whoever has the token of control, by its forms,
after confirming what was shown; and everything that somebody else may try instead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dashboard_control import CONTROL, ORIGIN, TOKEN, changing, form_token

from agentevo.errors import ConfigError
from agentevo.runs.folder.records import CHANGES, add_record, read_records
from agentevo_ui import access
from agentevo_ui.access import Access

WHERE = "/runs/lake/control"


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "config.yaml").write_text("# agentevo train\nrun: {name: lake}\n")
    return tmp_path


def post(folder: Path, data: dict[str, str], headers: dict[str, str] = ORIGIN) -> httpx.Response:
    """By somebody with both cookies, and with the form's token unless `data` has another."""

    async def asked() -> httpx.Response:
        async with changing(folder) as client:
            given = {"form": await form_token(client)} | data
            return await client.post(WHERE, data=given, headers=headers)

    return asyncio.run(asked())


def test_without_control_nothing_but_get_is_answered(lake: Path) -> None:
    async def asked() -> tuple[httpx.Response, httpx.Response]:
        async with changing(lake, control=False) as client:
            for given in ("", CONTROL, "x"):
                assert (await client.get("/", params={"control": given})).status_code == 401

            await client.get("/", params={"token": TOKEN})
            form = Access(control=False)._form_token  # what an empty token would give
            return (
                await client.post(WHERE, data={"form": form}, headers=ORIGIN),
                await client.get("/runs/lake/control"),
            )

    refused, page = asyncio.run(asked())
    assert refused.status_code == 405
    assert 'method="post"' not in page.text


def test_the_token_for_looking_changes_nothing_and_shows_no_buttons(lake: Path) -> None:
    async def asked() -> tuple[httpx.Response, httpx.Response]:
        async with changing(lake) as client:
            form = await form_token(client)
            client.cookies.clear()
            assert (await client.get("/", params={"token": TOKEN})).status_code == 303
            await client.get("/", params={"control": TOKEN})  # the wrong one of the two
            return (
                await client.post(WHERE, data={"form": form}, headers=ORIGIN),
                await client.get("/runs/lake/control"),
            )

    refused, page = asyncio.run(asked())
    assert refused.status_code == 403
    assert page.status_code == 200
    assert 'name="form"' not in page.text


def test_a_visitor_without_cookies_or_with_those_of_an_older_dashboard_is_refused(
    lake: Path,
) -> None:
    async def asked() -> list[int]:
        async with changing(lake) as client:
            form = await form_token(client)
            given = dict(client.cookies)
            client.cookies.clear()
            codes = [(await client.post(WHERE, data={"form": form}, headers=ORIGIN)).status_code]

            old = Access(token=TOKEN, control="yesterday's")
            for name, text in given.items():
                wrong = old._control_pass if "control" in name else text
                client.cookies.set(name, wrong)

            codes += [(await client.post(WHERE, data={"form": form}, headers=ORIGIN)).status_code]
            return codes

    assert asyncio.run(asked()) == [401, 403]


def test_the_cookie_of_control_is_out_of_scripts_and_other_sites(lake: Path) -> None:
    async def asked() -> httpx.Response:
        async with changing(lake) as client:
            return await client.get("/runs/lake", params={"control": CONTROL, "q": "x"})

    answer = asyncio.run(asked())
    assert answer.headers["location"] == "/runs/lake?q=x"

    cookies = answer.headers.get_list("set-cookie")
    assert len(cookies) == 2
    for cookie in cookies:
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert CONTROL not in cookie


@pytest.mark.parametrize("form", ["", "x", "ü", "0" * 64, Access(control="old")._form_token])
def test_a_form_needs_the_token_of_our_own_pages(form: str, lake: Path) -> None:
    answer = post(lake, {"form": form})
    assert answer.status_code == 403
    assert not (lake / "lake" / CHANGES).exists()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "null"},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:2"},
        {"origin": "https://127.0.0.1:1"},
        {"origin": "http://127.0.0.1:1.evil.example"},
        {"sec-fetch-site": "same-origin"},
        {"origin": "http://127.0.0.1:1", "sec-fetch-site": "cross-site"},
        {"origin": "http://127.0.0.1:1", "sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1:1", "sec-fetch-site": "none"},
    ],
)
def test_a_form_of_another_site_is_refused_even_with_everything_else(
    headers: dict[str, str], lake: Path
) -> None:
    assert post(lake, {}, headers).status_code == 403


def test_a_name_that_was_bound_to_this_address_is_refused(lake: Path) -> None:
    host = {"host": "evil.example:1", "origin": "http://evil.example:1"}
    assert post(lake, {}, host).status_code == 421


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data", ""])
def test_only_forms_are_read(kind: str, lake: Path) -> None:
    assert post(lake, {}, ORIGIN | {"content-type": kind}).status_code == 415


def test_a_body_that_is_too_large_broken_or_never_ends_is_refused(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "BODY_TIMEOUT_S", 0.2)
    plain = ORIGIN | {"content-type": access.CONTENT_TYPE}

    async def endless() -> AsyncIterator[bytes]:
        yield b"form="
        await asyncio.sleep(30.0)
        yield b"x"

    async def streamed() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"a" * 100_000

    async def asked() -> list[int]:
        async with changing(lake) as client:
            form = await form_token(client)
            bodies: list[Any] = [
                b"a" * (access.MAX_BODY + 1),
                streamed(),
                endless(),
                f"form={form}&word=%ff".encode(),
                f"form={form}&word=\xff".encode("latin-1"),
                f"form={form}" + "&a=b" * access.MAX_FIELDS,
            ]
            return [
                (await client.post(WHERE, content=body, headers=plain)).status_code
                for body in bodies
            ]

    assert asyncio.run(asked()) == [413, 413, 408, 400, 400, 400]
    assert post(lake, {}, plain | {"content-length": "9" * 30}).status_code == 413


def test_records_are_added_whole_whoever_was_killed_before(tmp_path: Path) -> None:
    path = tmp_path / CHANGES
    add_record(path, {"what": "one"})
    with path.open("ab") as file:
        file.write(b'{"what": "tor')

    add_record(path, {"what": "two\n\udc80"})
    with path.open("ab") as file:
        file.write(b'{"what": "being written"}')
    # Half a surrogate can be in no page, so it is read as a question mark.
    assert [row["what"] for row in read_records(path)] == ["one", "two\n?"]

    with pytest.raises(ConfigError, match="the limit is"):
        add_record(path, {"what": "x" * 1_000_001})


def test_a_link_in_place_of_the_records_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"what": "secret"}\n')
    path = tmp_path / CHANGES
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError):
        add_record(path, {"what": "one"})
    with pytest.raises(ConfigError):
        read_records(path)

    assert (tmp_path / "secret").read_text() == '{"what": "secret"}\n'
