"""Makes spans of the calls of a process and exports them, in a thread of its own.

    async with tracer:                  its thread begins, and ends
        tracer.ended(call)              from the event loop: puts the call into a queue

The attempts never wait for it: what does not fit into the queue is dropped, and so is what the
exporter could not take in; both are counted, and told at the first time and at the end. A span is
made, and its texts are shortened and searched for secrets, in the thread.

Not promised: that all spans of a process that was killed are exported.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol, Self

from agentevo.credentials import without_passwords
from agentevo.errors import described
from agentevo.event_loop import in_thread
from agentevo.store.call_log import RunningCall
from agentevo.store.trace_context import AttemptTrace, trace_of
from agentevo.tracing.span import Span
from agentevo.tracing.spans import Spans, attempt_of

CLOSE_S = 5.0
"""How long the end of a run waits for the exporter."""
REST_S = 5.0
"""How long an exporter that has failed is left alone."""


PIECE = 2**22
"""Characters of the spans that are exported together: collectors refuse larger requests."""


class Exporter(Protocol):
    """Where spans go. Used by one thread. It may be slow, and may raise whatever it likes."""

    def export(self, spans: Sequence[Span]) -> None: ...

    def close(self) -> None: ...


class Limits:
    """How much waits, and for how long."""

    def __init__(self, *, queue: int = 4096, batch: int = 512, delay_s: float = 1.0) -> None:
        """At most `queue` spans wait; up to `batch` of them are exported together, at the latest
        after `delay_s`."""
        self.queue, self.batch, self.delay_s = queue, min(batch, queue), delay_s


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
        limits: Limits | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`tell` hears of what is not exported. `share`: of the attempts that are traced."""
        self.contents, self.token2text = contents, token2text
        self.dropped = self.exported = 0
        """Numbers of spans."""
        self._exporter, self._spans = exporter, spans
        self._run_id, self._share, self._tell = run_id, share, tell
        self._limits = limits or Limits()
        self._queue: deque[RunningCall] = deque()
        self._num_refused = 0
        self._problem = ""
        self._resting_until = 0.0
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="agentevo-tracing", daemon=True)

    def trace_of(self, trajectory_id: str) -> AttemptTrace:
        """See call_log.Tracing. Several agents of one attempt share its trace."""
        return trace_of(self._run_id, attempt_of(trajectory_id), self._share)

    def ended(self, call: RunningCall) -> None:
        """See call_log.Tracing."""
        waiting = len(self._queue)
        if waiting >= self._limits.queue:
            self._num_refused += 1
            return
        self._queue.append(call)
        if waiting + 1 == self._limits.batch:
            self._wake.set()

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await in_thread(self.close)

    def close(self) -> None:
        """Exports what waits, for CLOSE_S at most; what is left then is dropped."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        left = len(self._queue) if not self._thread.is_alive() else self._left()
        self._queue.clear()
        lost = self.dropped + self._num_refused + left
        if lost:
            why = self._problem or "more came than the exporter took in"
            self._tell(f"tracing: {lost} spans were not exported, {self.exported} were: {why}")

    def _left(self) -> int:
        """What an exporter that hangs has not taken in."""
        self._problem = self._problem or f"the exporter did not end within {CLOSE_S:g} s"
        return len(self._queue) + self._in_hand

    _in_hand = 0
    """Spans that the exporter has been given and not yet taken in."""

    def _work(self) -> None:
        limits = self._limits
        while True:
            self._wake.wait(limits.delay_s)
            self._wake.clear()
            is_last = self._closing.is_set()
            while self._queue and (is_last or time.monotonic() >= self._resting_until):
                self._export(self._taken())
                if len(self._queue) < limits.batch and not is_last:
                    break
            if is_last:
                with suppress(Exception):
                    self._exporter.close()
                return

    def _taken(self) -> list[RunningCall]:
        return [self._queue.popleft() for _ in range(min(len(self._queue), self._limits.batch))]

    def _export(self, calls: Sequence[RunningCall]) -> None:
        """The one place where an exporter's failure is caught."""
        self._in_hand = len(calls)
        try:
            spans = [span for call in calls if (span := self._span(call)) is not None]
            for piece in _pieces(spans):
                self._exporter.export(piece)
                self.exported += len(piece)
                self._in_hand -= len(piece)
        except Exception as error:  # noqa: BLE001 (whatever it is, the attempts go on)
            self._resting_until = time.monotonic() + REST_S
            self.dropped += self._in_hand
            self._failed(error)
        finally:
            self._in_hand = 0

    def _span(self, call: RunningCall) -> Span | None:
        """None for one that can't be made, which is a bug of ours: it costs that span alone."""
        try:
            trace = call.calls.trace
            assert trace is not None
            outer = call.outer
            around = None if outer is None else outer.place
            return self._spans.of(
                call.record(call.calls.recorder),
                trace,
                said=call.said,
                asker=call.asker,
                around=around.span_id if around and around.trace_id == trace.trace_id else None,
            )
        except Exception as error:  # noqa: BLE001 (whatever it is, the others are exported)
            self.dropped += 1
            self._in_hand -= 1
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        if not self._problem:
            self._problem = without_passwords(described(error))
            self._tell(
                f"tracing: spans can't be exported, and are dropped while that lasts; the run goes "
                f"on: {self._problem}"
            )


def _pieces(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """The spans in lists of about PIECE characters each."""
    piece, size = list[Span](), 0
    for span in spans:
        own = sum(len(value) for value in span.attributes.values() if isinstance(value, str))
        if piece and size + own > PIECE:
            yield piece
            piece, size = [], 0
        piece.append(span)
        size += own
    if piece:
        yield piece
