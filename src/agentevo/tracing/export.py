"""Exports stored calls as spans to a file, for a run that was not traced.

Names, trace ids and span ids equal those of the run's own tracer (tracing/spans.py). So a second
export, or a trace of the run, has the same spans. If the run was never traced, the trace ids follow
from the name of its first process, which is unique.

With `contents`, a call of the policy has the messages of its turn, so `agentevo data import` can
read them. Facts that only a tracer sees are missing: the request at the gateway that caused a call,
and the attempt of several agents that the call belongs to. The messages of an attempt are left out
if the attempt lost answers, or is not in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import format_span_id, format_trace_id

from agentevo.errors import StoreError
from agentevo.progress import bar
from agentevo.store import Store
from agentevo.store.export import atomic_file
from agentevo.store.trace_context import TracedMessage, trace_of
from agentevo.tracing.opening import BATCH, LENGTH, kept_run_id
from agentevo.tracing.otlp import request_json
from agentevo.tracing.spans import RunFacts, Spans, attempt_of, run_resource
from agentevo.tracing.texts import SpanTexts
from agentevo.types import Call, Message, Turn

CACHED_ATTEMPTS = 512
"""The number of attempts whose messages are cached while calls are read: as many as run at the same
time."""


class Exported(NamedTuple):
    """The numbers of calls that became spans, and of calls without an end, because they still run
    or their process was killed."""

    spans: int
    unended: int


async def export_spans(
    store: Store,
    out: Path,
    run: RunFacts,
    *,
    folder: Path,
    requests: bool,
    contents: bool = False,
) -> Exported:
    """Writes the calls that have ended to `out` (.jsonl or .jsonl.gz), which appears whole or not
    at all. A line is a request of up to BATCH spans in OTLP's JSON, or a single span.

    `run.id` is not set: it comes from `folder`, or from the calls. `contents`: whether spans
    contain the messages of the policy, and the inputs and outputs of tools, scorers and programs.
    Raises StoreError for a path that can't be written.
    """
    spans: Spans | None = None
    conversations = _Conversations(store)
    batch: list[ReadableSpan] = []
    num_spans = num_unended = 0
    with atomic_file(out) as file, bar("trajectories export", await store.num_calls()) as read:

        def write() -> None:
            if batch and requests:
                file.write(request_json(batch) + b"\n")
            elif batch:
                file.write(b"".join(_line(span) + b"\n" for span in batch))
            batch.clear()

        async for stored in store.calls():
            call = stored.call
            read.advance()
            if spans is None:
                run = run._replace(id=kept_run_id(folder) or call.id.rpartition("-")[0])
                resource = run_resource(of_this_process=False)
                spans = Spans(run, SpanTexts(LENGTH), resource, contents=contents)

            if call.ended_at is None:
                num_unended += 1
                continue

            trace = trace_of(run.id, attempt_of(call.trajectory_id), 1.0)
            traced_message = await conversations.messages_of(call) if contents else None
            batch.append(spans.of(call, trace, traced_message=traced_message))
            num_spans += 1

            if len(batch) == BATCH:
                write()

        write()

    return Exported(num_spans, num_unended)


class _Conversations:
    """The messages of stored attempts."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turns: dict[str, list[TracedMessage]] = {}
        """Maps an attempt to the messages of each of its turns. The oldest entries are removed
        first."""

    async def messages_of(self, call: Call) -> TracedMessage | None:
        """The messages of a call. None if it is not a call of the policy, or if its turns are
        unknown."""
        first = call.attributes.get("turn")
        count = call.attributes.get("completions")
        if call.kind != "policy" or not isinstance(first, int) or not isinstance(count, int):
            return None

        if call.trajectory_id not in self._turns:
            if len(self._turns) == CACHED_ATTEMPTS:
                del self._turns[next(iter(self._turns))]
            self._turns[call.trajectory_id] = await self._read(call.trajectory_id)

        turns = self._turns[call.trajectory_id][first : first + count]
        if len(turns) < count:
            return None
        return replace(
            turns[0],
            answers=[answer for turn in turns for answer in turn.answers],
            finish_reasons=[reason for turn in turns for reason in turn.finish_reasons],
        )

    async def _read(self, trajectory_id: str) -> list[TracedMessage]:
        try:
            trajectory = await self._store.trajectory(trajectory_id)
        except StoreError:  # dropped, or its group was not written
            return []

        if "num_undelivered" in trajectory.metrics:  # its turns were renumbered
            return []

        turns: list[TracedMessage] = []
        contexts: list[list[Message]] = []
        for turn in trajectory.turns:
            context = [] if turn.parent is None else contexts[turn.parent]
            tools = turn.tools if turn.parent is None else turns[turn.parent].tools
            contexts.append([*context, *turn.messages])
            turns.append(_said_in_turn(turn, contexts[-1], tools))

        return turns


def _said_in_turn(turn: Turn, context: Sequence[Message], tools: str) -> TracedMessage:
    return TracedMessage(
        messages=context[:-1],
        answers=turn.messages[-1:],
        tools=tools,
        finish_reasons=[turn.finish_reason],
        temperature=turn.temperature,
    )


def _line(span: ReadableSpan) -> bytes:
    """A span as a separate line. Its ids are in hexadecimal as everywhere, and its attributes are
    by name."""
    assert span.context is not None
    line: dict[str, Any] = {
        "trace_id": format_trace_id(span.context.trace_id),
        "span_id": format_span_id(span.context.span_id),
        "parent_id": None if span.parent is None else format_span_id(span.parent.span_id),
        "name": span.name,
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "error": None if span.status.is_ok else span.status.description or "",
        "attributes": dict(span.attributes or {}),
        "events": [
            {"name": e.name, "at_ns": e.timestamp, "attributes": dict(e.attributes or {})}
            for e in span.events
        ],
    }
    return msgspec.json.encode(line)
