"""Requests to a running run to stop, save, pause or continue. They go through the run's folder, so
any process on any machine that shares the folder can make them.

    RUN/control.json       the current trainer (a session), whether it is paused, its newest answers
    RUN/control/ID.json    one request; its trainer deletes it with its answer

A request names its trainer session and has an id. So a late or leftover request never reaches a
later trainer of the same folder, and a request that is sent twice runs once. A thread of the
trainer checks the folder every POLL_INTERVAL_S seconds, so a folder that hangs never delays
training. Every answer is also added to the run's changes.jsonl. Requests run between two steps.

Not guaranteed: an answer from a trainer that was killed, or whose folder can't be written.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self, TypeVar, get_args

import msgspec

from agentevo.errors import ConfigError
from agentevo.runs.folder.records import CHANGES, add_record
from agentevo.runs.folder.run_folder import command_of, resume_command
from agentevo.runs.folder.run_state import RunReader
from agentevo.runs.folder.sources import RunSource
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.files import create_atomic, open_regular, write_atomic

SESSION = "control.json"
REQUESTS = "control"
POLL_INTERVAL_S = 0.5
END_TIMEOUT_S = 3.0
MAX_BYTES = 100_000
"""The maximum number of bytes that are read from a file."""
MAX_REQUESTS = 100
"""The maximum number of requests that are read at once."""
KEPT_ANSWERS = 50
Action = Literal["stop", "save", "pause", "resume"]
ACTIONS: tuple[Action, ...] = get_args(Action)
T = TypeVar("T", bound=msgspec.Struct)
_ID = re.compile(r"[0-9a-zA-Z-]{8,64}")


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A user's request to a run."""

    id: str
    do: Action
    session: str
    at: float = 0.0
    who: str = ""


class ControlAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a request."""

    id: str
    do: str
    result: str
    is_done: bool = True
    at: float = 0.0


class ControlSession(msgspec.Struct, frozen=True, kw_only=True):
    """A process that trains in a folder, from its first step to its end."""

    id: str
    host: str = ""
    process: int = 0
    started_at: float = 0.0
    is_paused: bool = False
    has_ended: bool = False
    answers: list[ControlAnswer] = []


def read_session(folder: Path) -> ControlSession | None:
    """The newest trainer of the folder. None if there is none that accepts requests."""
    return _read(folder / SESSION, ControlSession)


def session_of(folder: Path, state: str | None = None) -> tuple[ControlSession | None, str]:
    """The session of the process that trains in the folder now, or None and the reason. `state`:
    the run's state, if it is known. Reads files."""
    if state is None:
        reader = RunReader(RunSource(folder.name, folder.name, folder))
        reader.read()
        state = reader.view.state

    if state != "running":
        command = resume_command(folder, command_of(folder))
        resume = f"`{command}`" if command else "The command that started it, with --resume,"
        resume_hint = "" if state == "finished" else f". {resume} resumes it"
        return None, f"the run is not training (it is {state}){resume_hint}"

    session = read_session(folder)
    if session is None or session.has_ended:
        why = "it is still starting, or is a command or several processes that accept no requests"
        return None, f"this run accepts no requests now: {why}, or is of an older version"

    return session, ""


def ask(folder: Path, do: Action, *, id: str, session: str, who: str) -> None:
    """Writes a request to the trainer of that session. A repeated request is written once. Raises
    ConfigError if the request can't be written."""
    if not _ID.fullmatch(id):
        raise ConfigError(
            f"{id[:70]!r} is not a valid request id: use letters, digits and -, 8 to 64"
        )

    request = ControlRequest(id=id, do=do, session=session, at=time.time(), who=who)
    place = folder / REQUESTS
    try:
        place.mkdir(exist_ok=True)
        if place.is_symlink():
            raise OSError("it is a link")
        create_atomic(place / f"{id}.json", msgspec.json.encode(request).decode())
    except OSError as error:
        raise ConfigError(
            f"{place} can't be written ({error.strerror or error}), so no request was made: make "
            f"room, or make the run's folder writable"
        ) from error


def answer_to(folder: Path, id: str) -> ControlAnswer | None:
    """The result of a request. None while the request waits."""
    session = read_session(folder)
    return (
        next((answer for answer in session.answers if answer.id == id), None) if session else None
    )


class RunControl:
    """The trainer's side: a context manager around its steps. `stop` stops the run as a signal
    does. The control thread calls `stop`. All methods are called between two steps."""

    def __init__(
        self,
        folder: Path,
        stop: Callable[[], None],
        *,
        note: Callable[[str], None] = lambda text: None,
        look_s: float = POLL_INTERVAL_S,
    ) -> None:
        self._folder = folder
        self._stop = stop
        self._note = note
        self._look_s = look_s
        self._session = ControlSession(
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            process=os.getpid(),
            started_at=time.time(),
        )
        self._lock = threading.Lock()
        self._saves: list[ControlRequest] = []
        self._pauses: list[ControlRequest] = []
        self._is_pause_asked = False
        self._seen: set[str] = set()
        self._answered: set[str] = set()
        self._over = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(
            target=self._poll_until_over, name="run control", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(END_TIMEOUT_S)

    @property
    def is_pause_asked(self) -> bool:
        return self._is_pause_asked and not self._over.is_set()

    def take_saves(self) -> list[ControlRequest]:
        """The requests to save. Each is returned once, and needs an `answer`."""
        with self._lock:
            taken = self._saves
            self._saves = []
        return taken

    def note_pause(self, step: int) -> None:
        """Records that the run is paused from now on, after that step."""
        with self._lock:
            pauses = self._pauses
            self._pauses = []
            is_new = not self._session.is_paused
            self._session = msgspec.structs.replace(self._session, is_paused=True)

        for request in pauses:
            self.answer(request, f"paused after step {step}")

        if is_new and not pauses:
            self._write()

    def note_resume(self) -> None:
        """Records that the run is no longer paused."""
        with self._lock:
            self._session = msgspec.structs.replace(self._session, is_paused=False)
        self._write()

    def answer(self, request: ControlRequest, result: str, *, is_done: bool = True) -> None:
        """Answers a request, and deletes it."""
        record = ControlAnswer(
            id=request.id, do=request.do, result=result, is_done=is_done, at=time.time()
        )
        with self._lock:
            answers = [*self._session.answers, record][-KEPT_ANSWERS:]
            self._session = msgspec.structs.replace(self._session, answers=answers)

        self._write()
        self._answered.add(request.id)
        with suppress(OSError):
            (self._folder / REQUESTS / f"{request.id}.json").unlink(missing_ok=True)

        about = {"at": record.at, "who": "the trainer", "address": self._session.host}
        try:
            add_record(
                self._folder / CHANGES,
                {**about, "id": request.id, "what": f"{request.do}: {result}"},
            )
        except ConfigError as error:
            self._report(str(error))

    def _poll_until_over(self) -> None:
        self._write()
        while not self._over.is_set():
            self._poll()
            self._over.wait(self._look_s)

        self._poll()  # requests since the last check get their answer
        with self._lock:
            unanswered = [*self._saves, *self._pauses]
            self._saves = []
            self._pauses = []
            self._session = msgspec.structs.replace(self._session, has_ended=True, is_paused=False)

        for request in unanswered:
            self.answer(request, "the run has ended", is_done=False)

        self._write()

    def _poll(self) -> None:
        try:
            with os.scandir(self._folder / REQUESTS) as entries:
                names = [entry.name for entry in entries if entry.name.endswith(".json")]
        except OSError:
            return  # there was never a request

        requests: list[ControlRequest] = []
        for name in names[:MAX_REQUESTS]:
            id = name.removesuffix(".json")
            if id in self._answered:  # the request was repeated
                with suppress(OSError):
                    (self._folder / REQUESTS / name).unlink(missing_ok=True)

            if id in self._seen or not _ID.fullmatch(id):
                continue

            request = _read(self._folder / REQUESTS / name, ControlRequest)
            self._seen.add(id)
            if request is not None and request.id == id:
                requests.append(request)

        for request in sorted(requests, key=lambda request: request.at):
            self._take(request)

    def _take(self, request: ControlRequest) -> None:
        if request.session != self._session.id:
            self.answer(request, "too late: that process has ended", is_done=False)
        elif self._over.is_set():
            self.answer(request, "the run has ended", is_done=False)
        elif request.do == "stop":
            self._stop()
            self.answer(request, "it stops after this step, or within this evaluation")
        elif request.do == "resume":
            was_asked = self._is_pause_asked
            self._is_pause_asked = False
            with self._lock:
                given_up = self._pauses
                self._pauses = []

            for pause in given_up:
                self.answer(pause, "the run was asked to continue before it paused", is_done=False)

            self.answer(request, "the run continues" if was_asked else "it was not paused")
        elif request.do == "pause":
            with self._lock:
                self._pauses.append(request)
            self._is_pause_asked = True
        else:
            with self._lock:
                self._saves.append(request)

    def _write(self) -> None:
        with self._lock:
            try:
                write_atomic(self._folder / SESSION, msgspec.json.encode(self._session) + b"\n")
            except OSError as error:
                problem = f"{self._folder / SESSION} can't be written ({error.strerror or error})"
            else:
                return

        self._report(f"{problem}: the run continues, but accepts no requests")

    def _report(self, problem: str) -> None:
        """Reports each problem once, because a full disk often stays full for a long time."""
        if problem != self._problem:
            self._problem = problem
            self._note(problem)


def _read(path: Path, kind: type[T]) -> T | None:
    """A file of this module. None if it is gone, damaged, too large, a link, or not a file."""
    try:
        with open_regular(path) as file:
            return decode_json(file.read(MAX_BYTES), kind)
    except (OSError, msgspec.MsgspecError):
        return None
