"""A server whose results break the protocol: each costs its call, and the server goes on."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import odd_mcp_server
import pytest

from agentevo.agents.tools import mcp_stdio
from agentevo.agents.tools.toolbox import Toolbox
from agentevo.config.mcp import MCPServerSection
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task, ToolCall

pytest.importorskip("mcp", reason="the SDK of MCP is not installed")
SERVER = str(Path(__file__).parents[2] / "support" / "odd_mcp_server.py")


class _Handler(BaseHTTPRequestHandler):
    """Streamable HTTP; at /sse each answer is a stream of one event."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        line = odd_mcp_server.answer(json.loads(body))
        if line is None:
            self.send_response(202)
            self.send_header("content-length", "0")
            self.end_headers()
            return

        is_stream = self.path == "/events"
        data = f"event: message\ndata: {line}\n\n" if is_stream else line
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if is_stream else "application/json")
        self.send_header("content-length", str(len(data.encode())))
        self.end_headers()
        self.wfile.write(data.encode())

    def do_GET(self):
        self.send_error(405)

    do_DELETE = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def port():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["stdio", "json", "events"])
def section(request):
    if request.param == "stdio":
        reached = {"command": sys.executable, "args": (SERVER,)}
    else:
        reached = {"url": f"http://127.0.0.1:{request.getfixturevalue('port')}/{request.param}"}
    return MCPServerSection(name="odd", timeout_s=300, outcome="count", **reached)


def played(section, calls):
    """The results of calls in one attempt, its outcome and its metrics."""

    async def work():
        box = Toolbox([section], [].append)
        async with box.open(Task(id="t"), 0) as tools:
            results = []
            for name, arguments in calls:
                results += await tools.call([ToolCall(name, json.dumps(arguments))])
            outcomes = await tools.outcomes()

        await box.close()
        return results, outcomes["odd"], tools

    return run_coroutine(work())


@pytest.mark.slow
def test_an_odd_result_costs_its_call_and_the_server_goes_on(section):
    odd_mcp_server.count = 0
    kinds = [*odd_mcp_server.ODD, "error"]
    wrong = [("give", {"what": kind}) for kind in kinds]
    wrong += [("measure", {"what": kind}) for kind in ("missing", "a list", "other types")]
    calls = [("add", {}), *wrong, ("measure", {"what": "right"}), ("add", {})]
    results, outcome, tools = played(section, calls)

    first, *odd, right, last = results
    assert (first.text, right.text, last.text, outcome) == ("1", "fine", "2", 2)
    for kind, result in zip([*kinds, *wrong[len(kinds) :]], odd, strict=True):
        assert result.is_error and len(result.text) < 300, (kind, result.text)
        assert "gone" not in result.text and "\n" not in result.text, (kind, result.text)
    assert "no luck" in odd[len(kinds) - 1].text
    assert tools.metrics["num_tool_failures"] == 0


def test_half_of_a_surrogate_pair_costs_no_minute(section):
    ((result,), _, tools) = played(section, [("give", {"what": "half a pair"})])
    if section.command is not None:
        assert result.text == "a \ufffd \U0001f600 b" and not result.is_error
    assert tools.metrics["num_tool_timeouts"] == tools.metrics["num_tool_failures"] == 0


def test_an_odd_tool_costs_no_other_tool(section):
    _, _, tools = played(section, [])
    functions = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}
    assert list(functions) == ["give", "measure", "add", "loose"]  # `count` is the outcome
    assert functions["give"]["parameters"] == odd_mcp_server.CHOICE
    assert functions["add"]["description"] == ""
    for name in ("add", "loose"):
        assert functions[name]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize("kind", ["long", "long, with the id at its end"])
def test_a_line_without_end_costs_its_call(kind, monkeypatch):
    monkeypatch.setattr(mcp_stdio, "MAX_MESSAGE", 200_000)
    section = MCPServerSection(
        name="odd", command=sys.executable, args=(SERVER,), timeout_s=300, outcome="count"
    )
    calls = [("add", {}), ("give", {"what": kind}), ("add", {})]
    (first, long, last), outcome, _ = played(section, calls)
    assert (first.text, last.text, outcome) == ("1", "2", 2)
    assert "more than 200,000 bytes" in long.text and long.is_error
