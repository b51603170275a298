"""Creates spans of a process's calls and exports them, with the OpenTelemetry SDK's batch
processor, in the processor's thread.

    async with tracer:             creates the exporter; starts the thread, and ends it
        tracer.end_span(call)      puts the call into the queue, from the event loop

The attempts never wait for the exporter. If the queue is full, the oldest calls are dropped. The
thread creates the span, shortens its texts and removes secrets from the texts. Spans that an
exporter refuses, after its own retries, are lost. At the end, the tracer waits `flush_s` seconds
for the remaining spans. The tracer reports the number of lost spans at the first loss and at the
end.

A killed process may lose spans. A span may be exported twice if the exporter did not receive the
confirmation in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from agentevo.observability.tracing.first_warning import FirstWarning
from agentevo.observability.tracing.spans import Spans, attempt_of
from agentevo.runtime.event_loop import in_thread
from agentevo.store.call_log import RunningCall
from agentevo.store.trace_context import AttemptTrace, trace_of

FLUSH_S = 30.0
"""The longest time in seconds that the end of a run waits for the exporter."""
EXPORT_CHARS = 2**22
"""The maximum number of characters in one export, because collectors refuse larger requests."""
_SAMPLED = SpanContext(1, 1, False, TraceFlags(TraceFlags.SAMPLED))
"""The context of every waiting call, because the processor accepts only sampled spans."""
_NO_RESOURCE = Resource({})


class TraceLimits(NamedTuple):
    """The limits of the processor's queue."""

    queue: int = 4096
    """The maximum number of waiting spans."""
    batch: int = 512
    """The maximum number of spans that are exported together."""
    delay_s: float = 1.0
    """The longest time in seconds until a span is exported."""


class WaitingCall(ReadableSpan):
    """A call in the processor's queue whose span does not exist yet."""

    def __init__(self, call: RunningCall) -> None:
        super().__init__(call.name, context=_SAMPLED, resource=_NO_RESOURCE)
        self.call = call


class CallExporter(SpanExporter):
    """Creates the spans of waiting calls, and passes them to an exporter, which may be slow and
    raise any error. Only one thread may use this object."""

    def __init__(self, exporter: SpanExporter, spans: Spans, warning: FirstWarning) -> None:
        self.num_exported = 0
        self.is_ending = False
        self.has_given_up = False
        """Whether the exporter is no longer used, because it failed twice in a row at the end."""
        self._exporter = exporter
        self._spans = spans
        self._warning = warning
        self._num_failures = 0
        """The failures since the last successful export."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter. Exports in pieces of about EXPORT_CHARS characters each."""
        piece = list[ReadableSpan]()
        size = 0
        for waiting_call in spans:
            assert isinstance(waiting_call, WaitingCall)
            try:
                span = self._span(waiting_call.call)
            except Exception as error:  # noqa: BLE001 (a defect of AgentEvo costs only that span)
                self._warning.warn(error)
                continue

            length = _num_characters(span)
            if piece and size + length > EXPORT_CHARS:
                self._deliver(piece)
                piece = []
                size = 0

            piece.append(span)
            size += length

        if piece:
            self._deliver(piece)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """See SpanExporter."""
        self._exporter.shutdown()

    def _deliver(self, piece: Sequence[ReadableSpan]) -> None:
        if self.has_given_up:
            return

        try:
            result = self._exporter.export(piece)
        except Exception as error:  # noqa: BLE001 (attempts continue after any error)
            self._warning.warn(error)
            result = SpanExportResult.FAILURE

        if result is SpanExportResult.SUCCESS:
            self.num_exported += len(piece)
            self._num_failures = 0
            return

        self._num_failures += 1
        self.has_given_up = self.is_ending and self._num_failures > 1

    def _span(self, call: RunningCall) -> ReadableSpan:
        trace = call.calls.trace
        assert trace is not None

        record = call.record(call.calls.recorder)
        outer_place = None
        if record.parent is None and call.outer is not None:
            outer_place = call.outer.place

        return self._spans.of(
            record,
            trace,
            traced_message=call.traced_message,
            asker=call.asker,
            around=outer_place.span_id
            if outer_place and outer_place.trace_id == trace.trace_id
            else None,
        )


class Tracer:
    """The tracer of a process."""

    def __init__(
        self,
        make_exporter: Callable[[], SpanExporter],
        spans: Spans,
        *,
        run_id: str,
        share: float = 1.0,
        contents: bool = False,
        token2text: bool = False,
        limits: TraceLimits | None = None,
        flush_s: float = FLUSH_S,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`notify` receives a line about spans that are not exported. `share`: the fraction
        of attempts that are traced."""
        self.contents = contents
        self.token2text = token2text
        self._make_exporter = make_exporter
        self._spans = spans
        self._run_id = run_id
        self._share = share
        self._limits = limits or TraceLimits()
        self._flush_s = flush_s
        self._notify = notify
        self._warning = FirstWarning(notify)
        self._num_ended = 0
        self._is_closing = False
        self._exporter: CallExporter
        self._processor: BatchSpanProcessor

    def trace_of(self, trajectory_id: str) -> AttemptTrace:
        """See call_log.Tracing. Several agents of an attempt share its trace."""
        return trace_of(self._run_id, attempt_of(trajectory_id), self._share)

    def end_span(self, call: RunningCall) -> None:
        """See call_log.Tracing."""
        self._num_ended += 1
        if not self._is_closing:
            self._processor.on_end(WaitingCall(call))

    @property
    def num_exported(self) -> int:
        """The number of exported spans."""
        return self._exporter.num_exported

    @property
    def num_lost(self) -> int:
        """The number of ended calls whose spans are not exported so far."""
        return self._num_ended - self.num_exported

    async def __aenter__(self) -> Self:
        self._warning.open()
        try:
            exporter = self._make_exporter()
        except BaseException:
            self._warning.close()
            raise

        self._exporter = CallExporter(exporter, self._spans, self._warning)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=self._limits.queue,
            schedule_delay_millis=1000 * self._limits.delay_s,
            max_export_batch_size=min(self._limits.batch, self._limits.queue),
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await in_thread(self.close)

    def close(self) -> None:
        """Exports the waiting spans, for at most `flush_s` seconds, and drops the rest."""
        self._is_closing = True
        self._exporter.is_ending = True
        ending = threading.Thread(target=self._end, name="agentevo-tracing-end", daemon=True)
        ending.start()
        ending.join(self._flush_s)
        reason = (
            self._warning.problem
            or "calls ended faster than the exporter sent their spans (tracing.max_queue)"
        )
        if ending.is_alive():
            self._exporter.has_given_up = True
            self._warning.mute()
            reason = (
                self._warning.problem or f"the exporter did not finish within {self._flush_s:g} s"
            )

        exported = self.num_exported
        if num_lost := self.num_lost:
            self._notify(f"tracing: {num_lost} spans were not exported, {exported} were: {reason}")
        elif exported:
            self._notify(f"tracing: {exported} spans were exported")

    def _end(self) -> None:
        # The processor's shutdown waits at most 30 s for the remaining spans, so flush them before.
        self._processor.force_flush()
        self._processor.shutdown()
        self._warning.close()


def _num_characters(span: ReadableSpan) -> int:
    return sum(len(value) for value in (span.attributes or {}).values() if isinstance(value, str))
