"""Tracebacks of a user's code, reduced to the parts that help its author."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import agentevo
from agentevo.errors import AgentEvoError, ToolUnavailableError, describe_error, storable

MAX_FRAMES = 20
PLACE_CHARS = 1000
"""The average number of characters of a place."""
CAUSED_BY = "\n\nIt came of:\n\n"
MAX_CAUSES = 4
"""The maximum number of exceptions in a traceback, each the cause of the one before."""
_OURS = str(Path(agentevo.__file__).parent)
_INSTALLED = (
    "<frozen ",
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)
"""The beginnings of the paths of Python's files and of installed packages."""
_RELAYS = tuple(
    str(Path(sysconfig.get_path("stdlib"), package)) for package in ("asyncio", "concurrent")
)
"""Packages through which an error of another thread passes."""


def traceback_of(error: BaseException | None) -> str:
    """The places where a user's code raised the error, then those of its causes. Places in AgentEvo
    are left out. So are those in installed packages, except the one that raised the error. Empty if
    that adds nothing to the error's first line, and for an unreachable server, which is not an
    error of the code."""
    if error is None:
        return ""

    parts: list[str] = []
    is_infrastructure = isinstance(error, ToolUnavailableError)
    try:
        while error is not None and len(parts) < MAX_CAUSES:
            is_infrastructure &= not _own_frames(error)
            parts.append(_one_traceback(error, is_cause=bool(parts)))
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    except Exception:  # noqa: BLE001 (a user's exception may break whatever looks at it)
        return ""

    if is_infrastructure:
        return ""
    if not parts[0] and not any("\n" in part for part in parts):
        return ""

    return CAUSED_BY.join(filter(None, parts))


def name_place(text: str) -> str:
    """The innermost place of a user's code in the result of `traceback_of`, as `FILE, line N, in
    NAME`. Empty if there is none."""
    lines = re.findall(r'^ *File "(.+)", (line \d+, in .+)$', text.partition(CAUSED_BY)[0], re.M)
    user_places = [
        f"{file}, {place}" for file, place in lines if not file.startswith((_OURS, *_INSTALLED))
    ]
    return user_places[-1] if user_places else ""


def describe_failure(error: BaseException) -> str:
    """`Kind: message` of an error that a user's code raised, with its place below. Without a place
    if Python refused the arguments, so that none of that code ran."""
    frames = traceback.extract_tb(error.__traceback__)
    has_run = any(not frame.filename.startswith((_OURS, *_RELAYS)) for frame in frames)
    is_refused_call = isinstance(error, TypeError) and not has_run
    trace = "" if is_refused_call else traceback_of(error)
    return f"{describe_error(error)}\n{trace}" if trace else describe_error(error)


def describe_function(function: Any) -> str:
    """A user's function by its name, and its place in a file."""
    name = str(getattr(function, "__qualname__", type(function).__name__))
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}, line {code.co_firstlineno})"


def format_places(error: BaseException) -> str:
    """The places in a user's code at which the error was raised, the innermost last."""
    return _format_frames(traceback.extract_tb(error.__traceback__))


def format_stack(thread_id: int, below: CodeType = threading.Thread.run.__code__) -> str:
    """The current places of a running thread in a user's code, the innermost last. Only the calls
    below the function with the code `below`. Empty if all of them are AgentEvo's."""
    frame = sys._current_frames().get(thread_id)
    frames = []
    while frame is not None and frame.f_code is not below:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _format_frames(traceback.StackSummary.extract(iter(frames[::-1])))


def _format_frames(frames: Sequence[traceback.FrameSummary]) -> str:
    """The places in a user's own code. If there are only installed packages, those that are not
    AgentEvo's."""
    foreign_frames = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    user_frames = [frame for frame in foreign_frames if not frame.filename.startswith(_INSTALLED)]
    lines = traceback.format_list((user_frames or foreign_frames)[-MAX_FRAMES:])
    return storable("".join(lines), PLACE_CHARS * len(lines)).rstrip()


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The places in a user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith((_OURS, *_INSTALLED))]


def _one_traceback(error: BaseException, *, is_cause: bool) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    foreign_frames = [frame for frame in frames if not frame.filename.startswith((_OURS, *_RELAYS))]
    user_frames = [frame for frame in foreign_frames if not frame.filename.startswith(_INSTALLED)]
    if (
        user_frames
        and foreign_frames[-1] is not user_frames[-1]
        and frames[-1] is foreign_frames[-1]
    ):
        user_frames.append(foreign_frames[-1])

    is_said = isinstance(error, AgentEvoError) or hasattr(error, "__notes__") or is_cause
    shown = (user_frames or foreign_frames or ([] if is_said else list(frames)))[-MAX_FRAMES:]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown)]

    error_text = "".join(traceback.format_exception_only(type(error), error))
    if not shown and not is_cause:  # the error's first line is reported separately
        error_text = error_text.partition("\n")[2]

    return storable("".join([*(lines if shown else []), error_text])).rstrip()
