"""The Python interpreter of a sandbox: it runs one piece of code after another in one namespace.

After the first piece it is untrusted. It communicates with the supervisor over one socket, in
frames; the code's output goes to its stdout and stderr, which are pipes to the supervisor.
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
    """A tool failed; the message says why."""


class Timeout(Exception):
    """The code reached its time limit."""


class Interpreter:
    """See the module. `control` is its end of the socket."""

    def __init__(self, control: int, limit: int) -> None:
        self._control = control
        self._limit = limit
        self._messages = frames.Frames(4 * frames.LARGEST_CALL)
        self._num_cells = 0
        self._num_calls = 0
        self._calling = threading.Lock()
        module = ModuleType("__main__")
        sys.modules["__main__"] = module
        self._names = module.__dict__
        self._names["ToolError"] = ToolError

    def serve(self) -> None:
        """Answers requests until the supervisor closes the socket."""
        signal.signal(signal.SIGALRM, _raise_timeout)
        while True:
            while "code" not in (request := self._receive()):
                continue
            self._define(request["tools"])
            self._num_cells += 1
            outcome = self._outcome(request["code"], request["deadline_s"])
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

    def _define(self, tools: list[dict[str, Any]]) -> None:
        for tool in tools:
            if tool["name"] not in self._names:
                self._names[tool["name"]] = self._function(tool)

    def _function(self, tool: dict[str, Any]) -> Callable[..., Any]:
        name = tool["name"]
        parameters = tool["parameters"]

        def call(*values: Any, **named: Any) -> Any:
            if len(values) > len(parameters):
                raise TypeError(f"{name}() takes {len(parameters)} arguments: {parameters}")
            positional = dict(zip(parameters, values, strict=False))
            for key in named:
                if key in positional:
                    raise TypeError(f"{name}() got two values for {key}")
            return self._call(name, positional | named)

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

        with self._calling:
            self._num_calls += 1
            number = self._num_calls
            self._send({"call": name, "number": number, "arguments": arguments})
            # the answer to an interrupted call may arrive late
            while (answer := self._receive()).get("number") != number:
                continue

        if "error" in answer:
            raise ToolError(answer["error"])

        return answer["result"]

    def _outcome(self, code: str, deadline_s: float) -> dict[str, Any]:
        value: str | None = None
        error: dict[str, str] | None = None
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, deadline_s)
                value = self._value(code)
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
                stream.flush()
            except BaseException:  # noqa: BLE001 (the code may have closed or replaced it)
                continue

        return {"value": value, "error": error}

    def _value(self, code: str) -> str | None:
        """Runs the code. Returns the repr of its last expression."""
        name = f"{_CELL}{self._num_cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last: ast.Expression | None = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]

        exec(compile(tree, name, "exec"), self._names)
        if last is None:
            return None

        value = eval(compile(last, name, "eval"), self._names)
        if value is None:
            return None

        self._names["_"] = value
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
        _keep_cells(summary)
        lines = "".join(summary.format())
    except BaseException:  # noqa: BLE001
        lines = ""

    return {
        "type": frames.clip(type(error).__name__, 200),
        "message": frames.clip(message, LONGEST_MESSAGE),
        "traceback": frames.clip(lines, LONGEST_TRACEBACK),
    }


def _keep_cells(summary: traceback.TracebackException) -> None:
    """Keeps only the frames of the user's code, in all exceptions of the chain."""
    visited: list[traceback.TracebackException] = []
    waiting: list[traceback.TracebackException | None] = [summary]
    while waiting:
        error = waiting.pop()
        if error is None or error in visited:
            continue
        visited.append(error)
        cell_frames = [
            frame for frame in error.stack if frame.filename.startswith((_CELL, _work_folder()))
        ]
        error.stack = traceback.StackSummary.from_list(cell_frames)
        waiting += [error.__cause__, error.__context__]
