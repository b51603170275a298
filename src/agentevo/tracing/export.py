"""Stored calls as spans in a file, for a run that was not traced while it ran.

Names, trace ids and span ids are those that the run's own tracer gives (tracing/spans.py), so what
is exported twice, or was traced as well, are the same spans. Of a run that was never traced the
trace ids are made from the name of its first process, which no other run has.

Not promised: what only a tracer sees. A stored call does not know of the request that asked for it
at the gateway, of the attempt of several agents that it is part of, or what the policy was told;
`trajectories` has that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from agentevo.progress import bar
from agentevo.store import Store
from agentevo.store.export import whole_file
from agentevo.store.trace_context import trace_of
from agentevo.tracing import otlp_json
from agentevo.tracing.opening import BATCH, LENGTH, kept_run_id, source
from agentevo.tracing.span import Span
from agentevo.tracing.spans import RunFacts, Spans, attempt_of
from agentevo.tracing.texts import Texts


class Exported(NamedTuple):
    """How many calls became spans, and how many have no end: they run, or their process was
    killed."""

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
    at all: a line is a request of up to BATCH spans, in OTLP's JSON, or one span.

    `run.id` is left out: `folder` has it, or the calls. `contents`: spans hold what tools, scorers
    and programs were given and wrote. Raises StoreError for a path that can't be written.
    """
    made: Spans | None = None
    batch: list[Span] = []
    num_spans = num_unended = 0
    resource = source(of_this_process=False)
    with whole_file(out) as file, bar("trajectories export", await store.num_calls()) as read:

        def write() -> None:
            if batch and requests:
                file.write(otlp_json.encoded(batch, resource) + b"\n")
            elif batch:
                file.write(b"".join(_line(span) + b"\n" for span in batch))
            batch.clear()

        async for stored in store.calls():
            call = stored.call
            read.advance()
            if made is None:
                run = run._replace(id=kept_run_id(folder) or call.id.rpartition("-")[0])
                made = Spans(run, Texts(LENGTH), contents=contents)

            if call.ended_at is None:
                num_unended += 1
                continue

            trace = trace_of(run.id, attempt_of(call.trajectory_id), 1.0)
            batch.append(made.of(call, trace))
            num_spans += 1

            if len(batch) == BATCH:
                write()

        write()

    return Exported(num_spans, num_unended)


def _line(span: Span) -> bytes:
    """A span on its own, its ids in hexadecimal as everywhere, its attributes by name."""
    told: dict[str, Any] = {
        "trace_id": f"{span.trace_id:032x}",
        "span_id": f"{span.span_id:016x}",
        "parent_id": None if span.parent_id is None else f"{span.parent_id:016x}",
        "name": span.name,
        "start_ns": span.start_ns,
        "end_ns": span.end_ns,
        "error": span.message if span.is_error else None,
        "attributes": span.attributes,
        "events": span.events,
    }
    return msgspec.json.encode(told)
