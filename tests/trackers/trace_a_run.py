"""Traces a run that ends at once, into MLflow; reads by MLflow's own API what has arrived.

python trace_a_run.py URI ATTEMPTS: a database that need not be there, or a server. Prints JSON:
the spans of each trace that was found, and what the tracer has told.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from agentevo.store.call_log import AttemptCalls, CallLog, record_call
from agentevo.tracing.mlflow import mlflow_exporter
from agentevo.tracing.opening import source
from agentevo.tracing.spans import RunFacts, Spans
from agentevo.tracing.texts import Texts
from agentevo.tracing.tracer import Tracer

EXPERIMENT = "agentevo-traces"
CALLS = 3
"""Of an attempt, besides itself."""


class Nowhere:
    """A store of calls that keeps none."""

    async def write_calls(self, calls: Any) -> None: ...
    async def renew_calls(self, recorder: str) -> None: ...
    async def close(self) -> None: ...


async def run(uri: str, attempts: int) -> tuple[list[str], float]:
    """What the tracer has told, and how long the end took."""
    told: list[str] = []
    facts = RunFacts("short", f"run-{time.time_ns()}", "tiny", False)
    exporter = mlflow_exporter(uri, EXPERIMENT, source())
    spans = Spans(facts, Texts(1000), contents=False)
    tracer = Tracer(exporter, spans, run_id=facts.id, flush_s=120.0, tell=told.append)

    async def nowhere() -> Any:
        return Nowhere()

    async with tracer:
        async with CallLog(nowhere, tracing=tracer) as log:
            for number in range(attempts):
                with AttemptCalls(log, f"t/train@1#{number}").attempt("Player"):
                    for _ in range(CALLS):
                        with record_call("policy", "generate"):
                            pass
        ended = time.monotonic()
    return told, time.monotonic() - ended


def found(uri: str) -> list[int]:
    """How many spans each trace has."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    numbers: list[int] = []
    token = None
    while True:
        page = client.search_traces(
            locations=[experiment.experiment_id], max_results=100, page_token=token
        )
        numbers += [len(trace.data.spans) for trace in page]
        token = page.token
        if not token:
            return numbers


if __name__ == "__main__":
    told, end_s = asyncio.run(run(sys.argv[1], int(sys.argv[2])))
    print(json.dumps({"traces": found(sys.argv[1]), "told": told, "end_s": end_s}))
