"""A server of OpenAI's chat completions and Anthropic's messages on loopback, which answers, fails
or hangs as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = Callable[[Any, BaseHTTPRequestHandler], None]


def chat(content: str | None = "hello", *, usage: Any = (10, 4), **message: Any) -> dict[str, Any]:
    """The body of a chat completion. `usage`: tokens of prompt and answer."""
    said = {"role": "assistant", "content": content, **message}
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": finish, "message": said}],
        **({} if usage is None else {"usage": _usage(*usage)}),
    }


def _usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def gives(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """Answers so."""

    def answer(request: Any, handler: BaseHTTPRequestHandler) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(content)))
        for name, value in (headers or {}).items():
            handler.send_header(name, value)

        handler.end_headers()
        handler.wfile.write(content)

    return answer


def fails(status: int, message: str = "broken", code: str = "", **headers: str) -> Answer:
    """Answers with an error; `retry_after="1"` is the header Retry-After."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return gives({"error": {"message": message, "code": code or None}}, status, named)


def breaks_off(request: Any, handler: BaseHTTPRequestHandler) -> None:
    """Sends half of an answer and closes the connection."""
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    handler.close_connection = True


def hangs_up(request: Any, handler: BaseHTTPRequestHandler) -> None:
    """Closes the connection without an answer."""
    handler.close_connection = True
    handler.connection.close()


def sleeps(seconds: float, then: Answer | None = None) -> Answer:
    """Takes its time."""

    def answer(request: Any, handler: BaseHTTPRequestHandler) -> None:
        time.sleep(seconds)
        (then or gives(chat()))(request, handler)

    return answer


def hangs(request: Any, handler: BaseHTTPRequestHandler) -> None:
    """Never answers: whoever asks hears nothing until the server ends."""
    handler.server.ended.wait()  # type: ignore[attr-defined]
    handler.close_connection = True


def streams(
    *events: Any, then: Answer | None = None, wait: threading.Event | None = None
) -> Answer:
    """Sends events, each an object or bytes as they are, in a stream that is whole; after the first
    one it may wait. `then` ends it in another way."""

    def answer(request: Any, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream; charset=utf-8")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        for number, event in enumerate(events):
            _send_part(handler, event)
            if number == 0 and wait is not None:
                assert wait.wait(300), "nobody has got the first event"

        if then is not None:
            then(request, handler)
        else:
            handler.wfile.write(b"0\r\n\r\n")

    return answer


def _send_part(handler: BaseHTTPRequestHandler, event: Any) -> None:
    data = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
    handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    handler.wfile.flush()


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    """An event of a chat completion."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def counted(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """The event that says what was used."""
    return {"choices": [], "usage": _usage(prompt, completion, cached)}


def message_events(*texts: str, output: int = 4) -> list[bytes]:
    """An answer in the events of Anthropic's messages."""
    text = {"type": "text", "text": ""}
    usage = {"input_tokens": 10, "cache_read_input_tokens": 2, "output_tokens": 1}
    events = [
        {"type": "message_start", "message": {"usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": text},
        {"type": "ping"},
        *(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": text},
            }
            for text in texts
        ),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn"},
            "usage": {"output_tokens": output},
        },
        {"type": "message_stop"},
    ]
    return [
        f"event: {event['type']}\r\ndata: {json.dumps(event)}\r\n\r\n".encode() for event in events
    ]


def pours(size: int) -> Answer:
    """Sends so many bytes of an answer."""

    def answer(request: Any, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", str(size))
        handler.end_headers()
        for _ in range(size // 2**20):
            handler.wfile.write(b" " * 2**20)

    return answer


def trickles(request: Any, handler: BaseHTTPRequestHandler) -> None:
    """Sends an answer that has no end, a byte at a time."""
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.ended.wait(0.02):  # type: ignore[attr-defined]
        handler.wfile.write(b" ")
        handler.wfile.flush()


class LoopbackServer:
    """A real HTTP server on loopback, each request on a thread of its own. `respond` says what a
    request gets. `port`: 0 for a free one."""

    def __init__(self, port: int = 0) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                try:
                    server.respond(json.loads(text) if text else None, headers, self)
                except OSError:  # whoever asked has gone
                    self.close_connection = True

            do_GET = do_POST

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._ended = self._server.ended = threading.Event()  # type: ignore[attr-defined]

    def respond(self, body: Any, headers: dict[str, str], handler: BaseHTTPRequestHandler) -> None:
        """`headers` have names in lower case; the path is the handler's."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()


class RemoteServer(LoopbackServer):
    """`answers` are given in their order, the last one for ever."""

    def __init__(self, *answers: Answer, port: int = 0) -> None:
        super().__init__(port)
        self.answers = list(answers) or [gives(chat())]
        self.received: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def respond(self, body: Any, headers: dict[str, str], handler: BaseHTTPRequestHandler) -> None:
        with self._lock:
            self.received.append(body)
            self.headers.append(headers)
            self.paths.append(handler.path)
            self.times.append(time.monotonic())
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

        try:
            answer(body, handler)
        finally:
            with self._lock:
                self._at_once -= 1
