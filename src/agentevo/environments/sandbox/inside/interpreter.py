"""The Python interpreter of a sandbox, which runs pieces of code in one namespace.

The interpreter is untrusted after the first piece. It exchanges frames with the supervisor over one
socket. The code's output goes to its stdout and stderr, which are pipes to the supervisor.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentevo.environments.sandbox.inside import frames
else:
    import frames

LONGEST_MESSAGE = 2000
LONGEST_TRACEBACK = 6000
_CELL = "<cell "


class ToolError(Exception):
    """A tool failed. The message is the reason."""


class Timeout(Exception):
    """The code reached its time limit."""


class Interpreter:
    """The interpreter. `control` is the file descriptor of its end of the socket, and `limit` the
    maximum number of characters of a value."""

    def __init__(self, control: int, limit: int) -> None:
        self._control = control
        self._limit = limit
        self._messages = frames.Frames(4 * frames.LARGEST_CALL)
        self._num_cells = 0
        self._num_calls = 0
        self._call_lock = threading.Lock()
        module = ModuleType("__main__")
        sys.modules["__main__"] = module
        self._namespace = module.__dict__
        self._namespace["ToolError"] = ToolError

    def serve(self) -> None:
        """Answers requests until the supervisor closes the socket."""
        signal.signal(signal.SIGALRM, _raise_timeout)
        while True:
            while "code" not in (request := self._receive()):
                continue
            self._define_tools(request["tools"])
            self._num_cells += 1
            outcome = self._run_cell(request["code"], request["deadline_s"])
            self._send({"done": request["id"], **outcome})

    def _receive(self) -> dict[str, Any]:
        while (message := self._messages.next()) is None:
            chunk = os.read(self._control, 2**16)
            if not chunk:
                os._exit(0)
            self._messages.feed(chunk)
        return message

    def _send(self, message: dict[str, Any]) -> None:
        frames.write_all(self._control, frames.encode(message))

    def _define_tools(self, tools: list[dict[str, Any]]) -> None:
        for tool in tools:
            if tool["name"] not in self._namespace:
                self._namespace[tool["name"]] = self._tool_function(tool)

    def _tool_function(self, tool: dict[str, Any]) -> Callable[..., Any]:
        name = tool["name"]
        parameters = tool["parameters"]

        def call(*values: Any, **keywords: Any) -> Any:
            if len(values) > len(parameters):
                raise TypeError(f"{name}() takes {len(parameters)} arguments: {parameters}")
            positional = dict(zip(parameters, values, strict=False))
            for key in keywords:
                if key in positional:
                    raise TypeError(f"{name}() got two values for {key}")
            return self._call(name, positional | keywords)

        call.__name__ = call.__qualname__ = name
        call.__doc__ = tool["description"]
        return call

    def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        try:
            size = len(json.dumps(arguments, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"{name}() takes JSON values only: {error}") from None

        if size > frames.LARGEST_CALL:
            raise ToolError(f"{name}: {size:,} bytes of arguments, at most {frames.LARGEST_CALL:,}")

        with self._call_lock:
            self._num_calls += 1
            number = self._num_calls
            self._send({"call": name, "number": number, "arguments": arguments})
            # the answer to an earlier, interrupted call may arrive first
            while (answer := self._receive()).get("number") != number:
                continue

        if "error" in answer:
            raise ToolError(answer["error"])

        return answer["result"]

    def _run_cell(self, code: str, deadline_s: float) -> dict[str, Any]:
        value: str | None = None
        error: dict[str, str] | None = None
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, deadline_s)
                value = self._evaluate(code)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Timeout:
            error = {
                "type": "Timeout",
                "message": f"the code has run for {deadline_s:g} s and was interrupted",
                "traceback": "",
            }
        except BaseException as raised:  # noqa: BLE001 (the code may raise anything)
            error = _describe_error(raised)

        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None and not getattr(stream, "closed", False):
                    stream.flush()
            except BaseException as raised:  # noqa: BLE001 (the code may have replaced it)
                error = error or _describe_error(raised)

        return {"value": value, "error": error}

    def _evaluate(self, code: str) -> str | None:
        """Runs the code. Returns the repr of its last expression."""
        name = f"{_CELL}{self._num_cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last_expression: ast.Expression | None = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last_expression = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]

        exec(compile(tree, name, "exec"), self._namespace)
        if last_expression is None:
            return None

        value = eval(compile(last_expression, name, "eval"), self._namespace)
        if value is None:
            return None

        self._namespace["_"] = value
        return frames.clip(str(repr(value)), self._limit)


def _work_folder() -> str:
    return os.environ.get("HOME", "/sandbox").rstrip("/") + "/"


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise Timeout


def _describe_error(error: BaseException) -> dict[str, str]:
    try:
        message = str(error)
    except BaseException:  # noqa: BLE001 (`__str__` may raise anything)
        message = "its message can't be shown, since its __str__ raises"

    try:
        summary = traceback.TracebackException.from_exception(error, limit=-50)
        _keep_user_frames(summary)
        lines = "".join(summary.format())
    except BaseException:  # noqa: BLE001
        lines = ""

    return {
        "type": frames.clip(type(error).__name__, 200),
        "message": frames.clip(message, LONGEST_MESSAGE),
        "traceback": frames.clip(lines, LONGEST_TRACEBACK),
    }


def _keep_user_frames(summary: traceback.TracebackException) -> None:
    """Keeps only the frames of the user's code, in all exceptions of the chain."""
    visited: list[traceback.TracebackException] = []
    pending: list[traceback.TracebackException | None] = [summary]
    while pending:
        error = pending.pop()
        if error is None or error in visited:
            continue
        visited.append(error)
        cell_frames = [
            frame for frame in error.stack if frame.filename.startswith((_CELL, _work_folder()))
        ]
        error.stack = traceback.StackSummary.from_list(cell_frames)
        pending += [error.__cause__, error.__context__]
