"""A database that is away at the start: who waits for it says so, without the password, and gives
up with a clear error."""

from __future__ import annotations

import asyncio
import importlib
import socket
import sqlite3
import time

import pytest
from sqlalchemy.engine import make_url

from agentevo.cli.main import main
from agentevo.errors import DeadlineExceededError, StoreUnavailableError
from agentevo.runs.folder import store_opening
from agentevo.runs.folder.store_opening import open_run_store
from agentevo.runs.processes import sample
from agentevo.runtime import retry as patience
from agentevo.store import open_store, sqlite, transactions
from agentevo.store.records import RETRIES

pytest.importorskip("asyncpg")
postgresql = importlib.import_module("agentevo.store.postgresql")  # not while the tests wait


@pytest.fixture
def closed_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
def test_a_closed_port(closed_port):
    told = []
    with pytest.raises(
        StoreUnavailableError,
        match=r"opening the store: stopped trying after 3 s: .*start the database, or correct",
    ):
        asyncio.run(
            open_run_store(
                f"postgresql://me:hush@127.0.0.1:{closed_port}/runs",
                within_s=3.0,
                notify=told.append,
            )
        )

    assert (
        len(told) == 1
        and f"postgresql://me:***@127.0.0.1:{closed_port}/runs" in told[0]
        and "Connect call failed" in told[0]
    )


@pytest.mark.slow
def test_a_host_that_takes_connections_and_says_nothing(monkeypatch):
    monkeypatch.setattr(patience, "SILENT_S", 0.2)
    told = []
    begun = time.monotonic()

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(
            StoreUnavailableError, match=r"stopped trying after 1 s: .*does not answer"
        ) as raised:
            asyncio.run(
                open_run_store(
                    f"postgresql://me:hush@127.0.0.1:{silent.getsockname()[1]}/runs",
                    within_s=1.0,
                    notify=told.append,
                )
            )

    assert 0.9 < time.monotonic() - begun < 50, "the driver's own limit is a minute"
    assert (
        len(told) == 1
        and told[0].endswith("no answer yet")
        and "hush" not in told[0] + str(raised.value)
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "learn", "sample"])
def test_the_commands_say_what_they_wait_for(command, closed_port, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(patience, "REPORT_INTERVAL_S", 0.3)
    monkeypatch.setattr(sample, "STORE_RETRY_S", 1.0)
    monkeypatch.setattr(store_opening, "OPEN_TIMEOUT_S", 1.0)
    monkeypatch.setenv("PASSWORD_OF_RUNS", "hush")
    url = f"store.url=postgresql://me:${{env:PASSWORD_OF_RUNS}}@127.0.0.1:{closed_port}/runs"
    assert main([command, "coins", f"run.dir={tmp_path / 'run'}", "model.name=tiny", url]) != 0

    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if "waiting until" in line]
    assert lines and all("Connect call failed" in line for line in lines)
    assert "stopped trying after 1 s" in captured.err and "correct store.url" in captured.err
    assert "hush" not in captured.err + captured.out


def run_at(url, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"environment: {{type: coins}}\nstore: {{url: '{url}'}}\n")
    return str(folder)


@pytest.mark.parametrize(
    "words",
    [
        ["store", "URL", "stats"],
        ["store", "RUN", "gc"],
        ["store", "URL", "export", "OUT"],
        ["trajectories", "show", "RUN"],
        ["audit", "RUN"],
    ],
    ids=" ".join,
)
def test_nobody_waits_long_at_a_prompt_for_a_database_that_is_away(words, tmp_path, capsys):
    """Its host takes connections and says nothing. The work of these commands may take an hour."""
    begun = time.monotonic()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/runs"
        names = {"URL": url, "RUN": run_at(url, tmp_path), "OUT": str(tmp_path / "out.jsonl")}
        assert main([*(names.get(word, word) for word in words), "--wait=0.3"]) == 1

    assert time.monotonic() - begun < 300

    err = capsys.readouterr().err
    assert "opening the store: stopped trying after 0.3 s" in err and "does not answer" in err
    assert "or wait longer with --wait SECONDS" in err


def test_a_database_that_goes_away_ends_a_long_call_in_a_minute(monkeypatch):
    """Its deadline is for its work. A run calls again, for ten minutes."""
    monkeypatch.setattr(transactions, "AWAY_S", 0.2)
    store = postgresql.PostgreSQLStore(
        make_url("postgresql://127.0.0.1/runs"),
        "agentevo",
        timeout_s=3600.0,
        retries=RETRIES,
        clock=None,
        read_only=False,
    )
    store._is_open = True

    async def refused(*_):
        raise ConnectionRefusedError("Connect call failed")

    monkeypatch.setattr(store, "_transact", refused)
    with pytest.raises(StoreUnavailableError, match="counts: Connect call failed"):
        asyncio.run(asyncio.wait_for(store.counts(), 300.0))


def test_a_lock_is_waited_for_no_longer_either(tmp_path, monkeypatch):
    for module in (transactions, sqlite):
        monkeypatch.setattr(module, "AWAY_S", 0.3)

    url = f"sqlite:///{tmp_path / 'store.sqlite'}"

    async def work():
        async with await open_store(url, timeout_s=3600.0) as store:
            holder = sqlite3.connect(tmp_path / "store.sqlite", isolation_level=None)
            holder.execute("BEGIN IMMEDIATE")
            try:
                with pytest.raises(DeadlineExceededError, match=r"no answer within 0\.3 s"):
                    await asyncio.wait_for(store.queue_again(), 300.0)
            finally:
                holder.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    "words",
    [
        ["trajectories", "show", "RUN"],
        ["report", "RUN"],
        ["audit", "RUN"],
        ["store", "RUN", "stats"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("url", ["7", "[a]", "true"])
def test_a_url_that_is_no_text_is_refused_in_one_line(words, url, tmp_path, capsys):
    run_at("", tmp_path)
    path = tmp_path / "run" / "config.yaml"
    path.write_text(f"environment: {{type: coins}}\nstore: {{url: {url}}}\n")
    code = main([str(tmp_path / "run") if word == "RUN" else word for word in words])
    errors = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and "store.url" in errors[0] and str(path) in errors[0], errors
