"""Spans of recorded calls: made in a thread, exported whatever the exporter does, bounded."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from collector import Collector, Received, received, request_of_json
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from agentevo.errors import DiskError
from agentevo.observability.tracing import tracer as tracer_module
from agentevo.observability.tracing.otlp import JsonLines, collector_exporter, request_json
from agentevo.observability.tracing.spans import RunFacts, Spans
from agentevo.observability.tracing.texts import SpanTexts
from agentevo.observability.tracing.tracer import TraceLimits, Tracer
from agentevo.runtime.trace_header import traceparent
from agentevo.store.call_log import AttemptCalls, CallLog, record_call, set_asker
from agentevo.store.trace_context import AttemptTrace, TracedMessage, TracePlace, read_traceparent
from agentevo.types import Call, Message

RESOURCE = Resource({"service.name": "test"})
ATTEMPT = "t/train@3#1"


class Kept(SpanExporter):
    """An exporter that keeps what it gets; `before` is called first."""

    def __init__(self, before: Any = lambda: None) -> None:
        self.spans: list[Received] = []
        self.before = before

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.before()
        self.spans += received(encode_spans(spans))
        return SpanExportResult.SUCCESS


class Nowhere:
    """A store of calls that keeps none."""

    async def write_calls(self, calls: Any) -> None: ...
    async def renew_calls(self, recorder: str) -> None: ...
    async def close(self) -> None: ...


def make(exporter: Any, **options: Any) -> Tracer:
    run = RunFacts("coins", "run-1", "tiny", False)
    texts = SpanTexts(options.pop("longest", 200), {})
    spans = Spans(run, texts, RESOURCE, contents=options.get("contents", False))
    return Tracer(lambda: exporter, spans, run_id=run.id, **options)


def played(tracer: Tracer, play: Any) -> None:
    """What `play(log)` records."""

    async def scenario() -> None:
        async def nowhere() -> Any:
            return Nowhere()

        async with tracer, CallLog(nowhere, tracing=tracer) as log:
            await play(log)

    asyncio.run(scenario())


async def one_attempt(log: CallLog, name: str = ATTEMPT) -> None:
    """An attempt with a call of each kind."""
    calls = AttemptCalls(log, name)
    with calls.attempt("Player") as attempt:
        with record_call("policy", "generate", prompt_tokens=5) as asked:
            asked.note(turn=0, completion_tokens=2, completions=1, version=4)
            question = Message("user", "What?")
            answer = Message("assistant", "That.")
            asked.traced_message = TracedMessage(
                messages=[question], answers=[answer], finish_reasons=["stop"]
            )

        async with record_call("tool", "search") as tool:
            tool.keep(arguments='{"q": 1}', result="found")
            with record_call("remote", "judge", prompt_tokens=3):
                pass

        with record_call("tool", "broken") as broken:
            broken.outcome("failed", "ToolError: the secret words")

        attempt.note(reward=1.0)
        attempt.keep(ending="in a hole")

    with calls.call("scorer", "exact") as scorer:
        scorer.note(score=1.0)
        scorer.keep(reason="right")


def test_an_attempt_is_one_trace_with_the_names_of_the_conventions() -> None:
    kept = Kept()
    played(make(kept), one_attempt)
    spans = {span.name: span for span in kept.spans}
    assert list(spans) == [
        "chat tiny",
        "chat judge",
        "execute_tool search",
        "execute_tool broken",
        "invoke_agent Player",
        "score exact",
    ]

    root = spans["invoke_agent Player"]
    assert root.parent_id == ""
    assert {span.trace_id for span in kept.spans} == {root.trace_id}
    assert spans["chat judge"].parent_id == spans["execute_tool search"].span_id

    for name in ("chat tiny", "execute_tool search", "score exact"):
        assert spans[name].parent_id == root.span_id

    chat = spans["chat tiny"].attributes
    assert (chat["gen_ai.usage.input_tokens"], chat["gen_ai.usage.output_tokens"]) == (5, 2)
    assert chat["gen_ai.response.finish_reasons"] == ["stop"]
    assert chat["agentevo.version"] == 4
    assert root.attributes["agentevo.reward"] == 1.0

    for span in kept.spans:
        told = {name: span.attributes[f"agentevo.{name}"] for name in ("step", "attempt", "label")}
        assert told == {"step": 3, "attempt": 1, "label": "train"}
        assert span.attributes["agentevo.group.id"] == "t/train@3"
        assert span.attributes["agentevo.run.name"] == "coins"
        assert span.start_ns <= span.end_ns

    ((_, event),) = spans["score exact"].events
    assert event["gen_ai.evaluation.score.value"] == 1.0
    assert spans["execute_tool broken"].resource["service.name"] == "test"


@pytest.mark.parametrize("contents", [False, True])
def test_what_was_said_is_there_if_it_was_asked_for(contents: bool) -> None:
    kept = Kept()
    played(make(kept, contents=contents), one_attempt)

    told = repr(kept.spans)
    for words in ("What?", "That.", "q", "found", "right", "secret words", "in a hole"):
        assert (words in told) == contents or words == "q"

    if contents:
        chat = kept.spans[0].attributes
        assert json.loads(str(chat["gen_ai.output.messages"]))[0]["finish_reason"] == "stop"


def test_an_attempt_outside_of_the_share_has_no_spans_and_programs_are_told_so() -> None:
    kept = Kept()
    headers = []

    async def play(log: CallLog) -> None:
        with AttemptCalls(log, ATTEMPT).attempt("Player"):
            headers.append(traceparent())

    played(make(kept, share=0.0), play)
    assert kept.spans == []
    assert headers[0].endswith("-00")


def test_without_tracing_nobody_is_told_of_a_trace() -> None:
    async def play() -> None:
        async def nowhere() -> Any:
            return Nowhere()

        async with CallLog(nowhere) as log:
            with AttemptCalls(log, ATTEMPT).attempt("Player") as attempt:
                assert traceparent() is None
                assert attempt.place is None

    asyncio.run(play())


def test_a_call_for_a_program_is_a_child_of_its_span_or_linked_with_it() -> None:
    kept = Kept()
    tracer = make(kept)
    own = TracePlace(tracer.trace_of(ATTEMPT).trace_id, 77, True)
    answers = []

    async def play(log: CallLog) -> None:
        with AttemptCalls(log, ATTEMPT).attempt("Player"):

            async def request(place: TracePlace | None) -> None:
                asker = set_asker(place)
                with record_call("policy", "generate") as call, record_call("tool", "inner"):
                    pass
                answers.append(read_traceparent(asker.answer or ""))
                assert answers[-1] == call.place

            for place in (own, TracePlace(5, 6, True), None):
                await asyncio.create_task(request(place))

    played(tracer, play)
    child, linked, plain = (span for span in kept.spans if span.name == "chat tiny")
    root = kept.spans[-1]

    assert (child.parent_id, child.links) == (f"{77:016x}", [])
    assert (linked.parent_id, linked.links) == (root.span_id, [f"{5:032x}"])
    assert (plain.parent_id, plain.links) == (root.span_id, [])

    inner = [span for span in kept.spans if span.name == "execute_tool inner"]
    chats = [child.span_id, linked.span_id, plain.span_id]
    assert [span.parent_id for span in inner] == chats
    assert [f"{place.span_id:016x}" for place in answers] == chats


def raises() -> None:
    raise RuntimeError("no such collector: postgresql://me:letmein@host/db\x1b[2J" + "and on" * 999)


def test_an_exporter_that_fails_costs_a_line_at_first_and_one_at_the_end() -> None:
    lines: list[str] = []
    tracer = make(Kept(raises), notify=lines.append, limits=TraceLimits(delay_s=0.01))
    played(tracer, one_attempt)
    assert tracer.num_lost == 6

    first, last = lines
    assert "reported once" in first
    assert "RuntimeError: no such collector" in first
    assert "letmein" not in first + last
    assert (first + last).isprintable()
    assert len(first) < 1000
    assert "6 spans were not exported, 0 were" in last


def test_an_exporter_that_fails_twice_at_the_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracer_module, "EXPORT_CHARS", 1)
    exports: list[int] = []

    def refuse() -> None:
        exports.append(1)
        raises()

    tracer = make(Kept(refuse), limits=TraceLimits(delay_s=600))
    played(tracer, one_attempt)
    assert (len(exports), tracer.num_lost) == (2, 6)


def test_an_exporter_that_hangs_holds_up_the_end_for_a_bounded_time() -> None:
    released = threading.Event()
    lines = []
    kept = Kept(lambda: released.wait(600) or None)
    options = {"notify": lines.append, "limits": TraceLimits(delay_s=0.01), "flush_s": 0.2}
    played(make(kept, **options), one_attempt)
    released.set()
    wait_for_the_end()
    (line,) = lines
    assert "did not finish within" in line
    assert line.startswith("tracing: 6 spans were not exported")


def wait_for_the_end() -> None:
    """Of tracers that were left behind."""
    for thread in threading.enumerate():
        if thread.name == "agentevo-tracing-end":
            thread.join(300)


@pytest.mark.slow
def test_a_run_of_a_moment_loses_no_span() -> None:
    lines: list[str] = []
    kept = Kept()

    async def play(log: CallLog) -> None:
        for number in range(100):
            await one_attempt(log, f"t/train@3#{number}")

    played(make(kept, notify=lines.append, limits=TraceLimits(batch=50)), play)
    assert (len(kept.spans), lines) == (600, ["tracing: 600 spans were exported"])


@pytest.mark.slow
def test_a_collector_that_is_away_for_a_moment_costs_no_span() -> None:
    lines: list[str] = []
    statuses = [503]
    with Collector(answer=lambda: statuses.pop() if statuses else 200) as collector:
        exporter = collector_exporter(collector.url)
        played(make(exporter, notify=lines.append), one_attempt)

    assert len({span.span_id for span in collector.spans}) == len(collector.spans) == 6
    first, last = lines
    assert "Service Unavailable" in first
    assert last == "tracing: 6 spans were exported"


def test_an_exporter_that_can_not_be_made_leaves_nothing_behind() -> None:
    def fail() -> Any:
        raise DiskError("no room")

    spans = Spans(
        RunFacts("coins", "run-1", "tiny", False), SpanTexts(200, {}), RESOURCE, contents=False
    )
    with pytest.raises(DiskError, match="no room"):
        played(Tracer(fail, spans, run_id="run-1"), one_attempt)
    assert logging.getLogger("opentelemetry").propagate


def test_after_the_deadline_an_exporter_gets_nothing_more() -> None:
    released = threading.Event()
    given = []
    kept = Kept(lambda: (given.append(1), released.wait(600)))

    async def play(log: CallLog) -> None:
        for number in range(10):
            await one_attempt(log, f"t/train@3#{number}")

    tracer = make(kept, limits=TraceLimits(batch=6), flush_s=0.2)
    played(tracer, play)
    released.set()
    wait_for_the_end()
    assert len(given) == 1


def test_what_the_queue_does_not_hold_is_dropped_and_counted() -> None:
    lines: list[str] = []
    released = threading.Event()
    kept = Kept(lambda: released.wait(600))
    tracer = make(kept, notify=lines.append, limits=TraceLimits(queue=10, delay_s=600))

    async def play(log: CallLog) -> None:
        with AttemptCalls(log, ATTEMPT).attempt("Player"):
            for _ in range(1000):
                with record_call("tool", "t"):
                    pass
        released.set()

    played(tracer, play)
    assert 10 <= len(kept.spans) < 1001
    assert len(kept.spans) + tracer.num_lost == 1001
    assert f"{tracer.num_lost} spans were not exported" in lines[-1]
    assert len(lines) <= 2  # OpenTelemetry logs a full queue once in 20 s of a process


def test_a_span_that_can_not_be_made_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    make_span = Spans.of

    def fail_for_one(self: Spans, call: Call, *arguments: Any, **options: Any) -> ReadableSpan:
        if call.name == "broken":
            raise ValueError("no such span")
        return make_span(self, call, *arguments, **options)

    monkeypatch.setattr(Spans, "of", fail_for_one)
    kept = Kept()
    lines = list[str]()
    tracer = make(kept, notify=lines.append)
    played(tracer, one_attempt)

    assert (len(kept.spans), tracer.num_exported, tracer.num_lost) == (5, 5, 1)
    assert "no such span" in lines[0]


def test_what_a_call_notes_after_somebody_looked_at_it_is_recorded() -> None:
    calls = AttemptCalls(None, ATTEMPT)
    with calls.call("scorer", "exact") as call:
        call.note(score=0.5)

    assert call.record("r").attributes == {"score": 0.5}
    assert call.record("r") is call.record("r")
    call.note(score=1.0)
    call.keep(reason="right")
    assert call.record("r").attributes == {"score": 1.0, "reason": "right"}


@pytest.mark.slow
def test_a_huge_batch_goes_in_pieces(monkeypatch) -> None:
    monkeypatch.setattr(tracer_module, "EXPORT_CHARS", 2**19)
    sizes: list[int] = []

    class Sized(Kept):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            sizes.append(len(request_json(spans)))
            return SpanExportResult.SUCCESS

    async def play(log: CallLog) -> None:
        with AttemptCalls(log, ATTEMPT).attempt("Player"):
            for _ in range(40):
                with record_call("tool", "t") as tool:
                    tool.keep(result="long " * 13_000)

    played(make(Sized(), longest=2**20, contents=True, limits=TraceLimits(delay_s=600)), play)

    assert sum(sizes) > 2.5e6
    assert max(sizes) < 0.7e6


def test_a_collector_gets_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    with Collector() as collector:

        class Both(Kept):
            exporters = (collector_exporter(collector.url), JsonLines(path))

            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                super().export(spans)
                for exporter in self.exporters:
                    assert exporter.export(spans) is SpanExportResult.SUCCESS
                return SpanExportResult.SUCCESS

        both = Both()
        played(make(both, contents=True), one_attempt)

    lines = [request_of_json(line) for line in path.read_bytes().splitlines()]
    assert [span for line in lines for span in received(line)] == collector.spans == both.spans
    assert len(collector.spans) == 6

    failed = next(span for span in collector.spans if span.name == "execute_tool broken")
    assert failed.error == "ToolError: the secret words"


def test_the_json_says_what_the_encoder_says() -> None:
    made: list[ReadableSpan] = []

    class Made(Kept):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            made.extend(spans)
            return super().export(spans)

    async def play(log: CallLog) -> None:
        await one_attempt(log)
        with AttemptCalls(log, ATTEMPT).call("tool", "values") as call:
            call.note(yes=True, one=1, half=0.5, text='"\u2028é', large=-(2**63))

        async def request() -> None:
            set_asker(TracePlace(5, 6, True))
            with record_call("policy", "generate"):
                pass

        with AttemptCalls(log, ATTEMPT).attempt("Player"):
            await asyncio.create_task(request())

    played(make(Made(), contents=True), play)
    encoded = encode_spans(made)
    for span in encoded.resource_spans[0].scope_spans[0].spans:
        span.flags = 0  # the JSON leaves them out, and a status that says nothing
        for link in span.links:
            link.flags = 0
        if not span.status.code:
            span.ClearField("status")
    assert any(span.links for span in made)
    assert request_of_json(request_json(made)) == encoded


def test_a_collector_that_refuses_is_told_of_with_its_reason() -> None:
    lines: list[str] = []
    with Collector(answer=lambda: 400) as collector:
        exporter = collector_exporter(collector.url)
        played(make(exporter, notify=lines.append), one_attempt)

    first, last = lines
    assert "Bad Request" in first
    assert "6 spans were not exported" in last
    assert logging.getLogger("opentelemetry").propagate


def test_a_fact_that_has_the_name_of_an_attribute_stands_once_and_in_its_span_alone() -> None:
    spans = Spans(
        RunFacts("r", "run-1", "tiny", False), SpanTexts(200, {}), RESOURCE, contents=False
    )
    made = [
        spans.of(
            Call(
                id=f"c-{number}",
                trajectory_id=ATTEMPT,
                kind="policy",
                name="generate",
                started_at=1.0,
                ended_at=2.0,
                status="completed",
                attributes=facts,
            ),
            AttemptTrace(5, True),
        )
        for number, facts in enumerate(({}, {"step": 9}, {}))
    ]
    assert [span.attributes["agentevo.step"] for span in made] == [3, 9, 3]
