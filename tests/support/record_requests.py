"""Records what a client asks of the gateway, for gateway/test_recorded_requests.py: a framework's
example, or one of gateway/clients/. Run it in an environment that has the client's packages and,
beside them, those of AgentEvo (`examples/frameworks/table.py --only NAME` makes one):

    build/frameworks/openai_agents/bin/python tests/support/record_requests.py openai_agents \\
        tests/agents/gateway/recorded_requests/openai_agents.json openai-agents
    NODE_FOLDER=... .venv/bin/python tests/support/record_requests.py vercel_ai:anthropic \\
        tests/agents/gateway/recorded_requests/vercel_anthropic.json ai @ai-sdk/anthropic

One attempt of the client at a hunt over three boxes, in which the teacher makes no mistake. The
file holds the versions of the packages that are named, each request's method, path, headers and
body, and the ids in the gateway's answer; long texts are cut, and what is this machine's is left
out.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
CLIENTS = Path(__file__).parents[1] / "gateway" / "clients"
sys.path[:0] = [str(EXAMPLES), str(CLIENTS), str(Path(__file__).parent)]

from recorded_ids import ids_in  # noqa: E402

import cold_start  # noqa: E402
from agentevo.agents import Policy  # noqa: E402
from agentevo.agents.gateway.gateway import Gateway  # noqa: E402
from agentevo.config.gateway import GatewaySection  # noqa: E402
from agentevo.models.chat.chat_format import ChatFormat  # noqa: E402
from agentevo.models.tiny_tokenizer import byte_tokenizer  # noqa: E402
from agentevo.types import Task  # noqa: E402

TASK = Task(
    id="hunt",
    query="Begin with the red box.",
    answer="pearl",
    metadata={"boxes": ["red", "blue", "green"], "treasure": "pearl"},
)


LONG_TEXT = 120
"""Characters; of a longer text this many are kept."""
UUID = re.compile(r"(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
HEADERS = ("accept", "anthropic-beta", "anthropic-version", "content-encoding", "user-agent")
"""Those that are kept."""


def proxy(gateway: str, exchanges: list[dict[str, Any]]) -> ThreadingHTTPServer:
    """Passes requests on to the gateway, and keeps them with the ids of their answers."""

    class Handler(BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            names = ("authorization", "x-api-key", "content-type", *HEADERS)
            headers = {name: self.headers[name] for name in names if name in self.headers}
            request = urllib.request.Request(
                gateway + self.path, body or None, headers, method=self.command
            )
            try:
                answer = urllib.request.urlopen(request, timeout=300)
            except urllib.error.HTTPError as error:
                answer = error

            with answer:
                said = answer.read()

            exchanges.append(
                {
                    "method": self.command,
                    "path": self.path,
                    "headers": {name: headers[name] for name in HEADERS if name in headers},
                    "request": json.loads(body) if body else None,
                    "ids": ids_in(said.decode()),
                }
            )
            self.send_response(answer.status)
            self.send_header("content-type", answer.headers["content-type"])
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_HEAD = do_POST = pass_on

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
    module, *options = name.split(":")
    reward = importlib.import_module(module).rollout(TASK, policy, *options)
    assert (asyncio.run(reward) if inspect.isawaitable(reward) else reward) == 1.0


async def record(name: str) -> list[dict[str, Any]]:
    cold_start.GIVES_UP = 0.0
    tokenizer = byte_tokenizer(cold_start.CONTEXT)
    tokenizer.chat_template = cold_start.CHAT_TEMPLATE
    gateway = Gateway(GatewaySection(), model="policy", timeout_s=300.0)
    teacher = {"opens": cold_start.open_box, "says": str}
    teacher |= getattr(importlib.import_module(name.split(":")[0]), "TEACHER", {})
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


def without_machine(exchanges: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same without folders, the kernel's version and ids of devices and installations, and
    with every UUID as its number."""
    text = json.dumps(exchanges, ensure_ascii=False)
    for pattern, replacement in {
        r"/tmp/tmp\w+": "work",
        re.escape(platform.release()): "6.1",
        r"\b[0-9a-f]{64}\b": "0" * 64,
    }.items():
        text = re.sub(pattern, replacement, text)

    numbers: dict[str, int] = {}
    text = UUID.sub(
        lambda uuid: f"00000000-0000-4000-8000-{numbers.setdefault(uuid[0], len(numbers)):012d}",
        text,
    )
    return json.loads(text, object_hook=_with_short_texts)


def _with_short_texts(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value[:LONG_TEXT] if isinstance(value, str) else value for key, value in fields.items()
    }


def version_of(package: str) -> str:
    """Of a package for Python, or one in $NODE_FOLDER."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        folder = Path(os.environ["NODE_FOLDER"], "node_modules", package)
        return str(json.loads((folder / "package.json").read_text())["version"])


if __name__ == "__main__":
    client, file, *packages = sys.argv[1:]
    recorded = {
        "packages": {package: version_of(package) for package in packages},
        "exchanges": without_machine(asyncio.run(record(client))),
    }
    Path(file).write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
