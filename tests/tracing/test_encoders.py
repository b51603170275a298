"""Spans as JSON and as protobuf: what OpenTelemetry's own encoder makes of the same spans, whatever
is in them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from collector import request_of_json
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otel_encoder import request_of_sdk

from agentevo.store.trace_context import AttemptTrace
from agentevo.tracing import otlp_proto
from agentevo.tracing.otlp_json import encoded
from agentevo.tracing.span import Event, Shared, Source, Span
from agentevo.tracing.spans import RunFacts, Spans
from agentevo.tracing.texts import SpanTexts
from agentevo.types import Call

SOURCE = Source(attributes={"service.name": 'a "service"', "more": 3}, version="1")
TEXT = st.text(st.characters(codec="utf-8"), max_size=300)
VALUES = st.one_of(
    TEXT,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(TEXT, max_size=3),
)


def attributes(prefix: str) -> Any:
    keys = TEXT.filter(bool).map(lambda text: prefix + text)
    return st.dictionaries(keys, VALUES, max_size=5)


IDS = st.integers(1, 2**63)
SHARED = st.lists(st.builds(Shared, attributes("s")), max_size=1).map(tuple)
EVENTS = st.builds(Event, name=TEXT, at_ns=IDS, attributes=attributes("e"))
SPANS = st.builds(
    Span,
    name=TEXT,
    kind=st.sampled_from(["internal", "server", "client"]),
    trace_id=st.integers(1, 2**128 - 1),
    span_id=IDS,
    parent_id=st.none() | IDS,
    start_ns=IDS,
    end_ns=IDS,
    shared=SHARED,
    own=attributes("o"),
    events=st.lists(EVENTS, max_size=2).map(tuple),
    links=st.lists(st.tuples(IDS, IDS), max_size=2).map(tuple),
    is_error=st.booleans(),
    message=TEXT,
)


@pytest.mark.slow
@given(st.lists(SPANS, min_size=1, max_size=4))
def test_the_json_says_what_opentelemetrys_encoder_says(spans: list[Span]) -> None:
    line = encoded(spans, SOURCE, end=b"\n")
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1

    mine = request_of_json(line)
    theirs = request_of_sdk(spans, SOURCE)
    for span in theirs.resource_spans[0].scope_spans[0].spans:
        span.flags = 0  # our files leave it out
        for link in span.links:
            link.flags = 0

    assert mine == theirs


@given(st.lists(SPANS, min_size=1, max_size=4))
def test_the_protobuf_is_opentelemetrys_encoders(spans: list[Span]) -> None:
    mine = otlp_proto.request([otlp_proto.encoded_span(span) for span in spans], SOURCE)
    assert ExportTraceServiceRequest.FromString(mine) == request_of_sdk(spans, SOURCE)


def test_one_value_of_two_types_is_two_attributes() -> None:
    made = [_span({"x": value}) for value in (1, True, 1.0, "1", ["1"], 0, False, 0.0)]
    assert len({encoded([one], SOURCE) for one in made}) == len(made)
    assert len({otlp_proto.encoded_span(one) for one in made}) == len(made)


def _span(own: dict[str, Any]) -> Span:
    return Span(
        name="a",
        kind="internal",
        trace_id=1,
        span_id=1,
        parent_id=None,
        start_ns=1,
        end_ns=2,
        own=own,
    )


def test_a_fact_that_has_the_name_of_an_attribute_stands_once_and_in_its_span_alone() -> None:
    spans = Spans(RunFacts("r", "run-1", "tiny", False), SpanTexts(200, {}), contents=False)
    made = [
        spans.of(
            Call(
                id=f"c-{number}",
                trajectory_id="t/train@3#1",
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
    read = json.loads(encoded(made, SOURCE))["resourceSpans"][0]["scopeSpans"][0]["spans"]
    steps = [
        [one["value"]["intValue"] for one in span["attributes"] if one["key"] == "agentevo.step"]
        for span in read
    ]
    assert steps == [["3"], ["9"], ["3"]]
