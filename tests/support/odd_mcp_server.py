"""An MCP server without the SDK, whose tools give what the protocol does not allow. It counts the
calls of `add`, so a client sees whether it was started again.

python odd_mcp_server.py [--stays]        over stdin and stdout; it goes on when stdin ends
"""

import json
import sys
import time

PART = {"type": "text", "text": "fine"}
ODD = {
    "no content": {},
    "content is a text": {"content": "fine"},
    "text is null": {"content": [{"type": "text", "text": None}]},
    "unknown part": {"content": [{"type": "video"}]},
    "isError is null": {"content": [PART], "isError": None},
    "image without its type": {"content": [{"type": "image", "data": "AA=="}]},
    "structured is a list": {"content": [PART], "structuredContent": [1]},
    "null": None,
    "a text": "fine",
    "a list": [PART],
}
"""Name -> the result of a call of `give`."""
STRUCTURED = {
    "missing": {"content": [PART]},
    "a list": {"content": [PART], "structuredContent": [1]},
    "other types": {"content": [PART], "structuredContent": {"number": "three"}},
    "right": {"content": [PART], "structuredContent": {"number": 3}},
}
"""The same of `measure`, whose outputSchema wants a number."""
CHOICE = {"type": "object", "properties": {"what": {"type": "string"}}}
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOLS = [
    {"name": "give", "inputSchema": CHOICE},
    {"name": "measure", "inputSchema": CHOICE, "outputSchema": NUMBER},
    {"name": "add", "inputSchema": {}},
    {"name": "count"},
    {
        "name": "loose",
        "description": "Clears \x1b[2J it.",
        "inputSchema": {"type": "string"},
        "outputSchema": {},
        "annotations": 3,
    },
    {"name": "add", "description": "Has the name of another one.", "inputSchema": CHOICE},
    {"name": None, "inputSchema": CHOICE},
    "no tool",
]
count = 0


def answer(message):
    """The line that answers a message; None for one that is not answered."""
    if "id" not in message:
        return None

    head = {"jsonrpc": "2.0", "id": message["id"]}
    params = message.get("params", {})
    match message["method"]:
        case "initialize":
            about = {"name": "odd", "version": "1"}
            result = {"protocolVersion": params["protocolVersion"], "serverInfo": about}
            tail = {"result": result | {"capabilities": {"tools": {}}}}
        case "tools/list":
            tail = {"result": {"tools": TOOLS}}
        case "tools/call":
            what = params.get("arguments", {}).get("what")
            tail = called(params["name"], what)
            if what == "long, with the id at its end":
                head, tail = tail, head
        case _:
            tail = {"error": {"code": -32601, "message": "no such method"}}

    return json.dumps(head | tail)


def called(name, what):
    """What a call gives, or why it fails."""
    global count
    if name == "add":
        count += 1

    if name in ("add", "count"):
        text = str(count)
    elif what == "half a pair":
        text = "a \ud800 \U0001f600 b"
    elif what == "controls":
        text = "\x1b[2Jred\x07\r\u202e\x9b1m\ttab\n\u8bd7"
    elif what.startswith("long"):
        text = "x" * 300_000
    elif what == "error":
        return {"error": {"code": -32000, "message": "no luck"}}
    else:
        return {"result": (STRUCTURED if name == "measure" else ODD)[what]}

    return {"result": {"content": [{"type": "text", "text": text}]}}


if __name__ == "__main__":
    for line in sys.stdin:
        told = answer(json.loads(line))
        if told is not None:
            print(told, flush=True)
    if "--stays" in sys.argv:
        time.sleep(600)
