"""A server at a URL that wants a key: what is said where it is missing or wrong, and where the
command line takes it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import odd_mcp_server
import pytest

from agentevo.agents.tools.toolbox import Toolbox
from agentevo.cli.main import main
from agentevo.config.mcp import MCPFileSection, MCPServerSection
from agentevo.errors import ToolUnavailableError
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task
from agentevo_evolve.evolution.evolve import read_evolution

pytest.importorskip("mcp", reason="the SDK of MCP is not installed")


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        is_known = self.headers.get("authorization") == "Bearer sesame"
        line = odd_mcp_server.answer(json.loads(body)) if is_known else "who are you?"
        self.send_response((202 if line is None else 200) if is_known else 401)
        self.send_header("content-type", "application/json" if is_known else "text/plain")
        self.send_header("content-length", str(len(line or "")))
        self.end_headers()
        self.wfile.write((line or "").encode())

    def do_GET(self):
        self.send_error(401)

    do_DELETE = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def opened(section):
    async def work():
        box = Toolbox([section], [].append)
        async with box.open(Task(id="t"), 0) as tools:
            return len(tools.schemas)

    return run_coroutine(work())


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["http", "sse"])
def test_a_key_that_is_missing_or_wrong_is_named(address, transport, monkeypatch, tmp_path):
    monkeypatch.setenv("THE_KEY", "open-barley")
    reached = {"name": "far", "url": f"{address}/mcp", "transport": transport}
    with pytest.raises(ToolUnavailableError, match=r"HTTP 401: it wants a key: give api_key: \$"):
        opened(MCPServerSection(**reached))
    with pytest.raises(ToolUnavailableError, match=r"HTTP 401: .* variable THE_KEY") as caught:
        opened(MCPServerSection(**reached, api_key="${env:THE_KEY}"))
    assert "barley" not in str(caught.value)

    headers = {"Authorization": "Bearer ${THE_KEY}"}
    entry = {"url": reached["url"], "type": transport, "headers": headers}
    (file := tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"far": entry}}))
    with pytest.raises(ToolUnavailableError, match=r"HTTP 401: .* key in its `headers`") as caught:
        opened(MCPFileSection(file=file))
    assert "barley" not in str(caught.value)


def test_the_command_line_takes_a_key_from_a_variable(address, monkeypatch, capsys):
    monkeypatch.setenv("THE_KEY", "sesame")
    url = f"{address}/mcp"
    assert main(["tools", "inspect", "--api-key", "${env:THE_KEY}", url]) == 0
    assert "measure(what?: string)" in capsys.readouterr().out
    assert main(["tools", "inspect", "--api-key", "sesame", url]) == 2
    said = capsys.readouterr().err
    assert "write ${env:NAME}" in said and "sesame" not in said
    assert main(["tools", "inspect", "--api-key", "${env:THE_KEY}", "python3"]) == 2
    assert "a key is for a URL" in capsys.readouterr().err

    words = ["model.name=m", "evolve.api_key=${env:THE_KEY}"]
    (section,) = read_evolution(url, words).source.sections(None)
    assert section.url == url and opened(section) > 0
