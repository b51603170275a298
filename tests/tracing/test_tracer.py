"""Spans of recorded calls: made in a thread, exported whatever the exporter does, bounded."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from collector import Collector, received, request_of_json
from otel_encoder import request_of_sdk

from agentevo.store.call_log import AttemptCalls, CallLog, asked_by, record_call
from agentevo.store.trace_context import TracedMessage, TracePlace, read_traceparent
from agentevo.trace_header import traceparent
from agentevo.tracing import tracer as tracer_module
from agentevo.tracing.otlp import OTLP
from agentevo.tracing.otlp_json import JsonLines, encoded
from agentevo.tracing.span import Source, Span
from agentevo.tracing.spans import RunFacts, Spans
from agentevo.tracing.texts import SpanTexts
from agentevo.tracing.tracer import TraceLimits, Tracer
from agentevo.types import Message

SOURCE = Source(attributes={"service.name": "test"}, version="1")
ATTEMPT = "t/train@3#1"


class Kept:
    """An exporter that keeps what it gets; `before` is called first."""

    def __init__(self, before: Any = lambda: None) -> None:
        self.spans: list[Span] = []
        self.before = before

    def open(self) -> None: ...

    def made(self, span: Span) -> Span:
        return span

    def export(self, made: Sequence[Span]) -> None:
        self.before()
        self.spans += made

    def close(self) -> None: ...


class Nowhere:
    """A store of calls that keeps none."""

    async def write_calls(self, calls: Any) -> None: ...
    async def renew_calls(self, recorder: str) -> None: ...
    async def close(self) -> None: ...


def make(exporter: Any, **options: Any) -> Tracer:
    run = RunFacts("coins", "run-1", "tiny", False)
    spans = Spans(run, SpanTexts(200, {}), contents=options.get("contents", False))
    return Tracer(exporter, spans, run_id=run.id, **options)


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
            asked.said = TracedMessage(asked=[question], answers=[answer], finish_reasons=["stop"])

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
    assert root.parent_id is None
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

    (event,) = spans["score exact"].events
    assert event.attributes["gen_ai.evaluation.score.value"] == 1.0


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
                asker = asked_by(place)
                with record_call("policy", "generate") as call, record_call("tool", "inner"):
                    pass
                answers.append(read_traceparent(asker.answer or ""))
                assert answers[-1] == call.place

            for place in (own, TracePlace(5, 6, True), None):
                await asyncio.create_task(request(place))

    played(tracer, play)
    child, linked, plain = (span for span in kept.spans if span.name == "chat tiny")
    root = kept.spans[-1]

    assert (child.parent_id, child.links) == (77, ())
    assert (linked.parent_id, linked.links) == (root.span_id, ((5, 6),))
    assert (plain.parent_id, plain.links) == (root.span_id, ())

    inner = [span for span in kept.spans if span.name == "execute_tool inner"]
    chats = [child.span_id, linked.span_id, plain.span_id]
    assert [span.parent_id for span in inner] == chats
    assert [place.span_id for place in answers] == chats


def raises() -> None:
    raise RuntimeError("no such collector: postgresql://me:letmein@host/db\x1b[2J" + "and on" * 999)


@pytest.mark.slow
def test_an_exporter_that_fails_costs_a_line_at_first_and_one_at_the_end() -> None:
    lines: list[str] = []
    tracer = make(Kept(raises), tell=lines.append, limits=TraceLimits(delay_s=0.01))
    played(tracer, one_attempt)
    assert tracer.dropped == 6

    first, last = lines
    assert "RuntimeError: no such collector" in first
    assert "the run goes on" in first
    assert "letmein" not in first + last
    assert (first + last).isprintable()
    assert len(first) < 1000
    assert "6 spans were not exported, 0 were" in last


def test_an_exporter_that_hangs_holds_up_the_end_for_a_bounded_time() -> None:
    released = threading.Event()
    lines = []
    kept = Kept(lambda: released.wait(600) or None)
    options = {"tell": lines.append, "limits": TraceLimits(delay_s=0.01), "flush_s": 0.2}
    played(make(kept, **options), one_attempt)
    released.set()
    assert "did not end within" in lines[-1]
    assert lines[-1].startswith("tracing: 6 spans were not exported")


class Slow(Kept):
    """Opens as MLflow does: a package, and the tables of a new database."""

    def __init__(self, opening_s: float) -> None:
        super().__init__()
        self.opening_s = opening_s
        self.opened = 0

    def open(self) -> None:
        if not self.opened:
            time.sleep(self.opening_s)
            self.opened += 1


def test_a_run_shorter_than_the_opening_of_its_exporter_loses_no_span() -> None:
    lines: list[str] = []
    slow = Slow(0.5)

    async def play(log: CallLog) -> None:
        for number in range(100):
            await one_attempt(log, f"t/train@3#{number}")

    played(make(slow, tell=lines.append, limits=TraceLimits(batch=50)), play)
    told = ["tracing: 600 spans were exported"]
    assert (len(slow.spans), slow.opened, lines) == (600, 1, told)


def test_an_exporter_is_opened_while_the_run_goes_on() -> None:
    opened = threading.Event()

    class Opens(Kept):
        def open(self) -> None:
            opened.set()

    async def play(log: CallLog) -> None:
        assert await asyncio.to_thread(opened.wait, 300)

    played(make(Opens()), play)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_collector_that_fails_for_a_while_costs_no_span(monkeypatch, failing: int) -> None:
    monkeypatch.setattr(tracer_module, "REST_S", 0.01)
    lines: list[str] = []
    left = [raises] * failing
    kept = Kept(lambda: left.pop()() if left else None)

    async def play(log: CallLog) -> None:
        await one_attempt(log)
        while len(kept.spans) < 6:
            await asyncio.sleep(0.01)

    tracer = make(kept, tell=lines.append, limits=TraceLimits(delay_s=0.01))
    played(tracer, lambda log: asyncio.wait_for(play(log), 300))
    assert len({span.span_id for span in kept.spans}) == len(kept.spans) == 6
    assert "tried 3 times" in lines[0]
    assert lines[1:] == ["tracing: 6 spans were exported"]


@pytest.mark.slow
def test_an_exporter_that_can_not_be_opened_fails_as_one_that_takes_nothing() -> None:
    lines: list[str] = []

    class Shut(Kept):
        def open(self) -> None:
            raises()

    played(make(Shut(), tell=lines.append), one_attempt)
    assert "6 spans were not exported, 0 were: RuntimeError" in lines[-1]


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
    tracer._thread.join(300)
    assert len(given) == 1


def test_what_the_queue_does_not_hold_is_dropped_and_counted() -> None:
    lines: list[str] = []
    kept = Kept()
    tracer = make(kept, tell=lines.append, limits=TraceLimits(queue=10, delay_s=600))

    async def play(log: CallLog) -> None:
        with AttemptCalls(log, ATTEMPT).attempt("Player"):
            for _ in range(1000):
                with record_call("tool", "t"):
                    pass

    async def before(log: CallLog) -> None:
        tracer._wake.wait = lambda timeout: tracer._closing.wait(600)  # type: ignore[method-assign]
        await play(log)

    played(tracer, before)
    assert len(kept.spans) >= 10
    assert len(kept.spans) + tracer.refused == 1001
    assert "the queue of 10 (tracing.max_queue)" in lines[0]
    assert f"{tracer.refused} spans were not exported" in lines[-1]
    assert len(lines) == 2


def test_a_span_that_can_not_be_made_costs_itself_alone() -> None:
    class Picky(Kept):
        def made(self, span: Span) -> Span:
            if span.name == "execute_tool broken":
                raise ValueError("no such span")
            return span

    kept = Picky()
    lines = list[str]()
    tracer = make(kept, tell=lines.append)
    played(tracer, one_attempt)

    assert (len(kept.spans), tracer.exported, tracer.dropped) == (5, 5, 1)
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


def test_a_huge_batch_goes_in_pieces(monkeypatch) -> None:
    monkeypatch.setattr(tracer_module, "PIECE", 2**19)
    sizes: list[int] = []

    class Sized(Kept):
        def export(self, made: Sequence[Span]) -> None:
            sizes.append(len(encoded(made, SOURCE)))

    async def play(log: CallLog) -> None:
        with AttemptCalls(log, ATTEMPT).attempt("Player"):
            for _ in range(40):
                with record_call("tool", "t") as tool:
                    tool.keep(result="long " * 13_000)

    run = RunFacts("coins", "run-1", "tiny", False)
    spans = Spans(run, SpanTexts(2**20, {}), contents=True)
    played(Tracer(Sized(), spans, run_id="r", contents=True, limits=TraceLimits(delay_s=600)), play)

    assert sum(sizes) > 2.5e6
    assert max(sizes) < 0.7e6


def test_a_collector_gets_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    with Collector() as collector:

        class Both(Kept):
            def __init__(self) -> None:
                super().__init__()
                self.all = [OTLP(SOURCE, collector.url), JsonLines(path, SOURCE)]

            def export(self, made: Sequence[Span]) -> None:
                super().export(made)
                for one in self.all:
                    one.export([one.made(span) for span in made])

            def close(self) -> None:
                for one in self.all:
                    one.close()

        both = Both()
        played(make(both, contents=True), one_attempt)

    lines = [request_of_json(line) for line in path.read_bytes().splitlines()]
    assert [span for line in lines for span in received(line)] == collector.spans
    assert collector.spans == received(request_of_sdk(both.spans, SOURCE))
    assert len(collector.spans) == 6

    failed = next(span for span in collector.spans if span.name == "execute_tool broken")
    assert failed.error == "ToolError: the secret words"
    assert failed.resource["service.name"] == "test"


@pytest.mark.slow
def test_a_collector_that_refuses_is_told_of_with_its_reason() -> None:
    lines: list[str] = []
    with Collector(answer=lambda: 400) as collector:
        exporter = OTLP(SOURCE, collector.url)
        played(make(exporter, tell=lines.append), one_attempt)
    assert collector.url in lines[0]
    assert "6 spans were not exported" in lines[-1]
