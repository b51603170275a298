"""Doctor asks the database of `store.url` before a run does."""

from __future__ import annotations

import asyncio

import pytest
from servers import unused_name

from agentevo.config import build_config
from agentevo.errors import NoStoreError
from agentevo.runs.doctor.diagnostics import check_recipe
from agentevo.runs.doctor.services import check_store_server
from agentevo.store import open_store
from agentevo.types import Task


def recipe(url, folder):
    tree = {
        "environment": {"type": "coins"},
        "model": {"name": "tiny"},
        "store": {"url": url},
        "run": {"dir": str(folder / "run")},
    }
    return build_config(tree, folder=folder)


@pytest.mark.slow
def test_a_database_that_is_away_is_wrong_and_no_group_is_played(tmp_path, monkeypatch):
    monkeypatch.setattr("agentevo.runs.doctor.services.ANSWER_S", 1.0)
    monkeypatch.setenv("SECRET", "hunter22")
    for url in ("mongodb://me:${env:SECRET}@127.0.0.1:9/x", "postgresql://me@127.0.0.1:9/x"):
        store, attempts = check_recipe(recipe(url, tmp_path))
        assert (store.status, attempts.status) == ("wrong", "wrong")
        assert "127.0.0.1:9" in store.finding and "correct store.url" in store.finding
        assert "hunter22" not in str(store)
        assert "not played" in attempts.finding


def test_a_file_is_not_asked(tmp_path):
    assert check_store_server(recipe(f"sqlite:///{tmp_path / 'x'}", tmp_path)) == []
    assert check_store_server(recipe(None, tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("server", ["mongodb", "postgresql"])
def test_a_database_that_answers_is_left_as_it_is(server, request, tmp_path):
    url = request.getfixturevalue(server).url(unused_name())
    (found,) = check_store_server(recipe(url, tmp_path))
    assert found.status == "good" and "holds no run yet" in found.finding

    async def fill():
        with pytest.raises(NoStoreError):
            await open_store(url, create=False)
        async with await open_store(url) as store:
            await store.add_tasks([Task(id="a", environment="coins", seed=0)])

    asyncio.run(fill())
    (found,) = check_store_server(recipe(url, tmp_path))
    assert found.status == "warning" and "1 tasks of another run" in found.finding
