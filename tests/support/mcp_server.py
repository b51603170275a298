"""An MCP server with a state, which breaks in every way that it is asked to.

python mcp_server.py [stdio | sdk | http PORT | sse PORT] [--slow SECONDS]

`stdio` speaks the protocol by itself, because the SDK takes a second of CPU to import; the others
are the SDK's server with the same tools.
"""

import inspect
import json
import os
import sys
import threading
import time
from typing import Any

told = json.loads(os.environ.get("AGENTEVO_TASK", "{}"))
state = {"count": int(told.get("metadata", {}).get("count", 0))}
JSON_TYPES = {int: {"type": "integer"}, float: {"type": "number"}, str: {"type": "string"}, Any: {}}


def add(number: int) -> str:
    """Adds a number to the count.

    Args:
        number: What is added.
    """
    state["count"] += number
    return str(state["count"])


def worth() -> str:
    """What the attempt is worth."""
    return json.dumps({"count": state["count"]})


def refuse() -> str:
    """Raises."""
    raise ValueError("not today")


def wait(seconds: float) -> str:
    """Waits, and answers others meanwhile."""
    time.sleep(seconds)
    return "waited"


def hang() -> str:
    """Answers nobody any more."""
    time.sleep(600)
    return "never"


def die() -> str:
    """Ends the server."""
    print("no biscuits\nout of cheese", file=sys.stderr, flush=True)
    os._exit(3)


def flood(megabytes: int) -> str:
    """Says a lot."""
    return "x" * (megabytes * 2**20)


def garbage() -> str:
    """Writes what is no JSON."""
    sys.stdout.buffer.write(b"\xff\xfe{]\n" * 3)
    sys.stdout.buffer.flush()
    return "done"


def echo(value: Any) -> str:
    """Gives it back."""
    return json.dumps(value)


def grow() -> str:
    """Gets a new tool."""
    TOOLS["new"] = new
    return "grown"


def new() -> str:
    """A new one."""
    return "new"


def rules(tone: str, length: str = "short") -> str:
    """How to count."""
    return f"Count in a {tone} voice, and be {length}."


def now() -> str:
    """The count."""
    return str(state["count"])


def half(number: str) -> str:
    """Half of a number."""
    return str(int(number) / 2)


FIRST = (add, worth, refuse, wait, hang, die, flood, garbage, echo, grow)
TOOLS = {function.__name__: function for function in FIRST}
RESOURCE = {"uri": "count://now", "name": "now", "description": "The count."}
TEMPLATE = {"uriTemplate": "count://{number}/half", "name": "half"}
TEMPLATE["description"] = "Half of a number."


def describe(function: Any) -> dict[str, Any]:
    """A tool as `tools/list` has it."""
    taken = inspect.signature(function).parameters
    schema = {"type": "object", "required": list(taken)}
    schema["properties"] = {name: JSON_TYPES[one.annotation] for name, one in taken.items()}
    return {"name": function.__name__, "description": function.__doc__, "inputSchema": schema}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The result of `tools/call`."""
    try:
        function = TOOLS[name]
        for key, parameter in inspect.signature(function).parameters.items():
            if parameter.annotation is int and not isinstance(arguments[key], int):
                raise TypeError(f"{key} is no integer")
        text, is_error = function(**arguments), False
    except Exception as error:  # noqa: BLE001 (the client is told)
        text, is_error = f"Error executing tool {name}: {error}", True

    return {"content": [{"type": "text", "text": text}], "isError": is_error}


def read(uri: str) -> str:
    """The text of a resource. Raises KeyError for one that is none."""
    if uri == RESOURCE["uri"]:
        return now()
    number, _, kind = uri.removeprefix("count://").partition("/")
    if kind != "half":
        raise KeyError(f"there is no resource {uri}")
    return half(number)


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The result of a request."""
    match method:
        case "initialize":
            offers = {"tools": {"listChanged": True}, "prompts": {}, "resources": {}}
            about = {"serverInfo": {"name": "counter", "version": "1"}, "capabilities": offers}
            return {"protocolVersion": params["protocolVersion"], **about}
        case "tools/list":
            return {"tools": [describe(function) for function in TOOLS.values()]}
        case "tools/call":
            return call(params["name"], params.get("arguments") or {})
        case "prompts/list":
            taken = [{"name": "tone", "required": True}, {"name": "length", "required": False}]
            about = {"name": "rules", "description": "How to count.", "arguments": taken}
            return {"prompts": [about]}
        case "prompts/get":
            if params["name"] != "rules":
                raise KeyError(f"there is no prompt {params['name']}")
            said = {"type": "text", "text": rules(**params["arguments"])}
            return {"messages": [{"role": "user", "content": said}]}
        case "resources/list":
            return {"resources": [RESOURCE]}
        case "resources/templates/list":
            return {"resourceTemplates": [TEMPLATE]}
        case "resources/read":
            return {"contents": [{"uri": params["uri"], "text": read(params["uri"])}]}
        case "ping":
            return {}
    raise KeyError(f"there is no method {method}")


def reply(message: dict[str, Any]) -> None:
    body: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
    try:
        body["result"] = answer(message["method"], message.get("params", {}))
    except Exception as error:  # noqa: BLE001 (the client is told)
        body["error"] = {"code": -32602, "message": str(error)}

    line = json.dumps(body).encode() + b"\n"
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def serve() -> None:
    """Answers one request after the other; `wait` on a thread of its own."""
    for line in sys.stdin.buffer:
        message = json.loads(line)
        if "id" not in message or "method" not in message:
            continue
        if message.get("params", {}).get("name") == "wait":
            threading.Thread(target=reply, args=(message,), daemon=True).start()
        else:
            reply(message)


def serve_by_sdk(transport: Any, **options: Any) -> None:
    import asyncio

    from mcp.server.mcpserver import MCPServer

    server = MCPServer("counter")

    async def wait_beside(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "waited"

    for name, function in TOOLS.items():
        server.add_tool(wait_beside if function is wait else function, name=name)

    server.prompt()(rules)
    server.resource(RESOURCE["uri"], description=RESOURCE["description"])(now)
    server.resource(TEMPLATE["uriTemplate"], description=TEMPLATE["description"])(half)
    server.run(transport, **options)


if __name__ == "__main__":
    words = sys.argv[1:] or ["stdio"]
    if "--slow" in words:
        time.sleep(float(words[words.index("--slow") + 1]))
    if words[0] == "stdio":
        serve()
    elif words[0] == "sdk":
        serve_by_sdk("stdio")
    elif words[0] == "sse":
        serve_by_sdk("sse", port=int(words[1]))
    else:
        serve_by_sdk("streamable-http", port=int(words[1]))
