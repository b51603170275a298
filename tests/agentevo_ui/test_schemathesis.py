"""schemathesis against the dashboard: every address of its own OpenAPI page, with the fields of its
forms added, by somebody who may change something, who may look, and who has wrong tokens. Never a
5xx, and the runs stay as they were."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis_run
from dashboard_forms import FIELDS, WORDS
from dashboard_visitor import dashboard
from folder_bytes import contents

from agentevo.runtime.event_loop import run_coroutine
from agentevo_ui.access import CONTENT_TYPE

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return schemathesis_run.installed(tmp_path_factory.mktemp("schemathesis"))


@pytest.fixture
def shown(runs_folder: Path, tmp_path: Path) -> Path:
    """A copy of the run that nobody trains, beside a file that no address may lead to."""
    (tmp_path / "secret.yaml").write_text("a: the-secret-of-the-tests\n")
    shutil.copytree(runs_folder / "lake", tmp_path / "shown" / "lake")
    return tmp_path / "shown"


def page_with_forms(page: dict[str, Any], token: str) -> dict[str, Any]:
    """The OpenAPI page with the fields that each form has, and runs to choose from."""
    posts = {path for path, methods in page["paths"].items() if "post" in methods}
    assert posts == set(FIELDS), "an address takes a form that is not tried here"
    for path, methods in page["paths"].items():
        for method in methods.values():
            for parameter in method.get("parameters", []):
                if parameter["name"] == "run":
                    parameter["schema"] = {"anyOf": [{"enum": ["lake"]}, {"type": "string"}]}

        if path in posts:
            fields: dict[str, Any] = {
                name: {"anyOf": [{"enum": WORDS[name]}, {"type": "string"}]}
                if name in WORDS
                else {"type": "string"}
                for name in FIELDS[path]
            }
            fields["form"] = {"enum": [token]}
            form = {"type": "object", "properties": fields, "required": ["form", *FIELDS[path]]}
            methods["post"]["requestBody"] = {"content": {CONTENT_TYPE: {"schema": form}}}

    return page


def signed_in(url: str) -> tuple[str, str, dict[str, Any]]:
    """The cookies of who opens that URL, the token of forms, and the OpenAPI page."""
    with httpx.Client(timeout=300.0, trust_env=False) as client:
        assert client.get(url).status_code == 303
        root = url.partition("/?")[0]
        page = client.get(f"{root}/openapi.json").json()
        form = client.get(f"{root}/runs/lake/try").text
        token = form.partition('name="form" value="')[2].partition('"')[0]
        return "; ".join(f"{name}={text}" for name, text in client.cookies.items()), token, page


def tried(
    program: Path, url: str, cookie: str, page: dict[str, Any], cwd: Path, *options: str
) -> str:
    """What schemathesis says; nothing of it is a failure."""
    root = url.partition("/?")[0]
    file = cwd / "page.json"
    file.write_text(json.dumps(page))
    code, said = run_coroutine(
        schemathesis_run.found(
            program,
            str(file),
            "--url",
            root,
            "--max-examples",
            "12",
            "--seed",
            "1",
            "--phases",
            "examples,coverage,fuzzing",
            "--request-timeout",
            "60",
            "-H",
            f"Cookie: {cookie}",
            "-H",
            f"Origin: {root}",
            *options,
            checks="not_a_server_error",
            cwd=cwd,
        )
    )
    assert code == 0, said[:6000]
    return said


@pytest.fixture
def control(shown: Path) -> Iterator[str]:
    with dashboard(shown, control=True) as url:
        yield url


def test_who_may_change_finds_no_5xx_and_changes_no_run_by_nonsense(
    program: Path, control: str, shown: Path, tmp_path: Path
) -> None:
    before = contents(shown / "lake")
    cookie, token, page = signed_in(control)
    assert token
    tried(program, control, cookie, page_with_forms(page, token), tmp_path)
    assert contents(shown / "lake") == before


def test_wrong_tokens_get_nothing_and_change_nothing(
    program: Path, control: str, shown: Path, tmp_path: Path
) -> None:
    before = contents(shown)
    cookie, token, page = signed_in(control)
    told = page_with_forms(page, token)
    names = [pair.partition("=")[0] for pair in cookie.split("; ")]
    tried(program, control, f"{names[0]}=x; {names[1]}=x", told, tmp_path)
    looks = next(pair for pair in cookie.split("; ") if pair.startswith("agentevo-ui-"))
    posts = "--include-method=POST"
    tried(program, control, looks, told, tmp_path, posts)
    wrong = page_with_forms(signed_in(control)[2], token[::-1])
    tried(program, control, cookie, wrong, tmp_path, posts)
    assert contents(shown) == before


def test_without_control_only_looking_is_answered(
    program: Path, shown: Path, tmp_path: Path
) -> None:
    before = contents(shown)
    with dashboard(shown) as url:
        cookie, token, page = signed_in(url)
        assert not token
        tried(program, url, cookie, page_with_forms(page, "x"), tmp_path)
    assert contents(shown) == before
