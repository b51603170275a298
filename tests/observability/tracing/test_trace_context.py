"""Places in traces: ids that all processes compute alike, and the header that tells of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentevo.observability.tracing.spans import attempt_of
from agentevo.store.trace_context import (
    MAX_HEADER_CHARS,
    TracePlace,
    read_traceparent,
    span_of,
    trace_of,
)

PLACES = st.builds(TracePlace, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())


@given(PLACES)
def test_what_a_place_says_opentelemetry_reads_and_so_do_we(place: TracePlace) -> None:
    context = TraceContextTextMapPropagator().extract({"traceparent": place.header})
    theirs = get_current_span(context).get_span_context()
    assert (theirs.trace_id, theirs.span_id) == place[:2]
    assert theirs.trace_flags.sampled == place.is_sampled
    assert read_traceparent(place.header) == place


GOOD = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "0",
        GOOD.upper(),
        GOOD[:-1],
        GOOD + "-more",
        "ff" + GOOD[2:],
        GOOD.replace("a", "0"),
        GOOD.replace("b", "0"),
        GOOD.replace("a", "g"),
        "1" * MAX_HEADER_CHARS * 100,
        GOOD.replace("a", "٣"),
    ],
)
def test_a_bad_header_is_as_good_as_none(bad: str) -> None:
    assert read_traceparent(bad) is None


def test_a_later_version_may_say_more() -> None:
    assert read_traceparent("01" + GOOD[2:] + "-more") == read_traceparent(GOOD)


@given(st.text(max_size=20), st.text(max_size=20), st.floats(0, 1))
def test_the_share_is_what_opentelemetrys_sampler_takes(run: str, attempt: str, share: float):
    trace = trace_of(run, attempt, share)
    theirs = TraceIdRatioBased(share).should_sample(None, trace.trace_id, "")
    assert trace.is_sampled == (theirs.decision is Decision.RECORD_AND_SAMPLE)
    assert trace == trace_of(run, attempt, share)
    assert 0 < trace.trace_id < 2**128


def test_a_quarter_of_the_attempts_is_a_quarter_and_others_in_another_run() -> None:
    sampled = [
        {n for n in range(4000) if trace_of(run, f"t/train@1#{n}", 0.25).is_sampled} for run in "ab"
    ]
    assert all(900 < len(one) < 1100 for one in sampled)
    assert sampled[0] != sampled[1]


def test_spans_of_all_calls_differ() -> None:
    assert len({span_of(f"r-{n}") for n in range(10_000)}) == 10_000


@pytest.mark.parametrize(
    ("trajectory", "attempt"),
    [
        ("t/train@3#1", "t/train@3#1"),
        ("t/train@3:solver#1", "t/train@3#1"),
        ("a/b@1:x#2/train@3:solver#1", "a/b@1:x#2/train@3#1"),
        ("whatever", "whatever"),
        ("", ""),
    ],
)
def test_several_agents_of_an_attempt_share_its_trace(trajectory: str, attempt: str) -> None:
    assert attempt_of(trajectory) == attempt


def test_a_long_and_hostile_id_is_read_in_no_time() -> None:
    assert attempt_of("/a@1:" * 100_000) == "/a@1:" * 100_000
