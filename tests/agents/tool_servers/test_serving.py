"""Tools behind MCP: `agentevo tools serve` over stdin and stdout and over HTTP, asked by our own
client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import agentevo.agents.tool_servers  # noqa: F401 (registers them)
from agentevo.agents.tools.toolbox import Toolbox
from agentevo.config.mcp import MCPServerSection
from agentevo.config.tools import FunctionToolSection
from agentevo.errors import EnvironmentFailure, ToolUnavailableError
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task, ToolCall

pytest.importorskip("mcp", reason="the SDK of MCP is not installed")
SOURCE = str(Path(__file__).parents[3] / "src")
SERVE = ("-m", "agentevo", "tools", "serve")


def shop(number):
    """A database of its own for each number, and what its attempt is to do."""
    setup = f"CREATE TABLE t (x); INSERT INTO t VALUES ({number})"
    return Task(id=f"t{number}", metadata={"setup": setup, "solved_by": "UPDATE t SET x = x + 1"})


def stdio(*words):
    return MCPServerSection(
        name="s",
        command=sys.executable,
        args=(*SERVE, *words),
        env={"PYTHONPATH": SOURCE},
        send_task=True,
    )


async def attempt(box, task, *calls):
    """The texts of the results, and what the attempt is worth."""
    async with box.open(task, 7) as tools:
        texts = []
        for name, given in calls:
            (result,) = await tools.call([ToolCall(name, json.dumps(given))])
            texts.append(result.text)
        return texts, (await tools.outcomes()).get("s")


def played(section, *attempts):
    """Attempts at once, each a task and its calls."""

    async def work():
        box = Toolbox([section], [].append)
        try:
            return await asyncio.gather(*[attempt(box, *one) for one in attempts])
        finally:
            await box.close()

    return run_coroutine(work())


READ = ("query", {"sql": "SELECT x FROM t"})
STEP = ("execute", {"sql": "UPDATE t SET x = x + 1"})


@pytest.mark.slow
def test_a_process_has_the_task_of_its_attempt():
    section = stdio("database").model_copy(update={"outcome": "outcome"})
    calls = (READ, STEP, ("query", {"sql": "x"}), ("execute", {}))
    ((texts, worth),) = played(section, (shop(3), *calls))
    assert texts[:2] == ["x\n3", "Done: 1 row changed."] and worth == 1.0
    assert texts[2].startswith("Error: the statement failed") and "sql" in texts[3]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The URL of databases over HTTP, which need a key."""
    errors = tmp_path_factory.mktemp("served") / "stderr"
    words = [*SERVE, "database", "--http", "--api-key", "${env:OF_THE_TEST}"]
    with errors.open("wb") as out:
        environment = os.environ | {"PYTHONPATH": SOURCE, "OF_THE_TEST": "sesame"}
        process = subprocess.Popen([sys.executable, *words], stderr=out, env=environment)

    try:
        for _ in range(3000):
            found = re.search(r"at (http\S+)", errors.read_text())
            if found or process.poll() is not None:
                break
            asyncio.run(asyncio.sleep(0.1))

        assert found, errors.read_text()

        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
        assert "Traceback" not in errors.read_text()
    finally:
        process.kill()


@pytest.fixture
def section(served, monkeypatch):
    monkeypatch.setenv("OF_THE_TEST", "sesame")
    return MCPServerSection(
        name="s", url=served, api_key="${env:OF_THE_TEST}", send_task=True, outcome="outcome"
    )


@pytest.mark.slow
def test_every_session_over_http_has_a_state_of_its_own(section):
    done = played(section, *[(shop(number), READ, STEP, READ) for number in range(8)])
    assert [texts for texts, _ in done] == [
        [f"x\n{number}", "Done: 1 row changed.", f"x\n{number + 1}"] for number in range(8)
    ]
    assert {worth for _, worth in done} == {1.0}
    (first,) = played(section, (shop(0), READ))
    assert first == (["x\n0"], 0.0)


@pytest.mark.slow
def test_a_policy_reads_the_same_of_a_tool_here_and_there(section):
    async def schemas(entry):
        box = Toolbox([entry], [].append)
        try:
            async with box.open(shop(1), 0) as tools:
                return json.dumps(tools.schemas)
        finally:
            await box.close()

    here = run_coroutine(schemas(FunctionToolSection(name="database")))
    assert run_coroutine(schemas(section)) == here


def test_a_task_that_headers_can_not_hold_is_told(section):
    large = Task(id="t", metadata={"setup": "-- " + "x" * 30_000})
    with pytest.raises(EnvironmentFailure, match="use a server that is started by a `command`"):
        played(section, (large, READ))


def test_a_task_that_can_not_be_played_fails_its_attempt(section):
    with pytest.raises(ToolUnavailableError, match="the SQL of metadata"):
        played(section, (Task(id="t", metadata={"setup": "nonsense"}), READ))


@pytest.mark.slow
def test_a_path_without_a_server_is_told(section, served):
    without = section.model_copy(update={"url": served.removesuffix("/mcp"), "send_task": False})
    with pytest.raises(ToolUnavailableError, match="most are at /mcp, or at /sse"):
        played(without, (shop(0), READ))


@pytest.mark.slow
def test_strangers_and_nonsense_are_refused(served):
    hello = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accepts = {"accept": "application/json, text/event-stream"}
    assert httpx.post(served, json=hello, headers=accepts).status_code == 401

    key = accepts | {"authorization": "Bearer sesame"}
    later = httpx.post(served, json=hello, headers=key | {"mcp-protocol-version": "2099-01-01"})
    assert later.status_code == 400 and later.json()["error"]["data"]["supported"]
    assert httpx.post(served, json=hello, headers=key).status_code == 400, "it has no session"
    assert httpx.post(served, content=b"{" * 100, headers=key).status_code >= 400
    assert httpx.post(served, content=b" " * (5 * 2**20), headers=key).status_code == 413

    strange = key | {"mcp-session-id": "none"}
    assert httpx.post(served, json=hello, headers=strange).status_code == 404

    begin = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "x", "version": "1"},
    }
    first = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": begin}
    session = httpx.post(served, json=first, headers=key).headers["mcp-session-id"]
    junk = key | {"mcp-session-id": session, "agentevo-seed": "x"}
    for _ in range(2):
        assert "agentevo-seed" in httpx.post(served, json=hello, headers=junk).text.lower()

    rebound = key | {"host": "evil.example", "origin": "http://evil.example"}
    assert httpx.post(served, json=first, headers=rebound).status_code in (403, 421)


OWN = """
import agentevo
from agentevo.agents.tools.tool import ToolResult

@agentevo.tool("adder")
class Adder:
    def __init__(self, start: int = 0):
        self.sum = start
    def add(self, number: int) -> int:
        '''Adds.'''
        if number < 0:
            raise agentevo.ToolError("not less than nothing")
        if number > 99:
            raise RuntimeError("too much")
        self.sum += number
        return self.sum
"""


@pytest.mark.slow
def test_tools_of_a_user_are_served(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    words = ("adder", "start=3", "--import", str(tmp_path / "own.py"))
    calls = [("add", {"number": number}) for number in (4, -1, 100, "x", 5)]
    ((texts, worth),) = played(stdio(*words), (Task(id="t"), *calls))
    assert texts[0] == "7" and texts[1] == "Error: not less than nothing" and texts[4] == "12"
    assert "the tool failed" in texts[2] and "too much" in texts[2] and "integer" in texts[3]
    assert worth is None
