"""Records what a client asks of an answer's form, for gateway/test_recorded_forms.py. Run it in an
environment that has the client's package, such as one of `examples/frameworks/table.py`:

    build/frameworks/openai_agents/bin/python tests/support/record_forms.py openai_agents \\
        tests/gateway/recorded_forms/openai_agents.json

The server here answers every request with the same JSON; the file holds each path and body.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel


class Move(BaseModel):
    """Where to go."""

    side: Literal["left", "right"]
    steps: int


SAID = '{"side":"left","steps":1}'
CHAT = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": SAID},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
RESPONSE = {
    "id": "r",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "model": "policy",
    "output": [
        {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": SAID, "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {
        "input_tokens": 1,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 2,
    },
}


def server(exchanges: list[dict[str, Any]]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            exchanges.append({"path": self.path, "request": body})

            said = json.dumps(RESPONSE if self.path.endswith("/responses") else CHAT).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *arguments: Any) -> None:
            """Says nothing."""

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    return made


def openai_sdk(base_url: str) -> None:
    """`parse` with a model of pydantic, a strict tool made of one, and biases."""
    import openai

    client = openai.OpenAI(base_url=base_url, api_key="k")
    ask: Any = [{"role": "user", "content": "left or right ?"}]
    client.chat.completions.parse(model="policy", messages=ask, response_format=Move)
    client.responses.parse(model="policy", input="left or right ?", text_format=Move)
    tool = openai.pydantic_function_tool(Move, name="move")
    client.chat.completions.parse(model="policy", messages=ask, tools=[tool])
    client.chat.completions.create(
        model="policy",
        messages=ask,
        response_format={"type": "json_object"},
        logit_bias={"5": -100},
        frequency_penalty=0.5,
    )


def openai_agents(base_url: str) -> None:
    """An agent with a type for its output and a tool, through both of its models."""
    import openai

    import agents

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=base_url, api_key="k")

    @agents.function_tool
    def look(side: str) -> str:
        """Looks to a side."""
        return side

    models = (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel)
    for kind in models:
        model = kind(model="policy", openai_client=client)
        agent = agents.Agent(name="a", model=model, tools=[look], output_type=Move)
        asyncio.run(agents.Runner.run(agent, "left or right ?"))


CLIENTS: dict[str, Callable[[str], None]] = {
    "openai_sdk": openai_sdk,
    "openai_agents": openai_agents,
}


def main(name: str, file: str) -> None:
    exchanges: list[dict[str, Any]] = []
    listening = server(exchanges)
    CLIENTS[name](f"http://127.0.0.1:{listening.server_address[1]}/v1")
    listening.shutdown()
    Path(file).write_text(json.dumps(exchanges, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
