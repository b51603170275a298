"""Records calls while they happen, so that a running attempt can be watched.

    log = CallLog(lambda: open_store(url))      one of a process
    calls = log.attempt(trajectory_id)          one of every try of an attempt
    with calls.attempt("MyAgent") as attempt:   the attempt itself is the outermost call
        async with calls.call("tool", "search") as call:
            call.note(results=3)

Recording a call adds a line to a table in memory. It never waits, never fails, and puts nothing on
the event loop, because the order of the loop's events decides which requests share a step of the
engine. A thread with its own connection writes new calls every FLUSH_S seconds. A slow or
unavailable store only costs calls. At most MAX_HELD calls are kept in memory, and at most
MAX_STARTS start within FLUSH_S seconds. Further calls are counted (`dropped`) and not recorded.

A call may start inside the block of another call, in the same asyncio task or in a task that was
started there. That other call is its parent. Not guaranteed: a killed process may leave calls
without a record or without an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, Token
from typing import Self

from agentevo.errors import (
    AgentEvoError,
    DeadlineExceededError,
    StoreUnavailableError,
    describe_error,
)
from agentevo.runtime import trace_header
from agentevo.runtime.event_loop import in_thread
from agentevo.store.calls import LOST_S
from agentevo.store.opening import open_store
from agentevo.store.store import CALLS_AT_ONCE, Store
from agentevo.store.trace_context import Asker, TracedMessage, TracePlace, Tracing, span_of
from agentevo.types import Call, Status

FLUSH_S = 0.5
"""The interval of writes, in seconds. A watcher sees a call at most about a second after it
started."""
RENEW_S = LOST_S / 6
MAX_HELD = 20_000
"""The maximum number of calls in memory, running or not yet written: about 10 MB."""
MAX_STARTS = 2_000
"""The maximum number of calls that may start between two writes."""
MAX_TEXT = 300
MAX_ATTRIBUTES = 16
MAX_KEPT_CHARS = 2**16
"""The maximum number of characters that are stored of a text from `keep`."""
WRITE_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
"""The time that the end of a run waits for unwritten calls, in seconds."""
MAX_PAUSE_S = 30.0

Attribute = str | int | float | bool

_current: ContextVar[RunningCall | None] = trace_header.current
_asker: ContextVar[Asker | None] = ContextVar("agentevo asker", default=None)


class CallLog:
    """Records the calls of a process. The log's thread starts with the block of `async with` and
    ends with it. The store is opened for the first call."""

    def __init__(
        self,
        open_store: Callable[[], Awaitable[Store]],
        *,
        notify: Callable[[str], None] = lambda line: None,
        tracing: Tracing | None = None,
    ) -> None:
        """`notify` receives a line at the end with the number of calls that were not recorded.
        `tracing` receives each call when it ends."""
        self.recorder = secrets.token_hex(6)
        self.tracing = tracing
        self.dropped = 0
        """The number of calls that were not recorded."""
        self._open_store = open_store
        self._notify = notify
        self._problem = ""
        """The reason why the first of them were not recorded."""
        self._lock = threading.Lock()
        # maps a call's number to a call that must be written
        self._new: dict[int, RunningCall] = {}
        self._writing: list[tuple[int, RunningCall]] = []
        self._num_held = self._num_started = self._num_recorded = 0
        self._closed = False
        self._wake: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._work, name="agentevo-calls", daemon=True)

    def attempt(self, trajectory_id: str) -> AttemptCalls:
        return AttemptCalls(self, trajectory_id)

    def admit(self, call: RunningCall) -> bool:
        """Whether a starting call is recorded. If so, the call gets its number."""
        with self._lock:
            if self._closed or self._num_held >= MAX_HELD or self._num_started >= MAX_STARTS:
                self.dropped += 1
                if not self._closed:
                    many = f"more than {MAX_STARTS} started within {FLUSH_S:g} s"
                    self._problem = self._problem or many
                return False

            self._num_held += 1
            self._num_started += 1
            self._num_recorded += 1
            call.number = self._num_recorded
            self._new[call.number] = call
            return True

    def note_change(self, call: RunningCall) -> None:
        with self._lock:
            self._new[call.number] = call

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await in_thread(self.close)

    def close(self) -> None:
        """Writes the remaining calls within CLOSE_TIMEOUT_S seconds. Calls that remain after that
        count as dropped."""
        with self._lock:
            self._closed = True
            wake = self._wake

        if wake is not None:
            with contextlib.suppress(RuntimeError):  # the thread's loop has just ended
                wake()

        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

        with self._lock:
            self.dropped += len(self._new.keys() | dict(self._writing).keys())
            self._new = {}
            self._writing = []

        if self.dropped:
            why = self._problem or "the run ended before they were written to the store"
            self._notify(f"{self.dropped} calls of attempts were not recorded: {why}")

    def _work(self) -> None:
        asyncio.run(self._write_until_closed())

    async def _write_until_closed(self) -> None:
        closing = asyncio.Event()
        loop = asyncio.get_running_loop()
        with self._lock:
            self._wake = lambda: loop.call_soon_threadsafe(closing.set)
            if self._closed:
                closing.set()

        store: Store | None = None
        pause = FLUSH_S
        renewed_at = time.monotonic()
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(closing.wait(), pause)

                try:
                    if store is None and self._new:
                        store = await self._open_store()

                    if store is not None:
                        await self._write(store)
                        if self._num_held and time.monotonic() - renewed_at > RENEW_S:
                            await store.renew_calls(self.recorder)
                            renewed_at = time.monotonic()

                    pause = FLUSH_S
                except Exception as error:  # noqa: BLE001 (whatever it is, the attempts continue)
                    self._problem = f"{type(error).__name__}: {error}"
                    pause = min(2 * pause, MAX_PAUSE_S)

                if closing.is_set():
                    return
        finally:
            if store is not None:
                with contextlib.suppress(AgentEvoError):
                    await store.close()

    async def _write(self, store: Store) -> None:
        """Writes new calls in batches. A batch that can't be written stays new."""
        with self._lock:
            waiting = list(self._new.items())
            self._new = {}
            self._writing = waiting
            self._num_started = 0

        done = 0
        try:
            while done < len(waiting):
                batch = waiting[done : done + CALLS_AT_ONCE]
                await store.write_calls([call.record(self.recorder) for _, call in batch])
                self._forget_written(batch)
                done += len(batch)
        except (StoreUnavailableError, DeadlineExceededError):
            with self._lock:
                self._new = dict(waiting[done:]) | self._new
                self._writing = []
            raise
        except Exception:  # the store refused the batch, and would refuse it again
            with self._lock:
                self.dropped += len(waiting) - done
            self._forget_written(waiting[done:])
            raise

    def _forget_written(self, batch: list[tuple[int, RunningCall]]) -> None:
        """Removes the calls of the batch that have ended and need no further write."""
        with self._lock:
            self._writing = self._writing[len(batch) :]
            for number, call in batch:
                if call.has_ended and not call.is_forgotten and number not in self._new:
                    call.is_forgotten = True
                    self._num_held -= 1


def call_log(
    url: str,
    *,
    notify: Callable[[str], None] = lambda line: None,
    tracing: Tracing | None = None,
) -> CallLog:
    """A log that writes to the existing store at `url`."""
    return CallLog(
        lambda: open_store(url, timeout_s=WRITE_TIMEOUT_S, create=False),
        notify=notify,
        tracing=tracing,
    )


def record_call(kind: str, name: str, **attributes: Attribute) -> RunningCall:
    """A block that is recorded as a call of the attempt that it runs in. Outside attempts, nothing
    is recorded."""
    outer = _current.get()
    calls = AttemptCalls(None, "") if outer is None else outer.calls
    return calls.call(kind, name, **attributes)


def set_asker(place: TracePlace | None) -> Asker:
    """From now on, calls in this asyncio task are made for a program whose request named
    `place`."""
    asker = Asker(place, _current.get())
    _asker.set(asker)
    return asker


class AttemptCalls:
    """The calls of one try of an attempt. Without a log, nothing is recorded."""

    def __init__(self, log: CallLog | None, trajectory_id: str) -> None:
        self.trajectory_id = trajectory_id
        self.dropped = 0
        self.listen: Callable[[RunningCall], None] | None = None
        """Called with every call when it starts, and again when it has ended."""
        self._log = log
        tracing = None if log is None else log.tracing
        self.trace = None if tracing is None else tracing.trace_of(trajectory_id)
        """None if the run is not traced."""
        self.tracing = tracing if self.trace is not None and self.trace.is_sampled else None
        """Makes spans of these calls."""
        self._root: RunningCall | None = None
        self._open: dict[int, RunningCall] = {}

    def attempt(self, name: str) -> RunningCall:
        """The call of the attempt itself. `name` is the name of its agent. Calls that still run at
        its end are ended with it."""
        self._root = RunningCall(self, "attempt", name, {})
        return self._root

    def call(self, kind: str, name: str, **attributes: Attribute) -> RunningCall:
        """A block (`with` or `async with`) that is recorded as a call. Its `kind` is policy, tool,
        environment, scorer or any other word."""
        return RunningCall(self, kind, name, attributes)

    def parent_of(self, call: RunningCall) -> int:
        """The number of the recorded call that surrounds this one, 0 if there is none."""
        outer = _current.get()
        while outer is not None and (outer.calls is not self or not outer.number):
            outer = outer.outer
        outer = outer or self._root
        return outer.number if outer is not None and outer is not call else 0

    def begin(self, call: RunningCall) -> None:
        if self.listen is not None:
            self.listen(call)
        if self._log is None:
            return

        if self._log.admit(call):
            self._open[call.number] = call
        else:
            self.dropped += 1

    def end(self, call: RunningCall) -> None:
        if self.listen is not None:
            self.listen(call)

        self._open.pop(call.number, None)
        if call is self._root:
            if self.dropped:
                call.note(calls_dropped=self.dropped)
            for open_call in list(self._open.values()):
                open_call.end("cancelled", "its attempt ended")

        if self._log is not None and call.number:
            self._log.note_change(call)
            if self.tracing is not None:
                self.tracing.end_span(call)

    @property
    def recorder(self) -> str:
        """The beginning of the ids of its calls."""
        return "" if self._log is None else self._log.recorder


class RunningCall:
    """A call, from the start of its block to the end. `number` is 0 if the call is not recorded."""

    def __init__(
        self, calls: AttemptCalls, kind: str, name: str, attributes: dict[str, Attribute]
    ) -> None:
        self.calls = calls
        self.kind = kind
        self.name = name
        self.number = 0
        self.is_forgotten = False
        self.outer: RunningCall | None = None
        self.asker: TracePlace | None = None
        """The place in a trace of the program that made the request."""
        self.traced_message: TracedMessage | None = None
        """The messages of the call, if a span is made of it: see TracedMessage."""
        self._attributes = attributes
        self._kept: dict[str, str] = {}
        self._parent = 0
        self._started_at = 0.0
        self._clock = 0.0
        self._ended_at: float | None = None
        self._status: Status | None = None
        self._error: str | None = None
        self._token: Token[RunningCall | None] | None = None
        self._record: Call | None = None
        """Set when the call has ended. The log's thread and the tracer's thread both read it."""

    @property
    def has_ended(self) -> bool:
        return self._ended_at is not None

    @property
    def place(self) -> TracePlace | None:
        """The call's place in a trace, or that of the surrounding call if this one is not recorded.
        None without tracing."""
        if self.calls.trace is None:
            return None

        call: RunningCall | None = self
        while call is not None and not call.number:
            call = call.outer

        if call is None or call.calls.trace is None:
            return None

        return TracePlace(call.calls.trace.trace_id, span_of(call.id), call.calls.trace.is_sampled)

    @property
    def tracing(self) -> Tracing | None:
        """The tracing that makes a span of the call. None if no span is made."""
        return self.calls.tracing if self.number else None

    @property
    def id(self) -> str:
        return f"{self.calls.recorder}-{self.number}"

    def note(self, **attributes: Attribute) -> None:
        """Adds small facts. They are written at the call's end."""
        self._attributes = self._attributes | attributes
        self._record = None

    def keep(self, **texts: str) -> None:
        """Adds the output of a process or the text of a scorer, up to MAX_KEPT_CHARS characters
        each."""
        self._kept |= {name: text for name, text in texts.items() if text}
        self._record = None

    def outcome(self, status: Status, error: str | None) -> None:
        """Sets the call's status and error, unless an exception of its block determines them."""
        self._status = status
        self._error = error

    def end(self, status: Status, error: str | None) -> None:
        """Ends the call. Later ends have no effect."""
        if self._ended_at is None:
            self._status = self._status or status
            self._error = self._error or error
            self._ended_at = self._started_at + (time.monotonic() - self._clock)
            self.calls.end(self)

    def record(self, recorder: str) -> Call:
        """The current record of the call. The log's thread and the tracer's thread may call this at
        any moment."""
        if (final_record := self._record) is not None:
            return final_record

        ended_at = self._ended_at
        attributes = self._attributes
        record = Call(
            id=f"{recorder}-{self.number}",
            trajectory_id=self.calls.trajectory_id,
            parent=f"{recorder}-{self._parent}" if self._parent else None,
            kind=_storable(self.kind),
            name=_storable(self.name),
            started_at=self._started_at,
            ended_at=ended_at,
            status=None if ended_at is None else self._status,
            error=None if ended_at is None or self._error is None else _storable(self._error),
            attributes={
                _storable(name): _shorten_attribute(value)
                for name, value in list(attributes.items())[:MAX_ATTRIBUTES]
            }
            | {name: _storable(text, MAX_KEPT_CHARS) for name, text in self._kept.items()},
        )
        if ended_at is not None:
            self._record = record

        return record

    def __enter__(self) -> Self:
        self._started_at = time.time()
        self._clock = time.monotonic()
        self._parent = self.calls.parent_of(self)
        self.calls.begin(self)

        self.outer = _current.get()
        if (asker := _asker.get()) is not None and asker.outer is self.outer:
            self.asker = asker.place
            asker.call = asker.call or self

        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *trace: object
    ) -> None:
        if self._token is not None:
            # the call ends in another task than it started in
            with contextlib.suppress(ValueError):
                _current.reset(self._token)

        if error is None:
            self.end("completed", None)
        elif isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self.end("cancelled", None)
        else:
            self.end("failed", describe_error(error))

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *trace: object
    ) -> None:
        self.__exit__(kind, error)


def _storable(text: str, longest: int = MAX_TEXT) -> str:
    """The shortened text, in an encoding that every database accepts."""
    if len(text) <= longest and text.isascii():
        return text
    return text[:longest].encode("utf-8", "replace").decode("utf-8")


def _shorten_attribute(value: object) -> Attribute:
    if isinstance(value, bool) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return _storable(str(value))
