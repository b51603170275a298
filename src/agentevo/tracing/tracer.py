"""Makes spans of the calls of a process and exports them, in a thread of its own.

    async with tracer:                  its thread begins, opens the exporter, and ends
        tracer.ended(call)              from the event loop: puts the call into a queue

The attempts never wait for it: what does not fit into the queue is dropped. What an exporter has
not taken is tried TRIES times, and then dropped. The end waits `flush_s` for what is left. Whatever
is lost is counted, and told at the first time and at the end: every call that has ended is
`exported`, `dropped` or `refused` then, or was not delivered in time. A span is made, and its texts
are shortened and searched for secrets, in the thread.

Not promised: that all spans of a process that was killed are exported, or that a span of which
the exporter did not hear in time whether it was taken is exported once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self

from agentevo.credentials import without_passwords
from agentevo.errors import describe_error
from agentevo.event_loop import in_thread
from agentevo.store.call_log import RunningCall
from agentevo.store.trace_context import AttemptTrace, trace_of
from agentevo.tracing.span import Span
from agentevo.tracing.spans import Spans, attempt_of

FLUSH_S = 30.0
"""How long the end of a run waits for an exporter that goes on taking spans in."""
REST_S = 5.0
"""How long an exporter that has failed is left alone."""
LAST_REST_S = 0.5
"""The same at the end of a run."""
TRIES = 3
"""At one piece."""
LONGEST_WORDS = 500
"""Characters of what an exporter's failure says, which may be a server's answer."""
PIECE = 2**22
"""Characters of the spans that are exported together: collectors refuse larger requests."""


class Exporter(Protocol):
    """Where spans go. Used by one thread. It may be slow, and may raise whatever it likes."""

    def open(self) -> None:
        """What takes long before the first export: packages, tables, a connection. It is called
        first, again after it has failed, and must do nothing where all is there."""

    def made(self, span: Span) -> Any:
        """What is kept of a span until it is exported: best no containers, which would make
        Python look for garbage in the whole process."""

    def export(self, made: Sequence[Any]) -> None:
        """What `made` has given of some spans."""

    def close(self) -> None: ...


class TraceLimits:
    """How much waits, and for how long."""

    def __init__(self, *, queue: int = 4096, batch: int = 512, delay_s: float = 1.0) -> None:
        """At most `queue` spans wait; up to `batch` of them are exported together, at the latest
        after `delay_s`."""
        self.queue = queue
        self.batch = min(batch, queue)
        self.delay_s = delay_s


class Tracer:
    """See the module."""

    def __init__(
        self,
        exporter: Exporter,
        spans: Spans,
        *,
        run_id: str,
        share: float = 1.0,
        contents: bool = False,
        token2text: bool = False,
        limits: TraceLimits | None = None,
        flush_s: float = FLUSH_S,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`tell` hears of what is not exported. `share`: of the attempts that are traced."""
        self.contents = contents
        self.token2text = token2text
        self.exported = self.dropped = self.refused = 0
        """Numbers of spans: the exporter took them in; it did not; the queue was full."""
        self._exporter = exporter
        self._spans = spans
        self._run_id = run_id
        self._share = share
        self._tell = tell
        self._limits = limits or TraceLimits()
        self._flush_s = flush_s
        self._queue: deque[RunningCall] = deque()
        self._num_taken = 0
        """Calls that came into the queue."""
        self._failures = 0
        """Of the exporter, since it last took something in."""
        self._problem = ""
        self._resting_until = 0.0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._is_late = self._is_given_up = False
        self._thread = threading.Thread(target=self._work, name="agentevo-tracing", daemon=True)

    def trace_of(self, trajectory_id: str) -> AttemptTrace:
        """See call_log.Tracing. Several agents of one attempt share its trace."""
        return trace_of(self._run_id, attempt_of(trajectory_id), self._share)

    def end_span(self, call: RunningCall) -> None:
        """See call_log.Tracing."""
        waiting = len(self._queue)
        if waiting >= self._limits.queue or self._closing.is_set():
            self.refused += 1
            if self.refused == 1:
                self._tell(
                    "tracing: more spans come than the exporter takes in; what does not fit into "
                    f"the queue of {self._limits.queue} (tracing.max_queue) is dropped"
                )
            return

        self._num_taken += 1
        self._queue.append(call)
        if waiting + 1 == self._limits.batch:
            self._wake.set()

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await in_thread(self.close)

    def close(self) -> None:
        """Exports what waits, for `flush_s` at most; what is left then is dropped."""
        self._closing.set()
        self._wake.set()
        self._thread.join(self._flush_s)
        self._is_late = self._thread.is_alive()
        left = self._num_taken - self.exported - self.dropped

        why = self._problem or "more came than the exporter took in"
        if self._is_late:
            why = self._problem or f"the exporter did not end within {self._flush_s:g} s"

        if lost := self.dropped + self.refused + left:
            self._tell(f"tracing: {lost} spans were not exported, {self.exported} were: {why}")
        elif self.exported:
            self._tell(f"tracing: {self.exported} spans were exported")

    def _work(self) -> None:
        try:
            self._exporter.open()
        except Exception as error:  # noqa: BLE001 (whatever it is, the attempts go on)
            self._note_failure(error)

        while not self._closing.is_set():
            self._wake.wait(self._limits.delay_s)
            self._wake.clear()
            while self._queue and not self._closing.is_set():
                self._export(self._taken())
                if len(self._queue) < self._limits.batch:
                    break

        while self._queue and not self._is_late:
            self._export(self._taken())

        with suppress(Exception):
            self._exporter.close()

    def _taken(self) -> list[RunningCall]:
        return [self._queue.popleft() for _ in range(min(len(self._queue), self._limits.batch))]

    def _export(self, calls: Sequence[RunningCall]) -> None:
        """In pieces of about PIECE characters each, where spans hold texts."""
        has_texts = self.contents or self.token2text
        piece = list[Any]()
        size = 0
        for call in calls:
            try:
                span = self._span(call)
                made = self._exporter.made(span)
            except Exception as error:  # noqa: BLE001 (a bug of ours costs that span alone)
                self.dropped += 1
                self._told(error)
                continue

            own = _characters(span) if has_texts else 0
            if piece and size + own > PIECE:
                self._deliver(piece)
                piece = []
                size = 0

            piece.append(made)
            size += own

        if piece:
            self._deliver(piece)

    def _deliver(self, piece: Sequence[Any]) -> None:
        if any(self._is_exported(piece) for _ in range(TRIES)):
            self.exported += len(piece)
        else:
            self.dropped += len(piece)

    def _is_exported(self, piece: Sequence[Any]) -> bool:
        """One try, after the rest that the last failure costs; the one place where an exporter's
        failure is caught. At the end of a run one that fails twice in a row is given up."""
        while (rest := self._resting_until - time.monotonic()) > 0:
            if self._closing.wait(rest):
                time.sleep(min(rest, LAST_REST_S))
                break

        if self._is_late or self._is_given_up:
            return False

        try:
            self._exporter.open()
            self._exporter.export(piece)
        except Exception as error:  # noqa: BLE001 (whatever it is, the attempts go on)
            self._note_failure(error)
            self._is_given_up = self._closing.is_set() and self._failures > 1
            return False

        self._failures = 0
        self._resting_until = 0.0
        return True

    def _span(self, call: RunningCall) -> Span:
        trace = call.calls.trace
        assert trace is not None

        record = call.record(call.calls.recorder)
        around = None
        if record.parent is None and call.outer is not None:
            around = call.outer.place

        return self._spans.of(
            record,
            trace,
            said=call.said,
            asker=call.asker,
            around=around.span_id if around and around.trace_id == trace.trace_id else None,
        )

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        self._resting_until = time.monotonic() + REST_S
        self._told(error)

    def _told(self, error: Exception) -> None:
        if not self._problem:
            words = without_passwords(describe_error(error))[:LONGEST_WORDS]
            self._problem = "".join(one if one.isprintable() else "?" for one in words)
            self._tell(
                f"tracing: spans can't be exported; each is tried {TRIES} times and dropped then, "
                f"and the run goes on: {self._problem}"
            )


def _characters(span: Span) -> int:
    return sum(len(value) for value in span.own.values() if isinstance(value, str))
