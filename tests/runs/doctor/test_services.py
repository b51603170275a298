"""Doctor asks the servers that a recipe needs before a run does."""

from __future__ import annotations

import pytest
from mcp_manager import Manager
from remote_server import RemoteServer, fails, gives

from agentevo.config import build_config
from agentevo.runs.doctor.diagnostics import check_recipe
from agentevo.runs.doctor.services import check_services


@pytest.fixture
def checks(tmp_path):
    """Checks of a recipe with these tools and remote models, by name."""
    (tmp_path / "tasks.jsonl").write_text('{"query": "q", "answer": 4}\n' * 1)

    def check(*tools, check=check_services, **models):
        tree = {
            "model": {"name": "tiny"},
            "tasks": "tasks.jsonl",
            "rewards": ["numeric"],
            "agent": {"type": "tool_agent", "tools": list(tools)},
            "remote_models": models,
        }
        return {one.name: one for one in check(build_config(tree, folder=tmp_path))}

    return check


def served(*names):
    return gives({"data": [{"id": name} for name in names]})


@pytest.mark.slow
def test_servers_that_answer_are_good_and_names_of_several_are_told(checks):
    with Manager() as manager, RemoteServer(served("qwen", "llama")) as server:
        entry = {"type": "mcp_manager", "url": manager.node_url}
        found = checks(
            {**entry, "name": "one", "servers": ["web"]},
            {**entry, "name": "two", "include": ["fetch_url", "count"]},
            helper={"model": "qwen", "base_url": server.base_url},
        )
        assert manager.calls == []

    assert found["tools one"].status == "good"
    assert "2 tools in" in found["tools one"].finding and "fetch_url" in found["tools one"].finding
    assert found["names of tools"].status == "warning"
    assert "several entries have fetch_url:" in found["names of tools"].finding
    assert found["remote model helper"].status == "good"


@pytest.mark.slow
def test_a_server_that_should_be_there_is_not_waited_for_as_a_run_does(checks, monkeypatch):
    monkeypatch.setattr("agentevo.runs.doctor.services.ANSWER_S", 3.0)
    entry = {"type": "mcp_manager", "url": "http://127.0.0.1:9/mcpapi", "start_timeout_s": 600}
    (found,) = checks(entry).values()
    assert found.status == "wrong" and "no tools listed within 3 s" in found.finding
    assert found.finding.count("the MCP manager") == 1 and "start it" in found.finding


@pytest.mark.slow
def test_what_is_missing_is_wrong_and_nothing_is_played(checks, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with RemoteServer(served("qwen-14b")) as server, RemoteServer(fails(401)) as closed:
        with Manager() as manager:
            gone = manager.node_url

        found = checks(
            {"type": "mcp_manager", "url": gone, "start_timeout_s": 0.2},
            {"type": "mcp_manager", "name": "keyed", "url": gone, "api_key": "${env:NO_SUCH_KEY}"},
            check=check_recipe,
            helper={"model": "qwen-15b", "base_url": server.base_url},
            judge={"model": "m", "base_url": closed.base_url},
            spare={"model": "m", "api_key": "${env:NO_SUCH_KEY}"},
        )

    assert {one.status for one in found.values()} == {"wrong"}
    assert "no tools listed" in found["tools manager"].finding
    assert "NO_SUCH_KEY holds no key" in found["tools keyed"].finding
    assert "serves no 'qwen-15b': did you mean 'qwen-14b'?" in found["remote model helper"].finding
    assert "refuses" in found["remote model judge"].finding
    assert "NO_SUCH_KEY is not set" in found["remote model spare"].finding
    assert found["attempts"].finding == "not played without these servers"


def test_a_server_that_does_not_list_its_models_is_no_error(checks):
    with Manager() as manager, RemoteServer(fails(404)) as server:
        entry = {"type": "mcp_manager", "url": manager.node_url}
        found = checks(entry, helper={"model": "m", "base_url": server.base_url})
    assert found["remote model helper"].status == "warning"
