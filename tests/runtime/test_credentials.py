"""A store's password: an environment variable has it, `${env:NAME}` stands for it, and nothing that
is written or shown has it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest

from agentevo.cli.main import main
from agentevo.config import build_config, to_yaml
from agentevo.config.recipe import load_config
from agentevo.errors import ConfigError, StoreError
from agentevo.observability.report_page import report_html
from agentevo.runs.folder.creation import write_config
from agentevo.runs.folder.identity import ensure_run_folder
from agentevo.runs.folder.resume_rules import check_resume
from agentevo.runs.folder.sources import RunSource, Sources
from agentevo.runtime.credentials import (
    is_same_place,
    refuse_password,
    with_environment,
    without_password,
    without_passwords,
)
from agentevo.store import open_store
from agentevo.store.opening import stores

PASSWORD = "s3cr:t@/?%#"
AT_HOST = "vault://me:${env:VAULT_PASSWORD}@host"
"""The URL of the store of `VAULT`, but for its path."""
VAULT = '''
"""A store that wants a password: a file of SQLite behind vault://USER:PASSWORD@HOST/PATH."""
from urllib.parse import unquote, urlsplit
from agentevo.errors import StoreError
from agentevo.store.sqlite import SQLiteStore
from agentevo.store.opening import stores

if "vault" not in stores.names():
    @stores.register("vault")
    async def open_vault(url, **options):
        """A store that wants a password."""
        parts = urlsplit(url)
        if unquote(parts.password or "") != "s3cr:t@/?%#":
            raise StoreError("the password is wrong")
        return await SQLiteStore.open(f"sqlite:///{parts.path}", **options)
'''
RECIPE = """
import: [./vault.py]
environment: {type: coins}
model: {name: tiny, tiny: {hidden_size: 32, num_layers: 1, num_heads: 2}}
trainer: {steps: 2, groups_per_step: 2, group_size: 2}
evaluation: {tasks: 2, every: 0}
cold_start: {episodes: 0}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    """A recipe whose store is a vault; the variable is set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VAULT_PASSWORD", PASSWORD)
    (tmp_path / "vault.py").write_text(VAULT)
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{RECIPE}store: {AT_HOST}{tmp_path}/vault.sqlite\n")
    yield path
    stores._items.pop("vault", None)


def files_with_password(folder: Path) -> list[str]:
    """Files, by name or content, that have it, as it is or escaped; but for the user's own program
    that says it, and its byte code."""
    forms = [PASSWORD.encode(), b"s3cr%3At", json.dumps(PASSWORD).encode()]
    return [
        str(file)
        for file in folder.rglob("*")
        if file.name.partition(".")[0] != "vault"
        and (b"s3cr" in bytes(file) or (file.is_file() and _has(file, forms)))
    ]


def _has(file: Path, forms: list[bytes]) -> bool:
    content = file.read_bytes()
    return any(form in content for form in forms)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:hush@h:5432/d", "postgresql://me:***@h:5432/d"),
        ("postgresql://me:h@u:s/h?@h/d", "postgresql://me:***@h/d"),
        ("me:hush@h/d", "me:***@h/d"),
        ("postgresql://:hush@h/d", "postgresql://:***@h/d"),
        ("postgresql://me@h:5432/d", None),
        ("postgresql://[::1]:5432/d", None),
        ("postgresql://me@/d?host=/run/x&schema=a", None),
        ("sqlite:///a:b@c.sqlite", None),
        ("sqlite:///runs/x.sqlite", None),
        ("mongodb://me:${env:PW}@h/d?replicaSet=r", None),
        ("postgresql://h/d?user=me&password=hush", "postgresql://h/d?user=me&password=***"),
        (
            "mongodb://h/d?tlsCertificateKeyFilePassword=hush&a=b",
            "mongodb://h/d?tlsCertificateKeyFilePassword=***&a=b",
        ),
        (
            "mongodb://h/d?authMechanismProperties=A:b,AWS_SESSION_TOKEN:hush",
            "mongodb://h/d?authMechanismProperties=A:b,AWS_SESSION_TOKEN:***",
        ),
        ("https://h/v1?key=hush&a=b", "https://h/v1?key=***&a=b"),
        ("https://h/v1?a=b&api_key=hush", "https://h/v1?a=b&api_key=***"),
        ("https://h/v1?tavilyApiKey=hush", "https://h/v1?tavilyApiKey=***"),
        ("https://h/v1?X-Amz-Signature=1&sig=hush", "https://h/v1?X-Amz-Signature=1&sig=***"),
        ("https://h/v1?subscription-key=hush", "https://h/v1?subscription-key=***"),
        ("postgresql://me@h/d?sslkey=/etc/key.pem&monkey=1", None),
        ("mongodb://h/d?tlsCertificateKeyFile=/etc/key.pem&authSource=admin", None),
    ],
)
def test_what_is_shown_of_a_url(url, shown):
    assert without_password(url) == (shown or url)
    if "://" in url:
        assert without_passwords(f"can't open {url} now") == f"can't open {shown or url} now"

    if shown is None:
        assert refuse_password(url) == url
    else:
        with pytest.raises(ConfigError, match=r"\$\{env:STORE_PASSWORD\}") as refused:
            refuse_password(url)
        assert "hush" not in str(refused.value)


def test_a_variable_is_put_in_and_escaped_where_a_password_stands(monkeypatch):
    monkeypatch.setenv("PW", "p@s/s:%")
    assert (
        with_environment("postgresql://me:${env:PW}@h/d") == "postgresql://me:p%40s%2Fs%3A%25@h/d"
    )

    monkeypatch.setenv("WHOLE", "postgresql://me:p%40@h/d")
    assert with_environment("${env:WHOLE}") == "postgresql://me:p%40@h/d"
    for value in ("", None):
        monkeypatch.setenv("PW", "") if value == "" else monkeypatch.delenv("PW")
        with pytest.raises(ConfigError, match=r"\$\{env:PW\}@h/d: .*variable PW is not set"):
            with_environment("postgresql://me:${env:PW}@h/d")


def test_the_same_place_has_any_password_and_another_place_none_in_common():
    old, new, none = (f"postgresql://me{one}@h/d" for one in (":hush", ":${env:PW}", ""))
    assert is_same_place(old, new) and is_same_place(new, none)
    assert not is_same_place(old, "postgresql://me:hush@other/d")
    assert not is_same_place("${env:ONE}", "${env:OTHER}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("store.url=postgresql://me:hush@h/d", "store.url: the password would be"),
        ("store=postgresql://me:hush@h/d", "store.url: the password would be"),
        ("store.url=[postgresql://me:hush@h/d]", "the password would be"),
        ("store.url=me:hush@h/d", "store.url: the password would be"),
        ("engine.options={url: 'http://me:hush@h/d'}", "engine.options.url: the password would"),
        ("model.name=https://me:hush@h/model", "model.name: the password would be"),
        ("store.url=postgresql://me:${oc.env:LEAKED}@h/d", "store.url: the password would be"),
        ("store.url=postgresql://me:hu${sh@h/d", "store.url"),
        ("store.url=postgresql://me:${hush}@h/d", "store.url"),
        ("postgresql://me:hush@h/d", "write it as key.subkey=value"),
        ("stor.url=postgresql://me:hush@h/d", "stor"),
        ("run.name=${env:LEAKED}", "run.name: ${env:NAME} is put into URLs alone"),
    ],
)
def test_a_password_in_the_configuration_is_refused_and_not_shown(
    override, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEAKED", "hush")
    assert main(["train", "coins", override]) == 2
    shown = capsys.readouterr()
    assert words in shown.err and "hush" not in shown.err.replace("Interpolation key 'hush'", "")
    assert shown.out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_is_written_of_a_configuration_has_the_name_and_not_the_password(recipe, capsys):
    config = load_config(recipe)
    url = f"{AT_HOST}{recipe.parent}/vault.sqlite"
    assert config.store_url == url

    tree = {"environment": {"type": "coins"}, "tracking": {"report": False}}
    assert build_config(tree, [f"store={url}"]).store_url == url
    assert url in to_yaml(config)

    write_config(config)
    assert load_config(config.run_dir / "config.yaml").store_url == url

    check_resume(config)
    assert ensure_run_folder(config)
    other = f"run.dir={recipe.parent / 'other'}"  # the recipe's own holds a run by now
    assert main(["train", str(recipe), other, "--dry-run"]) == 0
    assert url in capsys.readouterr().out
    assert files_with_password(recipe.parent) == []


def test_a_variable_that_is_not_set_is_refused_before_anything_is_created(
    recipe, monkeypatch, capsys
):
    monkeypatch.delenv("VAULT_PASSWORD")
    before = sorted(recipe.parent.iterdir())
    assert main(["train", str(recipe)]) == 2
    assert "variable VAULT_PASSWORD is not set" in capsys.readouterr().err
    assert [one for one in sorted(recipe.parent.iterdir()) if one.name != "__pycache__"] == before


def test_a_report_of_an_old_run_hides_the_password_that_its_configuration_has():
    page = report_html([], {}, "store:\n  url: postgresql://me:hush@h/d\n", [])
    assert "postgresql://me:***@h/d" in page and "hush" not in page


def test_a_run_of_an_old_configuration_goes_on_with_the_variable(tmp_path, small_config):
    """Its config.yaml has the password; what is said of the difference has not."""
    config = small_config(tmp_path / "run", "store.url=postgresql://me:${env:PW}@one/runs")
    write_config(config)
    written = tmp_path / "run" / "config.yaml"
    written.write_text(written.read_text().replace("${env:PW}", "hush"))
    check_resume(config)
    assert ensure_run_folder(config)

    moved = small_config(tmp_path / "run", "store.url=postgresql://me:${env:PW}@two/runs")
    for check in (check_resume, ensure_run_folder):
        with pytest.raises(ConfigError, match=r"me:\*\*\*@one/runs") as refused:
            check(moved)
        assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    "words", [["store", "URL", "stats"], ["store", "URL", "gc"], ["ui", "URL"]]
)
def test_a_password_on_the_command_line_is_refused(words, capsys):
    url = "postgresql://me:hush@h/d"
    assert main([url if word == "URL" else word for word in words]) == 2
    shown = capsys.readouterr().err
    assert "postgresql://me:${env:STORE_PASSWORD}@h/d" in shown and "hush" not in shown


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("remote_models.judge", "{model: m, base_url: 'https://h/v1?key=hush'}"),
        ("remote_models.judge", "{model: m, base_url: 'https://h/v1?subscription-key=hush'}"),
        ("remote_models.judge", "{model: m, base_url: 'https://me:hush@h/v1'}"),
        ("remote_models.judge", "{model: m, base_url: 'https://h/v1?what=hush'}"),
        ("remote_models.judge", "{model: m, base_url: 'https://h/${env:PW}/v1'}"),
        ("engine.options", "{url: 'https://h/v1?api_key=hush'}"),
        ("tools", "[{type: mcp, name: a, url: 'https://h/mcp?apiKey=hush'}]"),
    ],
)
def test_a_key_in_the_url_of_a_server_is_refused_with_where_it_belongs(key, url, recipe, capsys):
    assert main(["train", str(recipe), f"{key}={url}", "--dry-run"]) == 2
    shown = capsys.readouterr().err
    assert "api_key: ${env:NAME}" in shown.replace("'", "") and "hush" not in shown


def test_the_store_of_a_run_is_the_given_one_whatever_variable_has_the_password(tmp_path):
    """Old runs have the password itself in their configuration."""
    given = "postgresql://me:${env:OTHER}@h/d"
    sources = Sources([given])
    for url in (given, "postgresql://me:${env:PW}@h/d", "postgresql://me:hush@h/d"):
        assert sources.store_url(RunSource("a", "a", None, url)) == given
    for url in ("postgresql://me:hush@elsewhere/d", "postgresql://you:hush@h/d"):
        with pytest.raises(ConfigError, match="a database elsewhere"):
            sources.store_url(RunSource("a", "a", None, url))


@pytest.mark.parametrize(
    "url",
    [
        "mongodb://me:hu/sh@h/d",
        "mongodb://me:hu:sh@h/d",
        "mongodb://me:hu@sh@h:port/d",
        "postgresql://me:hu/sh@h:port/d",
        "postgresql://me:hush@h",
        "nothing://me:hush@h/d",
        "me:hush@h/d",
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(url):
    pytest.importorskip("pymongo")
    with pytest.raises((StoreError, ConfigError)) as refused:
        asyncio.run(open_store(url))
    cause = refused.value.__cause__
    assert not any(part in f"{refused.value} {cause}" for part in ("hu/", "sh@", "hush", "hu@"))


@pytest.mark.slow
def test_a_whole_run_leaves_the_password_nowhere(recipe, capfd, monkeypatch):
    """With a sampler and an engine as processes: not in a file, a line or a list of processes."""
    lines: set[str] = set()
    over = threading.Event()
    start = subprocess._fork_exec

    def watch(words, *rest):
        lines.add(" ".join(map(os.fsdecode, words)))  # /proc has another line of a warm process
        return start(words, *rest)

    monkeypatch.setattr(subprocess, "_fork_exec", watch)

    def look() -> None:
        while not over.is_set():
            for process in psutil.process_iter(["cmdline"]):
                lines.add(" ".join(process.info["cmdline"] or []))
            time.sleep(1)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        keys = ("rollout.samplers=1", "rollout.staleness=1", "tracking.report=false")
        code = main(["train", str(recipe), *keys])
    finally:
        over.set()
        looking.join()

    shown = capfd.readouterr()
    assert code == 0, shown.err

    run = recipe.parent / "runs" / "recipe"
    assert (run / "logs" / "sampler-0.log").is_file()
    assert any("sampler-0" in line for line in lines)
    assert main(["report", str(run)]) == main(["audit", str(run)]) == 0
    assert (run / "report.html").is_file()
    assert files_with_password(recipe.parent) == []
    assert "s3cr" not in shown.out + shown.err + "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["x" * 10**6, "=" + "password" * 10**5, "a:" * 5 * 10**5])
def test_the_search_for_passwords_reads_a_long_text_once(text):
    assert without_passwords(text) == text  # minutes, where it begins again at each character
    assert without_password(text) == text
    assert without_passwords(f"{text} http://u:{PASSWORD[:5]}@h").endswith(" http://u:***@h")
