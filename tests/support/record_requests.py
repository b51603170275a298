"""Records what a framework's example asks of the gateway, for gateway/test_recorded_requests.py.
Run it in the example's environment, which `examples/frameworks/table.py --only NAME` makes:

    build/frameworks/openai_agents/bin/python tests/support/record_requests.py openai_agents \\
        tests/gateway/recorded_requests/openai_agents.json

One attempt of the example at a hunt over three boxes, in which the teacher makes no mistake. The
file holds each request's path and body and the gateway's answer.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
sys.path[:0] = [str(EXAMPLES), str(Path(__file__).parent)]

from recorded_ids import ids_in  # noqa: E402

import cold_start  # noqa: E402
from agentevo.agents import Policy  # noqa: E402
from agentevo.config.gateway import GatewaySection  # noqa: E402
from agentevo.gateway.gateway import Gateway  # noqa: E402
from agentevo.models.chat import ChatFormat  # noqa: E402
from agentevo.models.tiny_tokenizer import byte_tokenizer  # noqa: E402
from agentevo.types import Task  # noqa: E402

TASK = Task(
    id="hunt",
    query="Begin with the red box.",
    answer="pearl",
    metadata={"boxes": ["red", "blue", "green"], "treasure": "pearl"},
)


def proxy(gateway: str, exchanges: list[dict[str, Any]]) -> ThreadingHTTPServer:
    """Passes requests on to the gateway, and keeps them with their answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            names = ("authorization", "x-api-key", "content-type")
            headers = {name: self.headers[name] for name in names if name in self.headers}
            request = urllib.request.Request(gateway + self.path, body, headers)
            with urllib.request.urlopen(request, timeout=300) as answer:
                said = answer.read()

            ids = ids_in(said.decode())
            exchanges.append({"path": self.path, "request": json.loads(body), "ids": ids})
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *arguments: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def attempt(name: str, base: str, key: str) -> None:
    if (EXAMPLES / name / "agent.js").exists():
        task = json.dumps(
            {"query": TASK.query, "answer": TASK.answer, "metadata": dict(TASK.metadata)}
        )
        variables = {"OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": key, "AGENTEVO_TASK": task}
        words = ["node", str(EXAMPLES / name / "agent.js")]
        done = subprocess.run(
            words, env=os.environ | variables, capture_output=True, text=True, timeout=300
        )
        assert done.stdout.strip().endswith('{"reward":1}'), done
        return

    policy = SimpleNamespace(
        base_url=f"{base}/v1", api_key=key, session=SimpleNamespace(base=base, key=key)
    )
    reward = importlib.import_module(name).rollout(TASK, policy)
    assert (asyncio.run(reward) if inspect.isawaitable(reward) else reward) == 1.0


async def record(name: str) -> list[dict[str, Any]]:
    cold_start.GIVES_UP = 0.0
    tokenizer = byte_tokenizer(cold_start.CONTEXT)
    tokenizer.chat_template = cold_start.CHAT_TEMPLATE
    gateway = Gateway(GatewaySection(), model="policy", timeout_s=300.0)
    teacher = {"opens": cold_start.open_box, "says": str}
    teacher |= getattr(importlib.import_module(name), "TEACHER", {})
    conversation = cold_start.TaughtConversation(ChatFormat(tokenizer), TASK, **teacher)
    policy = Policy(conversation, gateway)
    exchanges: list[dict[str, Any]] = []
    server = proxy(policy.session.base, exchanges)
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        await asyncio.to_thread(attempt, name, base, policy.api_key)
    finally:
        server.shutdown()
        await policy.close()
        await asyncio.to_thread(gateway.close)

    return exchanges


if __name__ == "__main__":
    recorded = asyncio.run(record(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(recorded, indent=1) + "\n")
